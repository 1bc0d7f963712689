"""Training jobs over a mount whose origin is slow: how much of the time does the accelerator compute?

Each run has a new, empty node. Utilisation is MLPerf Storage's: seconds of computing, as the batches should take, over
seconds of wall clock, from the moment the job asks for its first batch to the end of its last epoch.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy
from numpy.typing import NDArray

from cachefs.errors import CachefsError, DaemonUnavailable
from cachefs.job_messages import JobName, JobPublish, JobView, SampleMap
from cachefs.messages import Empty
from cachefs.planning.sequences.sampler import SamplerSpec, epoch_order
from cachefs.rpc import JOB_LIST, JOB_PUBLISH, SOCKET_VARIABLE, STALL_LIST
from cachefs_tools.bench.bounds import belady_reads, least_reads, lru_reads
from cachefs_tools.bench.origin_server import OriginServer
from cachefs_tools.bench.scenario import Job, Scenario
from cachefs_tools.bench.timeline import Timeline, recorded
from cachefs_tools.bench.training import EpochReport
from cachefs_tools.bench.training_node import DATASET, TrainingNode, training_node
from cachefs_tools.scratch_node import WITH_PARENT, wait

# Of a job beyond what it should take with an origin that delivers nothing in parallel: then something hangs.
PATIENCE_SECONDS: Final = 1800.0


@dataclass(frozen=True, slots=True)
class JobResult:
    """epochs: at least one."""

    job: Job
    epochs: list[EpochReport]

    @property
    def first_batch(self) -> float:
        return self.epochs[0].batches[0]


def run(scenario: Scenario, server: OriginServer, work: Path) -> dict[str, Any]:
    """One run, as a JSON-serialisable document. work: an empty directory. Raises CachefsError where a job fails."""
    try:
        with training_node(work, server, scenario) as node:
            with recorded(node) as timeline:
                results, views = _run_jobs(scenario, node, work)
            stalls = node.client.call(STALL_LIST, JobName(job="")).rows
            document = _document(scenario, node.capacity, results, timeline)
    except DaemonUnavailable as error:
        last_words = (work / "cachefsd.log").read_text(errors="replace")[-1000:].strip()
        raise CachefsError(f"{scenario.title}: {error}; the daemon's log ends: {last_words}") from None
    document["stalls"] = msgspec.to_builtins(stalls)
    document["job_views"] = [_view_document(view) for view in views]
    return document


# --- the jobs -----------------------------------------------------------------------------------------------------


def _run_jobs(scenario: Scenario, node: TrainingNode, work: Path) -> tuple[list[JobResult], list[JobView]]:
    """Their results, and what the daemon said of them shortly before they ended."""
    begin = time.monotonic()
    views: dict[str, JobView] = {}
    with ExitStack() as stack:
        running = []
        for number, job in enumerate(scenario.jobs):
            time.sleep(max(0.0, begin + job.start - time.monotonic()))
            running.append(stack.enter_context(_started(scenario, job, node, work / f"job{number}")))
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(process.poll() is None for process in running):
            views.update((view.job, view) for view in node.client.call(JOB_LIST, Empty()).jobs)
            if time.monotonic() > deadline:
                raise CachefsError(f"{scenario.title}: a job did not end within {PATIENCE_SECONDS:.0f} s")
            time.sleep(0.5)
        for number, process in enumerate(running):
            if process.returncode:
                said = (work / f"job{number}.log").read_text(errors="replace")[-2000:].strip()
                raise CachefsError(f"{scenario.title}: job {number} failed: {said}")
    results = [JobResult(job, read_report(work / f"job{number}.jsonl")) for number, job in enumerate(scenario.jobs)]
    return results, list(views.values())


@contextmanager
def _started(scenario: Scenario, job: Job, node: TrainingNode, name: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The job's process, which has published where it should; stopped at the end, with its workers."""
    with name.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            _command(scenario, job, node, name), stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, SOCKET_VARIABLE: str(node.socket)},
        )  # fmt: skip
    try:
        if scenario.publishing == "spec":
            node.client.call(JOB_PUBLISH, _publication(scenario, job, name.name, process.pid))
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        wait(process)


def _command(scenario: Scenario, job: Job, node: TrainingNode, name: Path) -> list[str]:
    shape = scenario.shape
    script = "torch_job" if scenario.loader == "torch" else "plain_job"
    front = [str(Path(sys.executable).with_name("cachefs")), "run", "--"] if scenario.publishing == "run" else []
    return [
        *WITH_PARENT, *front, sys.executable, "-m", f"cachefs_tools.bench.{script}", str(node.mountpoint),
        "--report", str(name.with_suffix(".jsonl")), "--epochs", str(shape.epochs),
        "--batch-size", str(shape.batch_size), "--workers", str(shape.workers), "--prefetch", str(shape.prefetch),
        "--seed", str(job.seed), "--demand", str(shape.demand),
        "--batches", str(job.batches), *(["--keep-pages"] if scenario.keep_pages else []),
    ]  # fmt: skip


def sampler_spec(scenario: Scenario, job: Job) -> SamplerSpec:
    """The order in which the job reads."""
    kind = "torch-distributed" if scenario.loader == "torch" else "numpy"
    return SamplerSpec(kind=kind, size=scenario.shape.files, seed=job.seed, epochs=scenario.shape.epochs)


def _publication(scenario: Scenario, job: Job, name: str, pid: int) -> JobPublish:
    """What the job says, which is not the truth where it is to lie."""
    shape = scenario.shape
    spec = sampler_spec(scenario, job)
    if job.lie == "seed":
        spec = replace(spec, seed=job.seed + 1000)
    elif job.lie == "half":
        spec = replace(spec, size=shape.files // 2)
    elif job.lie == "range":
        spec = replace(spec, size=2 * shape.files)
    return JobPublish(
        job=name, dataset=DATASET, spec=spec, map=SampleMap(kind="tree"), workers=shape.workers,
        batch_size=shape.batch_size, prefetch=shape.prefetch, pid=pid, source="cachefs-bench",
    )  # fmt: skip


def read_report(path: Path) -> list[EpochReport]:
    return [EpochReport(**json.loads(line)) for line in path.read_text().splitlines()]


# --- what they did ------------------------------------------------------------------------------------------------


def _document(scenario: Scenario, capacity: int, jobs: list[JobResult], timeline: Timeline) -> dict[str, Any]:
    first, last = timeline.samples[0], timeline.samples[-1]
    origin = last - first
    since_first_batch = last - timeline.at(min(job.first_batch for job in jobs))
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
            "expected_samples": _expected(scenario, capacity, jobs),
            "seconds_at_bandwidth": origin.origin_bytes / scenario.limits.bandwidth if scenario.limits.bandwidth else 0,
        },
        "found_on_node_after_first_batch": found / reads if reads else 1.0,
        "epochs": _node_epochs(jobs[0].epochs, timeline),
        "machine": {"cpu_seconds": timeline.cpu_seconds, "busy_cores": timeline.busy_cores},
        "timeline": [[round((one - first).when, 3), (one - first).origin_bytes] for one in timeline.samples],
    }  # fmt: skip


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
        "fast_after_first_batch": 1 - slow / later if later else 1.0,
        "epochs": [_epoch_document(scenario, epoch) for epoch in job.epochs],
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


def _view_document(view: JobView) -> dict[str, Any]:
    """With the number of known epochs in place of their list: a hooked sampler has no end."""
    document: dict[str, Any] = msgspec.to_builtins(view)
    for consumer in document["consumers"]:
        consumer["known_epochs"] = len(consumer["known_epochs"])
    return document


def _node_epochs(epochs: Sequence[EpochReport], timeline: Timeline) -> list[dict[str, int]]:
    """The node's counters over each epoch of the first job; the mount reports a moment late."""
    edges = [timeline.samples[0], *(timeline.at(epoch.end) for epoch in epochs[:-1]), timeline.samples[-1]]
    return [
        {"origin_bytes": (end - begin).origin_bytes, "hits": (end - begin).hits, "misses": (end - begin).misses}
        for begin, end in pairwise(edges)
    ]


def _expected(scenario: Scenario, capacity: int, jobs: list[JobResult]) -> dict[str, float]:
    """Origin reads: Belady's MIN for what the jobs read in the order in which they did; for one job that runs to its
    end also the closed forms."""
    files, epochs = scenario.shape.files, scenario.shape.epochs
    expected: dict[str, float] = {"belady": belady_reads(merged_sequence(scenario, jobs), capacity)}
    if len(jobs) == 1 and not jobs[0].job.batches:
        expected["least"] = least_reads(files, min(capacity, files), epochs)
        expected["lru"] = lru_reads(files, capacity, epochs)
    return expected


def merged_sequence(scenario: Scenario, jobs: list[JobResult]) -> NDArray[numpy.int64]:
    """The samples of all jobs, in the order in which their batches came."""
    orders, times = [], []
    for job in jobs:
        spec = sampler_spec(scenario, job.job)
        for epoch in job.epochs:
            orders.append(epoch_order(spec, epoch.epoch)[: epoch.samples])
            times.append(numpy.repeat(epoch.batches, scenario.shape.batch_size)[: epoch.samples])
    return numpy.concatenate(orders)[numpy.argsort(numpy.concatenate(times), kind="stable")].astype(numpy.int64)
