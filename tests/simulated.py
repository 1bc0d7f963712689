"""A tier without bytes: the policies' own objects in a loop, under jobs that read in known orders."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import BlockSpace
from cachefs.planning.eviction.policies import Policy
from cachefs.planning.eviction.policies.uses import Uses
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
    policy: Policy, plan: Plan, space: BlockSpace, jobs: Sequence[SimulatedJob], capacity: int, every: int = 16
) -> int:
    """Bytes fetched when each read that misses is fetched and offered to the policy.

    Each job publishes an epoch as the one before begins, and reports progress every *every* reads.
    """
    sizes = space.sizes.tolist()
    keys = space.keys(np.arange(space.count))
    inside: dict[bytes, int] = {}
    free, fetched = capacity, 0
    for _, job, epoch, read in merged(jobs):
        if read == 0:
            for number in (epoch, epoch + 1):
                if number < len(job.epochs) and plan.epoch(job.name, number) is None:
                    last = number == len(job.epochs) - 1
                    plan.set_epoch(job.name, space.snapshot, number, job.epochs[number], last=last)
        if read % every == 0:
            plan.set_progress(job.name, epoch, read, job.rate)
        block = int(job.epochs[epoch][read])
        key, size = keys[block], sizes[block]
        if key in inside:
            policy.accessed(key)
            continue
        fetched += size
        if not policy.admits(key, size, free):
            continue
        if free < size:
            for victim in policy.victims(size - free, (), key):
                policy.removed(victim)
                free += inside.pop(victim)
        if free >= size:
            policy.added(key, size)
            inside[key] = size
            free -= size
        if epoch == len(job.epochs) - 1 and read == len(job.epochs[epoch]) - 1:
            plan.remove(job.name)
    return fetched


class SimulatedTiers:
    """As the store has them: blocks come into the first, and what a tier gives up moves to the next if that wants it.

    inside: sizes by tier.
    """

    def __init__(self, policies: Sequence[Policy], capacities: Sequence[int], uses: Uses) -> None:
        self.inside: list[dict[bytes, int]] = [{} for _ in policies]
        self._policies = policies
        self._free = list(capacities)
        self._uses = uses

    def read(self, key: bytes, size: int) -> bool:
        """Was it there? It is now, if a policy wants it."""
        if any(key in blocks for blocks in self.inside):
            for policy in self._policies:
                policy.accessed(key)
            return True
        self._offer(0, key, size)
        return False

    def evict(self, key: bytes) -> None:
        for tier, blocks in enumerate(self.inside):
            if key in blocks:
                self._take_out(tier, key)
                self._uses.forget(key)

    def _offer(self, tier: int, key: bytes, size: int) -> None:
        if tier < len(self._policies) and self._policies[tier].admits(key, size, self._free[tier]):
            missing = size - self._free[tier]
            for victim in self._policies[tier].victims(missing, (), key) if missing > 0 else ():
                self._offer(tier + 1, victim, self._take_out(tier, victim))
            if size <= self._free[tier]:
                self._policies[tier].added(key, size)
                self.inside[tier][key] = size
                self._free[tier] -= size
        self._uses.forget(key)

    def _take_out(self, tier: int, key: bytes) -> int:
        self._policies[tier].removed(key)
        size = self.inside[tier].pop(key)
        self._free[tier] += size
        return size


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
