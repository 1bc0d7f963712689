"""Shares of an origin: three jobs that want 3, 2 and 1 parts of what the origin gives half of.

Each job reads samples of its own, all cold, with a rank on each node. First all have the same weight, then 3, 2 and 1,
set while they run; then the origin gives more than all want. (In another order, jobs would at first read what they
have fetched ahead.)
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from cachefs.job_messages import JobName, JobPriorityRequest
from cachefs.planning.requests.shares import max_min_shares
from cachefs.rpc import JOB_PRIORITY, JOB_SHOW
from cachefs_bench.cluster.run import (
    BoundCheck,
    ClusterLoad,
    ClusterRun,
    check_at_least,
    check_at_most,
    document,
    problem_document,
    run_cluster,
)
from cachefs_bench.lab.job import JobSettings, LabJob, start_job
from cachefs_bench.lab.scratch_node import DATASET
from cachefs_bench.lab.slow_link import LinkLimits
from cachefs_bench.sample_data import sample_name

# Parts that the jobs want, by name.
_PARTS: Final = {"a": 3, "b": 2, "c": 1}
_WEIGHTS: Final = {"a": 3.0, "b": 2.0, "c": 1.0}
# Seconds for which a phase is measured.
_MEASURED_SECONDS: Final = 20.0
# Bandwidth of the link, as a multiple of what all jobs want: too little, and enough.
_TOO_LITTLE: Final = 0.5
_ENOUGH: Final = 1.25
# Samples that a job has beyond those that it reads, as a share of them: blocks are fetched ahead of the readers.
_SPARE: Final = 0.3
_LATENCY: Final = 0.01
# Connections of all nodes to the origin, and threads of all ranks of a job. The links are slow: with 64 connections of
# each of four nodes, a sample would take seconds on the link, and so would each change of the shares.
_CONNECTIONS: Final = 64
_THREADS: Final = 8


@dataclass(frozen=True, slots=True)
class _Phase:
    """A part of the run."""

    name: str
    weights: Mapping[str, float]
    bandwidth: float  # of the link, as a multiple of what all jobs want
    # Seconds until it is measured.
    settle: float

    def expected(self, rate: float) -> dict[str, float]:
        """Return the samples a second that each job is to get. rate: samples a second that one part is."""
        wants = {job: parts * rate for job, parts in _PARTS.items()}
        return max_min_shares(wants, self.weights, self.bandwidth * sum(wants.values()))


_PHASES: Final = (
    _Phase("the same weights", {}, _TOO_LITTLE, 10.0),
    _Phase("weights 3, 2 and 1", _WEIGHTS, _TOO_LITTLE, 8.0),
    _Phase("enough for all", _WEIGHTS, _ENOUGH, 16.0),
)


def shares(load: ClusterLoad, work: Path, report: Callable[[str], None]) -> dict[str, Any]:
    """Run three jobs behind an origin that gives half of what they want. `load.rate` is what the job with one part
    wants, all of its ranks together."""
    counts = {job: _samples_of(job, load.rate) for job in _PARTS}
    load = replace(
        load,
        files=sum(counts.values()),
        epochs=1,
        origin=_link(load, _TOO_LITTLE),
        connections=max(4, _CONNECTIONS // load.nodes),
    )
    checks: list[BoundCheck] = []
    phases = []
    with ExitStack() as stack:
        run = stack.enter_context(run_cluster(load, work))
        jobs: dict[str, LabJob] = {}
        first = 0
        for name, count in counts.items():
            rate = _PARTS[name] * load.rate / load.nodes
            paths = tuple(sample_name(number).encode() for number in range(first, first + count))
            settings = JobSettings(
                name, DATASET, count, 1, rate=rate, threads=max(2, _THREADS // load.nodes), begin=first, paths=paths
            )
            jobs[name] = stack.enter_context(start_job(settings, run.nodes))
            first += count
        for job in jobs.values():
            job.begin_epoch()
        for phase in _PHASES:
            found = _measure(run, jobs, phase)
            phases.append(found)
            report(f"  {phase.name}: {_line(found)}")
            checks += _checks(found, phase)
        problems = problem_document(
            (one for job in jobs.values() for rank in job.ranks for one in rank.progress.troubles), 0
        )
    checks.append(check_at_most("reads that failed or were wrong", problems["errors"] + problems["wrong"], 0))
    return document("shares", load, checks, phases=phases, problems=problems)


def _samples_of(job: str, rate: float) -> int:
    read = sum(phase.expected(rate)[job] * (phase.settle + _MEASURED_SECONDS) for phase in _PHASES)
    return round((1 + _SPARE) * read)


def _link(load: ClusterLoad, bandwidth: float) -> LinkLimits:
    wanted = sum(_PARTS.values()) * load.rate * load.size
    return LinkLimits(latency=_LATENCY, bandwidth=bandwidth * wanted)


def _measure(run: ClusterRun, jobs: Mapping[str, LabJob], phase: _Phase) -> dict[str, Any]:
    link = _link(run.load, phase.bandwidth)
    run.throttle.set_limits(link)
    for name, weight in phase.weights.items():
        run.nodes[0].client.call(JOB_PRIORITY, JobPriorityRequest(job=name, weight=weight))
    time.sleep(phase.settle)
    before, sent, began = _progress(run, jobs), run.origin_counters().bytes, time.monotonic()
    time.sleep(_MEASURED_SECONDS)
    after, sent_later, ended = _progress(run, jobs), run.origin_counters().bytes, time.monotonic()
    found = {name: before[name].rates_until(after[name], run.load.size) for name in jobs}
    return {
        "phase": phase.name,
        "weights": dict(phase.weights),
        "expected": phase.expected(run.load.rate),
        "fetched_per_second": {name: fetched for name, (fetched, _) in found.items()},
        "read_per_second": {name: read for name, (_, read) in found.items()},
        "link_used": (sent_later - sent) / (ended - began) / link.bandwidth,
    }


@dataclass(frozen=True, slots=True)
class _JobProgress:
    """The progress of a job at one moment."""

    # Bytes that all nodes have fetched for it, and when that was asked.
    fetched: int
    when: float
    # The last reported moment and number of reads of each rank.
    positions: list[tuple[float, int]]

    def rates_until(self, later: "_JobProgress", size: int) -> tuple[float, float]:
        """Return the samples of *size* bytes that were fetched, and that were read, each second until *later*."""
        read = sum(
            (late[1] - early[1]) / (late[0] - early[0])
            for early, late in zip(self.positions, later.positions, strict=True)
        )
        return (later.fetched - self.fetched) / size / (later.when - self.when), read


def _progress(run: ClusterRun, jobs: Mapping[str, LabJob]) -> dict[str, _JobProgress]:
    found = {}
    for name, job in jobs.items():
        views = [node.client.call(JOB_SHOW, JobName(job=name)) for node in run.nodes]
        fetched = sum(share.fetched for view in views for share in view.origins)
        positions = [(rank.progress.when, rank.progress.position) for rank in job.ranks]
        found[name] = _JobProgress(fetched, time.monotonic(), positions)
    return found


def _line(found: Mapping[str, Any]) -> str:
    gets = (
        f"{name} got {found['fetched_per_second'][name]:.1f} of {found['expected'][name]:.1f} samples/s, and read "
        f"{found['read_per_second'][name]:.1f}"
        for name in _PARTS
    )
    return f"{'; '.join(gets)}; link {found['link_used']:.3f} used"


def _checks(found: Mapping[str, Any], phase: _Phase) -> list[BoundCheck]:
    if phase.bandwidth >= 1:
        reads = {name: found["read_per_second"][name] / wants for name, wants in found["expected"].items()}
        return [check_at_least(f"{phase.name}: least of what a job reads / wants", min(reads.values()), 0.99)]
    # What a job gets, of what all get: the link's own rate is checked apart.
    given = sum(found["fetched_per_second"].values()) / sum(found["expected"].values())
    relative = {name: found["fetched_per_second"][name] / share / given for name, share in found["expected"].items()}
    return [
        check_at_most(f"{phase.name}: largest deviation of a job's share", _deviation(relative), 0.05),
        check_at_least(f"{phase.name}: part of the link that is used", found["link_used"], 0.95),
    ]


def _deviation(relative: Mapping[str, float]) -> float:
    return max(abs(one - 1) for one in relative.values())
