"""A warm-up of the whole cluster: counts the origin's bytes and each node's part; then the same while a node is
killed."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cachefs.errors import CachefsError
from cachefs.messages import Empty, WarmupProgress, WarmupRequest
from cachefs.rpc import WARMUP, WARMUP_LIST
from cachefs_bench.cluster.membership_change import BlockPlacement, find_blocks
from cachefs_bench.cluster.run import ClusterLoad, check_at_least, check_at_most, document, run_cluster
from cachefs_bench.cluster.steady import ReportLine
from cachefs_bench.lab.node import LabNode
from cachefs_bench.lab.scratch_node import DATASET
from cachefs_bench.lab.slow_link import LinkLimits

_MIN_NODES: Final = 2
# Room of a node beyond its part: for the part of a node that dies, and for what is held back for readers.
_SLACK: Final = 0.75
# Seconds of the warm-up in which a node is killed, if nothing happened: long enough for the others to notice.
_KILLED_SECONDS: Final = 20.0
_TIMEOUT: Final = 600.0
_POLL_SECONDS: Final = 0.2


def warm_up(load: ClusterLoad, work: Path, report: ReportLine) -> dict[str, Any]:
    """Warm all nodes up, undisturbed; then on another cluster, where a node is killed in the middle."""
    if load.nodes < _MIN_NODES or load.source == "none":
        raise CachefsError("this scenario needs a cluster of two nodes or more")
    load = replace(load, slack=_SLACK if load.slack < 0 else load.slack)
    (work / "cold").mkdir()
    with run_cluster(load, work / "cold") as run:
        began = run.read_counters()
        last = _watch(run.nodes[0], _begin(run.nodes[0]), report)
        grown = run.read_counters() - began
        placed, hedged = find_blocks(run.nodes), _hedged(run.nodes)
    requests = f"{grown.origin_requests:,} requests, {hedged:,} of them hedges"
    report(f"  {grown.when:.1f} s, origin {grown.origin_bytes / load.bytes:.4f} of the dataset, {requests}")
    (work / "kill").mkdir()
    with run_cluster(replace(load, origin=LinkLimits(bandwidth=load.bytes / _KILLED_SECONDS)), work / "kill") as run:
        asked, lost = run.nodes[0], run.nodes[-1]
        began = run.read_counters()
        number = _begin(lost)
        for progress in _progress(asked, number):
            if progress.blocks >= load.files // 2:
                break
        before, kept = run.read_counters(), find_blocks(run.nodes).belong[lost.name]
        lost_blocks = lost.status().fetched_blocks
        report(f"killing {lost.name}, where the warm-up was requested, at {progress.blocks:,} of {load.files:,} blocks")
        lost.reboot()
        survivor = _watch(asked, number, report)
        after = run.read_counters(run.nodes[:-1])
        held = find_blocks(run.nodes[:-1])
    again = (after.origin_bytes - began.origin_bytes) / load.bytes
    report(f"  {after.when - began.when:.1f} s, origin {again:.4f} of the dataset")
    checks = [
        check_at_most("origin bytes / dataset bytes", grown.origin_bytes / load.bytes, 1.01),
        check_at_most("requests besides hedges / blocks", (grown.origin_requests - hedged) / load.files, 1.0),
        check_at_least("blocks on the nodes that keep them / all", sum(placed.at_home.values()) / load.files, 1.0),
        check_at_most("deviation of the worst node from its part", _deviation(placed), 0.1),
        check_at_most("blocks that failed or had no room", last.failed + last.skipped, 0),
        check_at_least("a node killed: blocks on the others / all", 1 - held.nowhere / load.files, 1.0),
        check_at_most("a node killed: blocks that failed or had no room", survivor.failed + survivor.skipped, 0),
        check_at_most("a node killed: origin bytes / dataset bytes", again, 1.01 + kept / load.files),
    ]
    return document(
        "warmup", load, checks,
        undisturbed={"seconds": grown.when, "hedged_requests": hedged, "held": placed.held, "belong": placed.belong,
                     "deviation_from_equal": placed.max_deviation(), "state": last.state},
        killed={
            "seconds": after.when - began.when, "state": survivor.state, "held": held.held, "lost_blocks": lost_blocks,
            "origin_bytes_of_dataset": again,
            "origin_bytes_before_the_kill": (before.origin_bytes - began.origin_bytes) / load.bytes,
        },
    )  # fmt: skip


def _hedged(nodes: Iterable[LabNode]) -> int:
    """Return the requests that nodes have sent a second time, since an origin was slow to respond to the first."""
    return sum(endpoint.hedged for node in nodes for endpoint in node.status().endpoints)


def _deviation(placed: BlockPlacement) -> float:
    """Return by which part of what it is to keep the worst node holds more or fewer blocks."""
    return max(abs(placed.held[name] - count) / max(1, count) for name, count in placed.belong.items())


def _begin(node: LabNode) -> int:
    """Begin a warm-up of the cluster on a node. Returns its number."""
    request = WarmupRequest(dataset=DATASET, cluster=True, wait=False)
    return next(iter(node.client.stream_responses(WARMUP, request, timeout=_TIMEOUT))).id


def _progress(node: LabNode, number: int) -> Iterator[WarmupProgress]:
    """Yield the progress that a node shows, until the end. Raises CachefsError after a while."""
    until = time.monotonic() + _TIMEOUT
    while time.monotonic() < until:
        for one in node.client.call(WARMUP_LIST, Empty(), timeout=10).warmups:
            if one.id == number:
                yield one
                if one.state not in ("waiting", "running"):
                    return
        time.sleep(_POLL_SECONDS)
    raise CachefsError(f"the warm-up has not ended after {_TIMEOUT:.0f} s")


def _watch(node: LabNode, number: int, report: ReportLine) -> WarmupProgress:
    """Report the progress until the end. Returns the last."""
    reasons: set[str] = set()
    for last in _progress(node, number):
        if last.reason and last.reason not in reasons and len(reasons) < 5:
            reasons.add(last.reason)
            report(f"  {last.blocks:,} of {last.blocks_total:,} blocks: {last.reason}")
    report(f"  {last.state}: {last.blocks:,} of {last.blocks_total:,} blocks")
    return last
