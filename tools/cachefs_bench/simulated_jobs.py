"""Jobs that read blocks in known orders, through simulated tiers."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import BlockSpace
from cachefs.planning.eviction.policies import EvictionPolicy
from cachefs.planning.eviction.policies.lru import UseOrder
from cachefs.planning.eviction.simulated_tiers import SimulatedTiers
from cachefs.planning.sequences.plan import Plan

Order = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ReadingJob:
    """A job that reads some epochs at a constant rate."""

    name: str
    # The blocks that it reads in each epoch, in order: shape (reads,).
    epochs: list[Order]
    # Reads per second.
    rate: float = 1000.0
    # Seconds after the first job.
    start: float = 0.0

    def reads(self) -> Iterator[tuple[float, "ReadingJob", int, int]]:
        """Yield the reads: (time, job, epoch, read of the epoch)."""
        count = 0
        for epoch, order in enumerate(self.epochs):
            for read in range(len(order)):
                yield self.start + count / self.rate, self, epoch, read
                count += 1


def merge_reads(jobs: Sequence[ReadingJob]) -> Iterator[tuple[float, ReadingJob, int, int]]:
    """Yield the reads of all jobs as `ReadingJob.reads` does, in order of time."""
    return heapq.merge(*(job.reads() for job in jobs), key=lambda event: event[0])


def origin_bytes(
    make_policy: Callable[[Plan], EvictionPolicy], space: BlockSpace, jobs: Sequence[ReadingJob], capacity: int,
    every: int = 16, published: int = 2,
) -> int:  # fmt: skip
    """Return the bytes that are fetched where each read that misses is fetched and offered to the policy.

    capacity: bytes of the only tier. every: reads between two reports of a job's progress. published: epochs that a
    job has published when it begins one, this one included.
    """
    plan = Plan()
    plan.add_space(space)
    policy = make_policy(plan)
    sizes = space.sizes.tolist()
    keys = space.keys(np.arange(space.count))
    tier = SimulatedTiers([policy], [capacity], UseOrder())
    fetched = 0
    for _, job, epoch, read in merge_reads(jobs):
        if read == 0:
            for number in range(epoch, min(epoch + published, len(job.epochs))):
                if plan.epoch(job.name, number) is None:
                    last = number == len(job.epochs) - 1
                    plan.set_epoch(job.name, space.snapshot, number, job.epochs[number], is_last=last)
        if read % every == 0:
            plan.set_progress(job.name, epoch, read, job.rate)
        block = int(job.epochs[epoch][read])
        if not tier.read_block(keys[block], sizes[block]):
            fetched += sizes[block]
        if epoch == len(job.epochs) - 1 and read == len(job.epochs[epoch]) - 1:
            plan.remove_consumer(job.name)
    return fetched
