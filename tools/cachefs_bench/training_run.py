"""One run of `cachefs-bench train`: training jobs read through the mount of an empty node with a slow origin.

`run_document` makes the results one JSON-serialisable document. Utilisation is defined as in MLPerf Storage: seconds of
computing, as the batches should take, over seconds of wall clock, from the moment the job asks for its first batch to
the end of its last epoch.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy
from numpy.typing import NDArray

from cachefs.errors import CachefsError, DaemonUnavailable
from cachefs.job_messages import JobName, JobView
from cachefs.messages import Empty
from cachefs.planning.sequences.sampler import epoch_order
from cachefs.rpc import JOB_LIST, STALL_LIST
from cachefs_bench.bounds import belady_reads, least_reads, lru_reads
from cachefs_bench.job_process import run_job_process
from cachefs_bench.origin_server import OriginServer
from cachefs_bench.scenario import Scenario, TrainingJob
from cachefs_bench.training_node import NodeTimeline, TrainingNode, record_node, run_training_node
from cachefs_tools.training_loop import EpochReport, read_report

# Seconds after which jobs count as hung: more than a job takes even if the origin delivers one file at a time.
TIMEOUT_SECONDS: Final = 1800.0


@dataclass(frozen=True, slots=True)
class JobResult:
    """The reports of one job."""

    job: TrainingJob
    epochs: list[EpochReport]  # at least one

    @property
    def first_batch(self) -> float:
        """Time of the job's first batch, in seconds of CLOCK_MONOTONIC."""
        return self.epochs[0].batches[0]


def run_document(scenario: Scenario, capacity: int, jobs: list[JobResult], timeline: NodeTimeline) -> dict[str, Any]:
    """Return the figures of one run. capacity: in samples."""
    first, last = timeline.samples[0], timeline.samples[-1]
    origin = last - first
    since_first_batch = last - timeline.sample_at(min(job.first_batch for job in jobs))
    found, reads = since_first_batch.hits, since_first_batch.hits + since_first_batch.misses
    return {
        "run": scenario.title,
        "scenario": asdict(scenario),
        "capacity_samples": capacity,
        "jobs": [_job_document(scenario, job) for job in jobs],
        "origin": {
            "requests": origin.origin_requests,
            "refused": origin.refused,
            "bytes": origin.origin_bytes,
            "samples": origin.origin_bytes / scenario.shape.size,
            "expected_samples": _expected_fetches(scenario, capacity, jobs),
            "seconds_at_bandwidth": origin.origin_bytes / scenario.limits.bandwidth if scenario.limits.bandwidth else 0,
        },
        "found_on_node_after_first_batch": found / reads if reads else 1.0,
        "epochs": _node_epochs(jobs[0].epochs, timeline),
        "machine": {"cpu_seconds": timeline.cpu_seconds, "busy_cores": timeline.busy_cores},
        "timeline": [[round((sample - first).when, 3), (sample - first).origin_bytes] for sample in timeline.samples],
    }


def view_document(view: JobView) -> dict[str, Any]:
    """Return the daemon's view of a job. The number of known epochs replaces their list: a hooked sampler has no
    end."""
    document: dict[str, Any] = msgspec.to_builtins(view)
    for consumer in document["consumers"]:
        consumer["known_epochs"] = len(consumer["known_epochs"])
    return document


def merged_sequence(scenario: Scenario, jobs: list[JobResult]) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
    """Return the samples that all jobs read, in the order in which reads began; and for each read, the first read of
    its job. Two int64 arrays of shape (reads,).

    The order of batches differs: a loader reads as much as it has room for when an epoch begins.
    """
    orders, times, starts = [], [], []
    for job in jobs:
        spec = scenario.real_sampler_spec(job.job)
        first = min(job.epochs[0].begins)
        for epoch in job.epochs:
            orders.append(epoch_order(spec, epoch.epoch)[: epoch.samples])
            times.append(numpy.array(epoch.begins))
            starts.append(numpy.full(epoch.samples, first))
    when = numpy.concatenate(times)
    order = numpy.argsort(when, kind="stable")
    samples = numpy.concatenate(orders)[order].astype(numpy.int64)
    return samples, numpy.searchsorted(when[order], numpy.concatenate(starts)[order]).astype(numpy.int64)


def _job_document(scenario: Scenario, job: JobResult) -> dict[str, Any]:
    begin, end = job.epochs[0].begin, job.epochs[-1].end
    samples = sum(epoch.samples for epoch in job.epochs)
    compute = samples / scenario.shape.demand
    later, slow = (sum(getattr(epoch, name) for epoch in job.epochs) for name in ("later_reads", "slow_later"))
    return {
        "utilisation": compute / (end - begin),
        "utilisation_after_first_batch": compute / (end - job.first_batch),
        "time_to_first_batch": job.first_batch - begin,
        "seconds": end - begin,
        "samples_per_s": samples / (end - begin),
        "stall_seconds": sum(sum(epoch.waits) for epoch in job.epochs),
        "damaged": sum(epoch.damaged for epoch in job.epochs),
        **_later_epochs(scenario, job.epochs[1:]),
        "fast_after_first_batch": 1 - slow / later if later else 1.0,
        "epochs": [_epoch_document(scenario, epoch) for epoch in job.epochs],
    }


def _later_epochs(scenario: Scenario, epochs: Sequence[EpochReport]) -> dict[str, float]:
    """Return, for the epochs after the first, the seconds of stall per second of computing, and the share of slow
    reads."""
    samples = sum(epoch.samples for epoch in epochs)
    stalled = sum(sum(epoch.waits) for epoch in epochs)
    return {
        "stall_after_first_epoch": stalled * scenario.shape.demand / samples if samples else 0.0,
        "late_after_first_epoch": sum(epoch.slow_reads for epoch in epochs) / samples if samples else 0.0,
    }


def _epoch_document(scenario: Scenario, epoch: EpochReport) -> dict[str, Any]:
    seconds = epoch.end - epoch.begin
    compute = epoch.samples / scenario.shape.demand
    return {
        "seconds": seconds,
        "samples": epoch.samples,
        "utilisation": compute / seconds,
        "stall_seconds": sum(epoch.waits),
        "overslept_seconds": seconds - compute - sum(epoch.waits),
        "longest_stall": max(epoch.waits),
        "waits": [round(wait, 4) for wait in epoch.waits],
        "slow_reads": epoch.slow_reads,
        "slow_after_first_batch": epoch.slow_later,
        "read_ms": {"p50": 1e3 * epoch.read_p50, "p99": 1e3 * epoch.read_p99, "longest": 1e3 * epoch.read_longest},
    }


def _node_epochs(epochs: Sequence[EpochReport], timeline: NodeTimeline) -> list[dict[str, int]]:
    """Return the node's work during each epoch of the first job. The mount reports its counters a moment late."""
    edges = [timeline.samples[0], *(timeline.sample_at(epoch.end) for epoch in epochs[:-1]), timeline.samples[-1]]
    return [
        {"origin_bytes": (end - begin).origin_bytes, "hits": (end - begin).hits, "misses": (end - begin).misses}
        for begin, end in pairwise(edges)
    ]


def _expected_fetches(scenario: Scenario, capacity: int, jobs: list[JobResult]) -> dict[str, float]:
    """Return how many samples must be fetched from the origin.

    Belady's MIN is computed for the jobs' reads, in their order; for several jobs, also with the knowledge that a job
    exists only once it has begun. The closed forms are given for one job that runs to its end.
    """
    files, epochs = scenario.shape.files, scenario.shape.epochs
    samples, known = merged_sequence(scenario, jobs)
    expected: dict[str, float] = {"belady": belady_reads(samples, capacity)}
    if len(jobs) > 1:
        expected["belady_as_jobs_begin"] = belady_reads(samples, capacity, known)
    if len(jobs) == 1 and not jobs[0].job.batches:
        expected["least"] = least_reads(files, min(capacity, files), epochs)
        expected["lru"] = lru_reads(files, capacity, epochs)
    return expected


def run_scenario(scenario: Scenario, server: OriginServer, work: Path) -> dict[str, Any]:
    """Make one run. Returns its results as a JSON-serialisable document. *work* is an empty directory. Raises
    CachefsError if a job fails."""
    try:
        with run_training_node(work, server, scenario) as node:
            with record_node(node) as timeline:
                results, views = _run_jobs(scenario, node, work)
            stalls = node.client.call(STALL_LIST, JobName(job="")).rows
            document = run_document(scenario, node.capacity, results, timeline)
    except DaemonUnavailable as error:
        last_words = (work / "cachefsd.log").read_text(errors="replace")[-1000:].strip()
        raise CachefsError(f"{scenario.title}: {error}; the daemon's log ends: {last_words}") from None
    document["stalls"] = msgspec.to_builtins(stalls)
    document["job_views"] = [view_document(view) for view in views]
    return document


def _run_jobs(scenario: Scenario, node: TrainingNode, work: Path) -> tuple[list[JobResult], list[JobView]]:
    """Run all jobs. Returns their results, and the daemon's views of them shortly before they ended."""
    begin = time.monotonic()
    views: dict[str, JobView] = {}
    with ExitStack() as stack:
        running = []
        for number, job in enumerate(scenario.jobs):
            time.sleep(max(0.0, begin + job.start - time.monotonic()))
            running.append(stack.enter_context(run_job_process(scenario, job, node, work / f"job{number}")))
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while any(process.poll() is None for process in running):
            views.update((view.job, view) for view in node.client.call(JOB_LIST, Empty()).jobs)
            if time.monotonic() > deadline:
                raise CachefsError(f"{scenario.title}: a job did not end within {TIMEOUT_SECONDS:.0f} s")
            time.sleep(0.5)
        for number, process in enumerate(running):
            if process.returncode:
                log = (work / f"job{number}.log").read_text(errors="replace")[-2000:].strip()
                raise CachefsError(f"{scenario.title}: job {number} failed: {log}")
    results = [JobResult(job, read_report(work / f"job{number}.jsonl")) for number, job in enumerate(scenario.jobs)]
    return results, list(views.values())
