"""M5: injects one fault after the other under load, and heals it."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cachefs.errors import DaemonUnavailable
from cachefs.messages import Empty
from cachefs.rpc import CLUSTER
from cachefs_bench.cluster.run import (
    READ_DEADLINE,
    BoundCheck,
    ClusterLoad,
    ClusterRun,
    check_at_most,
    document,
    problem_document,
    run_cluster,
)
from cachefs_bench.cluster.steady import ReportLine, epoch_timeout
from cachefs_bench.lab.bridge import Bridge
from cachefs_bench.lab.job import JobSettings, LabJob, LabRank, start_job
from cachefs_bench.lab.scratch_node import DATASET
from cachefs_bench.lab.switch import LabSwitch

PARTITION: Final = "partition"
ETCD: Final = "etcd"
STOPPED: Final = "stopped"
LOSS: Final = "loss"
LATENCY: Final = "latency"
FAULTS: Final = (PARTITION, ETCD, STOPPED, LOSS, LATENCY)
_LOSS: Final = 0.3
_LATENCY: Final = 0.025
# Seconds beyond its deadline in which a read ends: a busy machine, and the way back through the kernel.
_LATE_SECONDS: Final = 5.0
# The cluster has converged when for this many seconds no read failed or took long, and the origin received no more
# requests than in as many seconds before, plus _EXTRA_REQUESTS.
_QUIET_SECONDS: Final = 5.0
_EXTRA_REQUESTS: Final = 3
_CONVERGE_SECONDS: Final = 60.0


def m5(
    load: ClusterLoad, work: Path, report: ReportLine, seconds: float, only: Sequence[str] = FAULTS
) -> dict[str, Any]:
    """Inject each fault for *seconds*. Faults that need delays run on a cluster of their own, over a switch in user
    space."""
    capacity = max(load.capacity, load.nodes / (load.nodes - 1))
    load = replace(load, source="etcd", capacity=capacity)
    found: list[dict[str, Any]] = []
    for network, faults in (("bridge", [one for one in only if one != LATENCY]), ("switch", [LATENCY])):
        chosen = [one for one in faults if one in only]
        if chosen:
            directory = work / network
            directory.mkdir()
            found += _inject_faults(replace(load, network=network), directory, report, seconds, chosen)
    checks = [check for one in found for check in one.pop("checks")]
    return document("m5", load, checks, faults=found)


def _inject_faults(
    load: ClusterLoad, work: Path, report: ReportLine, seconds: float, faults: Sequence[str]
) -> list[dict[str, Any]]:
    one_epoch = load.files / load.nodes / load.rate
    # More than the job can read meanwhile.
    epochs = 2 + math.ceil(2 * len(faults) * (seconds + _CONVERGE_SECONDS) / one_epoch)
    settings = JobSettings("train", DATASET, load.files, epochs, rate=load.rate)
    with run_cluster(load, work) as run, start_job(settings, run.nodes) as job:
        for number in range(2):
            job.run_epoch(number, epoch_timeout(settings, load.nodes))
        for rank in job.ranks:
            rank.start_epoch("on")
        return [_inject_fault(run, job, fault, report, seconds) for fault in faults]


def _inject_fault(run: ClusterRun, job: LabJob, fault: str, report: ReportLine, seconds: float) -> dict[str, Any]:
    """Inject one fault, heal it, and wait until the cluster has converged."""
    report(f"{fault} for {seconds:.0f} s")
    *others, hit = job.ranks
    requests_before = run.origin_counters().requests
    time.sleep(_QUIET_SECONDS)
    usual = run.origin_counters().requests - requests_before
    before = run.read_counters()
    with _FAULTS[fault](run):
        _wait(seconds, lambda: all(rank.is_running for rank in job.ranks))
        problems = sorted({problem for node in run.nodes[:-1] if (problem := _problem(run, node.name))})
    healed = run.read_counters()
    readers = [hit, *_rejoin_reader(job, hit, others)]
    converged = _wait_converged(run, job, healed.when, usual)
    after = run.read_counters()
    alone, healthy = (
        problem_document([trouble for rank in ranks for trouble in rank.progress.troubles], before.when)
        for ranks in (readers, others)
    )
    report(
        f"  others: {healthy['errors']} errors, longest {healthy['longest_s']:.1f} s; the one that was hit: "
        f"{alone['errors']} errors, longest {alone['longest_s']:.1f} s; converged after "
        f"{'never' if converged is None else f'{converged:.0f} s'}"
    )
    hits_all_nodes = fault in (ETCD, LATENCY)
    other_errors = healthy["errors"] + (alone["errors"] if hits_all_nodes else 0)
    checks: list[BoundCheck] = [
        check_at_most(f"{fault}: wrong reads", alone["wrong"] + healthy["wrong"], 0),
        check_at_most(f"{fault}: errors on other nodes", other_errors, 0),
        check_at_most(
            f"{fault}: longest read, seconds",
            max(alone["longest_s"], healthy["longest_s"]),
            READ_DEADLINE + _LATE_SECONDS,
        ),
        check_at_most(f"{fault}: seconds to converge", math.inf if converged is None else converged, _CONVERGE_SECONDS),
    ]  # fmt: skip
    return {
        "fault": fault, "others": healthy, "hit": alone, "said": problems, "converged_after_s": converged,
        "usual_origin_requests_per_s": usual / _QUIET_SECONDS,
        "origin_bytes_of_dataset": {
            "meanwhile": (healed.origin_bytes - before.origin_bytes) / run.load.bytes,
            "until it converged": (after.origin_bytes - healed.origin_bytes) / run.load.bytes,
        },
        "checks": checks,
    }  # fmt: skip


def _rejoin_reader(job: LabJob, hit: LabRank, others: Sequence[LabRank]) -> list[LabRank]:
    """Replace the reader that was held up for more than an epoch by one that joins the others in their epoch: ranks of
    a job run in step, so a job restarts a rank there."""
    there = max(one.progress.epoch for one in others)
    if hit.progress.epoch >= there - 1:
        return []
    hit.stop(kill=True)
    back = job.replace_rank(hit, there + 1)
    back.start_epoch("on")
    return [back]


@contextmanager
def _partition_node(run: ClusterRun) -> Iterator[None]:
    assert isinstance(run.network, Bridge | LabSwitch)
    run.network.cut_host(len(run.nodes) - 1)
    try:
        yield
    finally:
        run.network.restore_links()


@contextmanager
def _stop_etcd(run: ClusterRun) -> Iterator[None]:
    assert run.cluster.etcd is not None
    run.cluster.etcd.stop()
    try:
        yield
    finally:
        run.cluster.etcd.start()


@contextmanager
def _suspend_peer(run: ClusterRun) -> Iterator[None]:
    run.nodes[-1].suspend()
    try:
        yield
    finally:
        run.nodes[-1].resume()


@contextmanager
def _lose_packets(run: ClusterRun) -> Iterator[None]:
    assert isinstance(run.network, Bridge)
    run.network.set_offload(False)
    run.network.drop_packets(len(run.nodes) - 1, _LOSS)
    try:
        yield
    finally:
        run.network.restore_links()
        run.network.set_offload(True)


@contextmanager
def _delay_frames(run: ClusterRun) -> Iterator[None]:
    assert isinstance(run.network, LabSwitch)
    run.network.delay_frames(_LATENCY)
    try:
        yield
    finally:
        run.network.delay_frames(0)


_FAULTS: Final = {
    PARTITION: _partition_node, ETCD: _stop_etcd, STOPPED: _suspend_peer, LOSS: _lose_packets, LATENCY: _delay_frames,
}  # fmt: skip


def _wait_converged(run: ClusterRun, job: LabJob, healed: float, usual: int) -> float | None:
    """Return the seconds until the cluster has converged; None: not in time. Then all nodes are members for all, no
    read fails or takes long, and the origin receives no more than *usual* requests in _QUIET_SECONDS."""
    requests_before, since = run.origin_counters().requests, time.monotonic()
    while (now := time.monotonic()) < healed + _CONVERGE_SECONDS:
        late = max((one.when + one.seconds for rank in job.ranks for one in rank.progress.troubles), default=0.0)
        requests = run.origin_counters().requests
        if requests - requests_before > usual + _EXTRA_REQUESTS or late > since or not _all_see_all(run):
            requests_before, since = requests, now
        elif now - since > _QUIET_SECONDS:
            return since - healed
        time.sleep(0.25)
    return None


def _all_see_all(run: ClusterRun) -> bool:
    try:
        views = [node.client.call(CLUSTER, Empty(), timeout=5) for node in run.nodes]
    except DaemonUnavailable:
        return False
    return all(not view.problem and sum(member.placing for member in view.members) == len(run.nodes) for view in views)


def _problem(run: ClusterRun, name: str) -> str:
    """Return the problem that a node reports with its cluster."""
    node = next(one for one in run.nodes if one.name == name)
    try:
        return node.client.call(CLUSTER, Empty(), timeout=5).problem
    except DaemonUnavailable:
        return "the daemon does not answer"


def _wait(seconds: float, well: Callable[[], bool]) -> None:
    """Wait, but return early if the readers have ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and well():
        time.sleep(0.2)
