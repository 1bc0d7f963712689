"""Undisturbed jobs: measures requests to the origin, and reads whose block is on the node (M1, M2)."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy

from cachefs.planning.sequences.sampler import epoch_order
from cachefs.planning.sequences.sampler_spec import SamplerSpec
from cachefs_bench.bounds import belady_reads, least_reads
from cachefs_bench.cluster.run import (
    ClusterLoad,
    ClusterRun,
    check_at_least,
    check_at_most,
    document,
    epoch_document,
    local_share,
    run_cluster,
)
from cachefs_bench.lab.cluster import ClusterCounters
from cachefs_bench.lab.job import JobSettings, LabJob, epoch_seconds, start_job
from cachefs_bench.lab.scratch_node import DATASET

# Time limit of an epoch that always waits for the origin: this multiple of its time at the configured rate, plus these
# seconds.
_TIMEOUT_FACTOR: Final = 10.0
_EXTRA_SECONDS: Final = 120.0
# Least share of local reads by number of nodes, slightly below 1 / Q(nodes)
# (cachefs.planning.cluster.scale.local_share). A placement that ignores the sequences gives 1 / nodes.
_MIN_LOCAL_SHARES: Final = {2: 0.65, 3: 0.50, 4: 0.43, 8: 0.29}
ReportLine = Callable[[str], None]


def epoch_timeout(job: JobSettings, ranks: int) -> float:
    """Return the seconds that an epoch may take."""
    return _TIMEOUT_FACTOR * epoch_seconds(job, ranks) + _EXTRA_SECONDS


def read_epochs(run: ClusterRun, job: LabJob, report: ReportLine, epochs: Sequence[int]) -> list[ClusterCounters]:
    """Let all ranks read these epochs, one after the other. Returns the counters before each epoch, and at the end."""
    moments = [run.read_counters()]
    for number in epochs:
        job.run_epoch(number, epoch_timeout(job.settings, len(job.ranks)))
        moments.append(run.read_counters())
        result = epoch_document(run.load, number, moments[-1] - moments[-2], job.results())
        report(
            f"  epoch {result['epoch']}: {result['seconds']:.1f} s, origin {result['origin_bytes_of_dataset']:.3f} of "
            f"the dataset, {result['local_share']:.3f} of the reads local, longest {result['longest_ms']:.0f} ms, "
            f"{result['errors']} errors"
        )
    return moments


def job_settings(load: ClusterLoad, name: str = "train", seed: int = 0) -> JobSettings:
    """Return a job over the whole dataset."""
    return JobSettings(
        name, DATASET, load.files, load.epochs, seed, load.rate, 2 if load.torch else 4, torch=load.torch
    )


def m1(load: ClusterLoad, work: Path, report: ReportLine) -> dict[str, Any]:
    """Run one job on nodes that together hold the dataset once."""
    with run_cluster(load, work) as run, start_job(job_settings(load), run.nodes) as job:
        moments = read_epochs(run, job, report, range(load.epochs))
        epochs = [
            epoch_document(load, number, moments[number + 1] - moments[number], job.results())
            for number in range(load.epochs)
        ]
        results = job.results()
        later, reads = moments[-1] - moments[1], sum(result.reads for result in job.results(1))
    all_of_it = moments[-1] - moments[0]
    checks = [
        check_at_most("origin bytes / dataset bytes", _since_start(moments, load), 1.01),
        check_at_most("origin requests after epoch 1", later.origin_requests, 0),
        check_at_least(
            "reads served locally from epoch 2 on", local_share(later, reads), _MIN_LOCAL_SHARES.get(load.nodes, 0.0)
        ),
        check_at_most("reads that waited for a peer, from epoch 2 on", later.total.stalls_peer / max(1, reads), 0.01),
        check_at_most("reads that failed or were wrong", sum(result.errors + result.wrong for result in results), 0),
    ]
    return document("m1", load, checks, epochs=epochs, peer_bytes_of_dataset=all_of_it.total.peer_bytes / load.bytes)


def m2(load: ClusterLoad, work: Path, report: ReportLine) -> dict[str, Any]:
    """Run one job whose dataset does not fit; then two jobs that start cold together on nodes that hold everything."""
    small = replace(load, capacity=0.5, slack=0.0) if load.capacity == 1.0 else load
    (work / "half").mkdir()
    report(f"nodes hold {small.capacity:.0%} of the dataset together")
    with run_cluster(small, work / "half") as run:
        listed = run.origin_counters().bytes
        with start_job(job_settings(small), run.nodes) as job:
            moments = read_epochs(run, job, report, range(small.epochs))
            results = job.results()
    fetched = (moments[-1].origin_bytes - listed) / small.size
    least = least_reads(small.files, small.held * small.nodes, small.epochs)
    report("two jobs begin cold, together")
    (work / "two").mkdir()
    two, read = replace(load, epochs=1, capacity=1.0), list(results)
    with ExitStack() as stack:
        run = stack.enter_context(run_cluster(two, work / "two"))
        listed = run.origin_counters().bytes
        # The sampler adds the epoch to the seed, so these two never read in the same order.
        jobs = [stack.enter_context(start_job(job_settings(two, f"job{seed}", seed), run.nodes)) for seed in (1, 1001)]
        for job in jobs:
            job.begin_epoch()
        for job in jobs:
            job.wait_for_epoch(0, epoch_timeout(job.settings, len(job.ranks)))
            read += job.results()
        both = run.origin_counters().bytes - listed
    checks = [
        check_at_most("blocks fetched / the least possible", fetched / least, 1.02),
        check_at_most("fetches per block of two jobs that start cold together", both / two.bytes, 1.001),
        check_at_most("reads that failed or were wrong", sum(one.errors + one.wrong for one in read), 0),
    ]
    return document(
        "m2", small, checks,
        epochs=[
            epoch_document(small, number, moments[number + 1] - moments[number], results)
            for number in range(small.epochs)
        ],
        blocks_fetched=fetched, least_possible=least, least_of_separate_caches=separate_cache_fetches(small),
    )  # fmt: skip


def separate_cache_fetches(load: ClusterLoad) -> int:
    """Return the blocks that independent caches would fetch: Belady's MIN for each node."""
    total = 0
    for rank in range(load.nodes):
        spec = SamplerSpec(
            kind="torch-distributed", size=load.files, epochs=load.epochs, replicas=load.nodes, rank=rank
        )
        orders = [epoch_order(spec, epoch) for epoch in range(load.epochs)]
        total += belady_reads(numpy.concatenate(orders).astype(numpy.int64), load.held)
    return total


def _since_start(moments: Sequence[ClusterCounters], load: ClusterLoad) -> float:
    """Return the origin's bytes at the end / bytes of the dataset. Fetches between the job's publication and its first
    read count, and so does the listing of some kilobytes."""
    return moments[-1].origin_bytes / load.bytes
