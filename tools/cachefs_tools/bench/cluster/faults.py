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
from cachefs_tools.bench.cluster.figures import Check, at_most, document, trouble_document
from cachefs_tools.bench.cluster.run import READ_DEADLINE, Load, Run, running
from cachefs_tools.bench.cluster.steady import Say, patience
from cachefs_tools.bench.directory_node import DATASET
from cachefs_tools.lab.bridge import Bridge
from cachefs_tools.lab.job import Job, JobSettings, Rank, started_job
from cachefs_tools.lab.switch import Switch

PARTITION: Final = "partition"
ETCD: Final = "etcd"
STOPPED: Final = "stopped"
LOSS: Final = "loss"
LATENCY: Final = "latency"
FAULTS: Final = (PARTITION, ETCD, STOPPED, LOSS, LATENCY)
_LOSS: Final = 0.3
_LATENCY: Final = 0.025
# Seconds beyond its deadline in which a read ends: a busy machine, and the way back through the kernel.
_LATE: Final = 5.0
# The cluster has converged when for this many seconds no read failed or took long, and the origin received no more
# requests than in as many seconds before, plus _FEW.
_QUIET: Final = 5.0
_FEW: Final = 3
_CONVERGE_SECONDS: Final = 60.0


def m5(load: Load, work: Path, say: Say, seconds: float, only: Sequence[str] = FAULTS) -> dict[str, Any]:
    """Inject each fault for *seconds*. Faults that need delays run on a cluster of their own, over a switch in user
    space."""
    capacity = max(load.capacity, load.nodes / (load.nodes - 1))
    load = replace(load, source="etcd", capacity=capacity)
    found: list[dict[str, Any]] = []
    for network, faults in (("bridge", [one for one in only if one != LATENCY]), ("switch", [LATENCY])):
        chosen = [one for one in faults if one in only]
        if chosen:
            place = work / network
            place.mkdir()
            found += _on(replace(load, network=network), place, say, seconds, chosen)
    checks = [check for one in found for check in one.pop("checks")]
    return document("m5", load, checks, faults=found)


def _on(load: Load, work: Path, say: Say, seconds: float, faults: Sequence[str]) -> list[dict[str, Any]]:
    one_epoch = load.files / load.nodes / load.rate
    # More than the job can read meanwhile.
    epochs = 2 + math.ceil(2 * len(faults) * (seconds + _CONVERGE_SECONDS) / one_epoch)
    settings = JobSettings("train", DATASET, load.files, epochs, rate=load.rate)
    with running(load, work) as run, started_job(settings, run.nodes) as job:
        for number in range(2):
            job.epoch(number, patience(settings, load.nodes))
        for rank in job.ranks:
            rank.go("on")
        return [_one(run, job, fault, say, seconds) for fault in faults]


def _one(run: Run, job: Job, fault: str, say: Say, seconds: float) -> dict[str, Any]:
    """Inject one fault, heal it, and wait until the cluster has converged."""
    say(f"{fault} for {seconds:.0f} s")
    *others, hit = job.ranks
    asked = run.origin().requests
    time.sleep(_QUIET)
    usual = run.origin().requests - asked
    before = run.take()
    with _FAULTS[fault](run):
        _wait(seconds, lambda: all(rank.runs for rank in job.ranks))
        problems = sorted({problem for node in run.nodes[:-1] if (problem := _problem(run, node.name))})
    healed = run.take()
    readers = [hit, *_in_step(job, hit, others)]
    converged = _converged(run, job, healed.when, usual)
    after = run.take()
    alone, rest = (
        trouble_document([one for rank in ranks for one in rank.progress.troubles], before.when)
        for ranks in (readers, others)
    )
    say(
        f"  others: {rest['errors']} errors, longest {rest['longest_s']:.1f} s; the one that was hit: "
        f"{alone['errors']} errors, longest {alone['longest_s']:.1f} s; converged after "
        f"{'never' if converged is None else f'{converged:.0f} s'}"
    )
    everybody = fault in (ETCD, LATENCY)
    checks: list[Check] = [
        at_most(f"{fault}: wrong reads", alone["wrong"] + rest["wrong"], 0),
        at_most(f"{fault}: errors on other nodes", rest["errors"] + (alone["errors"] if everybody else 0), 0),
        at_most(
            f"{fault}: longest read, seconds", max(alone["longest_s"], rest["longest_s"]), READ_DEADLINE + _LATE
        ),
        at_most(f"{fault}: seconds to converge", math.inf if converged is None else converged, _CONVERGE_SECONDS),
    ]  # fmt: skip
    return {
        "fault": fault, "others": rest, "hit": alone, "said": problems, "converged_after_s": converged,
        "usual_origin_requests_per_s": usual / _QUIET,
        "origin_bytes_of_dataset": {
            "meanwhile": (healed.origin_bytes - before.origin_bytes) / run.load.bytes,
            "until it converged": (after.origin_bytes - healed.origin_bytes) / run.load.bytes,
        },
        "checks": checks,
    }  # fmt: skip


def _in_step(job: Job, hit: Rank, others: Sequence[Rank]) -> list[Rank]:
    """Replace the reader that was held up for more than an epoch by one that joins the others in their epoch: ranks of
    a job run in step, so a job restarts a rank there."""
    there = max(one.progress.epoch for one in others)
    if hit.progress.epoch >= there - 1:
        return []
    hit.stop(kill=True)
    back = job.replace(hit, there + 1)
    back.go("on")
    return [back]


@contextmanager
def _partition(run: Run) -> Iterator[None]:
    assert isinstance(run.network, Bridge | Switch)
    run.network.cut(len(run.nodes) - 1)
    try:
        yield
    finally:
        run.network.heal()


@contextmanager
def _etcd_stops(run: Run) -> Iterator[None]:
    assert run.cluster.etcd is not None
    run.cluster.etcd.stop()
    try:
        yield
    finally:
        run.cluster.etcd.start()


@contextmanager
def _peer_stops(run: Run) -> Iterator[None]:
    run.nodes[-1].suspend()
    try:
        yield
    finally:
        run.nodes[-1].resume()


@contextmanager
def _loss(run: Run) -> Iterator[None]:
    assert isinstance(run.network, Bridge)
    run.network.offload(False)
    run.network.lose(len(run.nodes) - 1, _LOSS)
    try:
        yield
    finally:
        run.network.heal()
        run.network.offload(True)


@contextmanager
def _latency(run: Run) -> Iterator[None]:
    assert isinstance(run.network, Switch)
    run.network.delay(_LATENCY)
    try:
        yield
    finally:
        run.network.delay(0)


_FAULTS: Final = {
    PARTITION: _partition, ETCD: _etcd_stops, STOPPED: _peer_stops, LOSS: _loss, LATENCY: _latency,
}  # fmt: skip


def _converged(run: Run, job: Job, healed: float, usual: int) -> float | None:
    """Return the seconds until the cluster has converged; None: not in time. Then all nodes are members for all, no
    read fails or takes long, and the origin receives no more than *usual* requests in _QUIET seconds."""
    asked, since = run.origin().requests, time.monotonic()
    while (now := time.monotonic()) < healed + _CONVERGE_SECONDS:
        late = max((one.when + one.seconds for rank in job.ranks for one in rank.progress.troubles), default=0.0)
        requests = run.origin().requests
        if requests - asked > usual + _FEW or late > since or not _all_see_all(run):
            asked, since = requests, now
        elif now - since > _QUIET:
            return since - healed
        time.sleep(0.25)
    return None


def _all_see_all(run: Run) -> bool:
    try:
        views = [node.client.call(CLUSTER, Empty(), timeout=5) for node in run.nodes]
    except DaemonUnavailable:
        return False
    return all(not view.problem and sum(member.placing for member in view.members) == len(run.nodes) for view in views)


def _problem(run: Run, name: str) -> str:
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
