"""Undisturbed jobs: measures requests to the origin, and reads whose block is on the node (M1, M2)."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from cachefs.errors import CachefsError
from cachefs.planning.sequences.sampler import epoch_order
from cachefs_bench.bounds import ReadPart, belady_reads, least_reads, merge_reads
from cachefs_bench.cluster.run import (
    BoundCheck,
    ClusterLoad,
    ClusterRun,
    JobShape,
    check_at_least,
    check_at_most,
    document,
    epoch_document,
    local_share,
    run_cluster,
    waited_for_peer_share,
)
from cachefs_bench.lab.cluster import ClusterCounters
from cachefs_bench.lab.job import JobSettings, LabJob, LabRank, epoch_seconds, start_job
from cachefs_bench.lab.scratch_node import DATASET

# Time limit of an epoch that always waits for the origin: this multiple of its time at the configured rate, plus these
# seconds.
_TIMEOUT_FACTOR: Final = 10.0
_EXTRA_SECONDS: Final = 120.0
# Least share of local reads by number of nodes, slightly below 1 / Q(nodes)
# (cachefs.planning.cluster.scale.local_share). A placement that ignores the sequences gives 1 / nodes.
_MIN_LOCAL_SHARES: Final = {2: 0.65, 3: 0.50, 4: 0.43, 8: 0.29}
# The part of it that each of several jobs must reach: 0.40 with 4 nodes.
_PART_FOR_SEVERAL: Final = 0.93
# The sampler adds the epoch to the seed, so jobs whose seeds are near each other would read in the same orders.
_SEED_STEP: Final = 100_000
ReportLine = Callable[[str], None]


def epoch_timeout(job: JobSettings, ranks: int) -> float:
    """Return the seconds that an epoch may take."""
    return _TIMEOUT_FACTOR * epoch_seconds(job, ranks) + _EXTRA_SECONDS


def job_settings(load: ClusterLoad, name: str = "train", seed: int = 0) -> JobSettings:
    """Return a job over the whole dataset."""
    return JobSettings(
        name, DATASET, load.files, load.epochs, seed, load.rate, 2 if load.torch else 4, torch=load.torch
    )


@dataclass(frozen=True, slots=True)
class ReadEpoch:
    """One epoch of a job that all its ranks have read, with the counters before and after."""

    job: LabJob
    number: int
    before: ClusterCounters
    after: ClusterCounters
    document: dict[str, Any]


@dataclass(slots=True)
class _EpochInProgress:
    number: int
    before: ClusterCounters
    deadline: float  # of time.monotonic()


@contextmanager
def start_jobs(run: ClusterRun, load: ClusterLoad) -> Iterator[list[LabJob]]:
    """Start the jobs of a load; none has read yet. Their ranks are on the nodes in turns.

    All jobs read until the slowest has read the epochs of the load: quicker ones read more epochs, so no job has the
    nodes to itself.
    """
    shapes = load.jobs or (JobShape(load.nodes),)
    name = "job{}" if len(shapes) > 1 else "train"
    settings = [
        replace(job_settings(load, name.format(number + 1), number * _SEED_STEP), rate=shape.rate or load.rate)
        for number, shape in enumerate(shapes)
    ]
    lengths = [epoch_seconds(job, shape.ranks) for job, shape in zip(settings, shapes, strict=True)]
    first = 0  # node of the next rank
    with ExitStack() as stack:
        jobs = []
        for job, shape, length in zip(settings, shapes, lengths, strict=True):
            nodes = [run.nodes[number % load.nodes] for number in range(first, first + shape.ranks)]
            first += shape.ranks
            epochs = round(load.epochs * max(lengths) / length)
            jobs.append(stack.enter_context(start_job(replace(job, epochs=epochs), nodes)))
        yield jobs


def read_jobs(run: ClusterRun, jobs: Sequence[LabJob], report: ReportLine) -> list[ReadEpoch]:
    """Let the jobs read all their epochs. They begin together. The ranks of a job then wait for each other after each
    epoch, as those of a training do; the jobs do not wait for each other, since their epochs differ in length."""
    now = run.read_counters()
    reading = [(job, _EpochInProgress(0, now, _deadline(job))) for job in jobs]
    done: list[ReadEpoch] = []
    for job in jobs:
        job.begin_epoch()
    while reading:
        for job, epoch in list(reading):
            if not job.has_read(epoch.number):
                if time.monotonic() > epoch.deadline:
                    raise CachefsError(f"{job.settings.name} has not read epoch {epoch.number} in time")
                continue
            after = run.read_counters()
            row = epoch_document(run.load, job.settings.name, epoch.number, after - epoch.before, job.results())
            done.append(ReadEpoch(job, epoch.number, epoch.before, after, row))
            report(_epoch_line(row))
            epoch.number += 1
            if epoch.number == job.settings.epochs:
                reading.remove((job, epoch))
                continue
            epoch.before, epoch.deadline = after, _deadline(job)
            job.begin_epoch()
        time.sleep(0.05)
    return done


def _deadline(job: LabJob) -> float:
    return time.monotonic() + epoch_timeout(job.settings, len(job.ranks))


def _epoch_line(epoch: dict[str, Any]) -> str:
    return (
        f"  {epoch['job']}, epoch {epoch['epoch']}: {epoch['seconds']:.1f} s, origin "
        f"{epoch['origin_bytes_of_dataset']:.3f} of the dataset, {epoch['local_share']:.3f} of the reads local, "
        f"{epoch['waited_for_peer_share']:.4f} waited for a peer, longest {epoch['longest_ms']:.0f} ms, "
        f"{epoch['errors']} errors, load {epoch['machine_load']:.0f}"
    )


def m1(load: ClusterLoad, work: Path, report: ReportLine) -> dict[str, Any]:
    """Run one or several jobs on nodes that together hold the dataset once."""
    with run_cluster(load, work) as run, start_jobs(run, load) as jobs:
        epochs = read_jobs(run, jobs, report)
        disagreements = run.count_disagreements()
    begin, end = epochs[0].before, epochs[-1].after
    since_first_epoch = end - next(epoch.after for epoch in epochs if not epoch.number)
    checks = [
        # Fetches between publication and first read count, and so does the listing of some kilobytes.
        check_at_most("origin bytes / dataset bytes", end.origin_bytes / load.bytes, 1.01),
        check_at_most("origin requests after epoch 1", since_first_epoch.origin_requests, 0),
        *(check for job in jobs for check in _checks_of_job(load, job, epochs, _suffix(job, jobs))),
        check_at_most("times that nodes disagreed on the holders", disagreements, 0),
        check_at_most("reads that failed or were wrong", _bad_reads(jobs), 0),
    ]
    return document(
        "m1", load, checks, epochs=[epoch.document for epoch in epochs],
        peer_bytes_of_dataset=(end - begin).total.peer_bytes / load.bytes,
    )  # fmt: skip


def _checks_of_job(load: ClusterLoad, job: LabJob, epochs: Sequence[ReadEpoch], suffix: str) -> list[BoundCheck]:
    """Return the checks of a job's reads from epoch 2 on."""
    name, mine = job.settings.name, [epoch for epoch in epochs if epoch.job is job]
    later, reads = mine[-1].after - mine[0].after, sum(result.reads for result in job.results(1))
    least = _MIN_LOCAL_SHARES.get(load.nodes, 0.0) * (_PART_FOR_SEVERAL if suffix else 1.0)
    waited = waited_for_peer_share(later, name, reads)
    return [
        check_at_least(f"reads served locally from epoch 2 on{suffix}", local_share(later, name, reads), least),
        check_at_most(f"reads that waited for a peer, from epoch 2 on{suffix}", waited, 0.01),
    ]


def _suffix(job: LabJob, jobs: Sequence[LabJob]) -> str:
    return f", {job.settings.name} of {len(job.ranks)} ranks" if len(jobs) > 1 else ""


def _bad_reads(jobs: Sequence[LabJob]) -> int:
    return sum(result.errors + result.wrong for job in jobs for result in job.results())


def m2(load: ClusterLoad, work: Path, report: ReportLine) -> dict[str, Any]:
    """Run jobs whose dataset does not fit; then jobs (two, unless more are given) that start cold together on nodes
    that hold everything."""
    small = replace(load, capacity=0.5, slack=0.0) if load.capacity == 1.0 else load
    (work / "half").mkdir()
    report(f"nodes hold {small.capacity:.0%} of the dataset together")
    with run_cluster(small, work / "half") as run:
        listed = run.origin_counters().bytes
        with start_jobs(run, small) as jobs:
            epochs = read_jobs(run, jobs, report)
            bad_reads = _bad_reads(jobs)
        disagreements = run.count_disagreements()
    fetched = (epochs[-1].after.origin_bytes - listed) / small.size
    least = _least_fetches(small, jobs)
    both, more_bad_reads = _start_cold(load, work / "cold", report)
    checks = [
        check_at_most("blocks fetched / the least possible", fetched / least, 1.02 if len(jobs) == 1 else 1.03),
        check_at_most("fetches per block of jobs that start cold together", both, 1.001),
        check_at_most("times that nodes disagreed on the holders", disagreements, 0),
        check_at_most("reads that failed or were wrong", bad_reads + more_bad_reads, 0),
    ]
    return document(
        "m2", small, checks, epochs=[epoch.document for epoch in epochs], blocks_fetched=fetched,
        least_possible=least, least_of_separate_caches=separate_cache_fetches(small, jobs),
    )  # fmt: skip


def _start_cold(load: ClusterLoad, work: Path, report: ReportLine) -> tuple[float, int]:
    """Let jobs that start together read one epoch. Returns the fetches per block, and the bad reads."""
    shapes = load.jobs if len(load.jobs) > 1 else (JobShape(load.nodes),) * 2
    report(f"{len(shapes)} jobs begin cold, together")
    work.mkdir()
    cold = replace(load, epochs=1, capacity=1.0, jobs=shapes)
    with run_cluster(cold, work) as run:
        listed = run.origin_counters().bytes
        with start_jobs(run, cold) as jobs:
            read_jobs(run, jobs, report)
            return (run.origin_counters().bytes - listed) / cold.bytes, _bad_reads(jobs)


def _least_fetches(load: ClusterLoad, jobs: Sequence[LabJob]) -> int:
    """Return the blocks that one cache with the room of all nodes would fetch, if it knew all reads. Several jobs:
    Belady's MIN for the reads of all ranks in the order of time."""
    if len(jobs) == 1:
        return least_reads(load.files, load.held * load.nodes, load.epochs)
    parts = [part for job in jobs for rank in job.ranks for part in _parts_of_rank(rank)]
    return belady_reads(merge_reads(parts), load.held * load.nodes)


def separate_cache_fetches(load: ClusterLoad, jobs: Sequence[LabJob]) -> int:
    """Return the blocks that independent caches would fetch: Belady's MIN for the reads on each node."""
    parts: dict[str, list[ReadPart]] = {}
    for rank in (rank for job in jobs for rank in job.ranks):
        parts.setdefault(rank.node.name, []).extend(_parts_of_rank(rank))
    return sum(belady_reads(merge_reads(part), load.held) for part in parts.values())


def _parts_of_rank(rank: LabRank) -> list[ReadPart]:
    """Return a rank's reads by epoch, with the times at which they began and ended."""
    return [(epoch_order(rank.spec, one.epoch), one.begin, one.end) for one in rank.progress.results]
