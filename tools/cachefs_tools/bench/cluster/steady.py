"""Undisturbed jobs: measures requests to the origin, and reads whose block is on the node (M1, M2)."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy

from cachefs.planning.sequences.sampler import epoch_order
from cachefs.planning.sequences.sampler_spec import SamplerSpec
from cachefs_tools.bench.bounds import belady_reads, least_reads
from cachefs_tools.bench.cluster.figures import at_least, at_most, document, epoch_document, local_share
from cachefs_tools.bench.cluster.run import Load, Run, running
from cachefs_tools.bench.directory_node import DATASET
from cachefs_tools.lab.counters import Moment
from cachefs_tools.lab.job import Job, JobSettings, epoch_seconds, started_job

# Time limit of an epoch that always waits for the origin: this multiple of its time at the configured rate, plus these
# seconds.
_PATIENCE: Final = 10.0
_MORE_SECONDS: Final = 120.0
# Least share of local reads by number of nodes, slightly below 1 / Q(nodes)
# (cachefs.planning.cluster.scale.local_share). A placement that ignores the sequences gives 1 / nodes.
_AIMS: Final = {2: 0.65, 3: 0.50, 4: 0.43, 8: 0.29}
Say = Callable[[str], None]


def patience(job: JobSettings, ranks: int) -> float:
    """Return the seconds that an epoch may take."""
    return _PATIENCE * epoch_seconds(job, ranks) + _MORE_SECONDS


def read_epochs(run: Run, job: Job, say: Say, epochs: Sequence[int]) -> list[Moment]:
    """Let all ranks read these epochs, one after the other. Returns the counters before each epoch, and at the end."""
    moments = [run.take()]
    for number in epochs:
        job.epoch(number, patience(job.settings, len(job.ranks)))
        moments.append(run.take())
        told = epoch_document(run.load, number, moments[-1] - moments[-2], job.results())
        say(
            f"  epoch {told['epoch']}: {told['seconds']:.1f} s, origin {told['origin_bytes_of_dataset']:.3f} of the "
            f"dataset, {told['local_share']:.3f} of the reads local, longest {told['longest_ms']:.0f} ms, "
            f"{told['errors']} errors"
        )
    return moments


def job_of(load: Load, name: str = "train", seed: int = 0) -> JobSettings:
    """Return a job over the whole dataset."""
    return JobSettings(
        name, DATASET, load.files, load.epochs, seed, load.rate, 2 if load.torch else 4, torch=load.torch
    )


def m1(load: Load, work: Path, say: Say) -> dict[str, Any]:
    """Run one job on nodes that together hold the dataset once."""
    with running(load, work) as run, started_job(job_of(load), run.nodes) as job:
        moments = read_epochs(run, job, say, range(load.epochs))
        epochs = [
            epoch_document(load, number, moments[number + 1] - moments[number], job.results())
            for number in range(load.epochs)
        ]
        results = job.results()
        later, reads = moments[-1] - moments[1], sum(result.reads for result in job.results(1))
    all_of_it = moments[-1] - moments[0]
    checks = [
        at_most("origin bytes / dataset bytes", _since_start(moments, load), 1.01),
        at_most("origin requests after epoch 1", later.origin_requests, 0),
        at_least("reads served locally from epoch 2 on", local_share(later, reads), _AIMS.get(load.nodes, 0.0)),
        at_most("reads that waited for a peer, from epoch 2 on", later.total.stalls_peer / max(1, reads), 0.01),
        at_most("reads that failed or were wrong", sum(one.errors + one.wrong for one in results), 0),
    ]
    return document("m1", load, checks, epochs=epochs, peer_bytes_of_dataset=all_of_it.total.peer_bytes / load.bytes)


def m2(load: Load, work: Path, say: Say) -> dict[str, Any]:
    """Run one job whose dataset does not fit; then two jobs that start cold together on nodes that hold everything."""
    small = replace(load, capacity=0.5, slack=0.0) if load.capacity == 1.0 else load
    (work / "half").mkdir()
    say(f"nodes hold {small.capacity:.0%} of the dataset together")
    with running(small, work / "half") as run:
        listed = run.origin().bytes
        with started_job(job_of(small), run.nodes) as job:
            moments = read_epochs(run, job, say, range(small.epochs))
            results = job.results()
    fetched = (moments[-1].origin_bytes - listed) / small.size
    least = least_reads(small.files, small.held * small.nodes, small.epochs)
    say("two jobs begin cold, together")
    (work / "two").mkdir()
    two, read = replace(load, epochs=1, capacity=1.0), list(results)
    with ExitStack() as stack:
        run = stack.enter_context(running(two, work / "two"))
        listed = run.origin().bytes
        # The sampler adds the epoch to the seed, so these two never read in the same order.
        jobs = [stack.enter_context(started_job(job_of(two, f"job{seed}", seed), run.nodes)) for seed in (1, 1001)]
        for job in jobs:
            job.begin()
        for job in jobs:
            job.join(0, patience(job.settings, len(job.ranks)))
            read += job.results()
        both = run.origin().bytes - listed
    checks = [
        at_most("blocks fetched / the least possible", fetched / least, 1.02),
        at_most("fetches per block of two jobs that start cold together", both / two.bytes, 1.001),
        at_most("reads that failed or were wrong", sum(one.errors + one.wrong for one in read), 0),
    ]
    return document(
        "m2", small, checks,
        epochs=[
            epoch_document(small, number, moments[number + 1] - moments[number], results)
            for number in range(small.epochs)
        ],
        blocks_fetched=fetched, least_possible=least, least_of_separate_caches=separate(small),
    )  # fmt: skip


def separate(load: Load) -> int:
    """Return the blocks that independent caches would fetch: Belady's MIN for each node."""
    total = 0
    for rank in range(load.nodes):
        spec = SamplerSpec(
            kind="torch-distributed", size=load.files, epochs=load.epochs, replicas=load.nodes, rank=rank
        )
        orders = [epoch_order(spec, epoch) for epoch in range(load.epochs)]
        total += belady_reads(numpy.concatenate(orders).astype(numpy.int64), load.held)
    return total


def _since_start(moments: Sequence[Moment], load: Load) -> float:
    """Return the origin's bytes at the end / bytes of the dataset. Fetches between the job's publication and its first
    read count, and so does the listing of some kilobytes."""
    return moments[-1].origin_bytes / load.bytes
