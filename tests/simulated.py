"""Jobs that read in known orders, through simulated tiers; and Belady's MIN, to which policies are compared."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import BlockSpace
from cachefs.planning.eviction.policies import EvictionPolicy
from cachefs.planning.eviction.policies.lru import UseOrder
from cachefs.planning.eviction.simulated_tiers import SimulatedTiers
from cachefs.planning.sequences.plan import Plan

Order = npt.NDArray[np.int64]


def space_of(sizes: Sequence[int], name: str = "space", block_size: int = 1 << 20, seed: int = 0) -> BlockSpace:
    """A snapshot of files of these sizes. Equal seeds give equal contents."""
    contents = np.frombuffer(np.random.default_rng(seed).bytes(16 * len(sizes)), [("high", "<u8"), ("low", "<u8")])
    return BlockSpace(name, block_size, np.asarray(sizes, np.int64), contents)


@dataclass(frozen=True)
class SimulatedJob:
    """epochs: the blocks it reads in each; rate: reads per second; start: seconds after the first job."""

    name: str
    epochs: list[Order]
    rate: float = 1000.0
    start: float = 0.0

    def reads(self) -> Iterator[tuple[float, "SimulatedJob", int, int]]:
        """(when, job, epoch, read)."""
        count = 0
        for epoch, order in enumerate(self.epochs):
            for read in range(len(order)):
                yield self.start + count / self.rate, self, epoch, read
                count += 1


def merged(jobs: Sequence[SimulatedJob]) -> Iterator[tuple[float, SimulatedJob, int, int]]:
    return heapq.merge(*(job.reads() for job in jobs), key=lambda event: event[0])


def origin_bytes(
    policy: EvictionPolicy, plan: Plan, space: BlockSpace, jobs: Sequence[SimulatedJob], capacity: int, every: int = 16
) -> int:
    """Bytes fetched when each read that misses is fetched and offered to the policy.

    Each job publishes an epoch as the one before begins, and reports progress every *every* reads.
    """
    sizes = space.sizes.tolist()
    keys = space.keys(np.arange(space.count))
    tier = SimulatedTiers([policy], [capacity], UseOrder())
    fetched = 0
    for _, job, epoch, read in merged(jobs):
        if read == 0:
            for number in (epoch, epoch + 1):
                if number < len(job.epochs) and plan.epoch(job.name, number) is None:
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


def belady_bytes(space: BlockSpace, jobs: Sequence[SimulatedJob], capacity: int) -> int:
    """What Belady's MIN fetches for the merged sequence: for equal sizes, nobody fetches less. In whole seconds of
    nothing but the sequence itself, so that it proves the plan and is not proven by it."""
    sequence = [int(job.epochs[epoch][read]) for _, job, epoch, read in merged(jobs)]
    sizes = space.sizes.tolist()
    never = len(sequence)
    following = [never] * len(sequence)
    upcoming: dict[int, int] = {}
    for place in range(len(sequence) - 1, -1, -1):
        following[place] = upcoming.get(sequence[place], never)
        upcoming[sequence[place]] = place
    inside: dict[int, int] = {}
    furthest: list[tuple[int, int]] = []
    free, fetched = capacity, 0
    for place, block in enumerate(sequence):
        known = block in inside
        fetched += 0 if known else sizes[block]
        free -= 0 if known else sizes[block]
        inside[block] = following[place]
        heapq.heappush(furthest, (-following[place], block))
        while free < 0:
            use, victim = heapq.heappop(furthest)
            if inside.get(victim) == -use:
                del inside[victim]
                free += sizes[victim]
    return fetched
