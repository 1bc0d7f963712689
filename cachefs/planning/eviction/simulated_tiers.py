"""Tiers without bytes: the policies' own objects decide, and nothing is kept of a block but its size.

Blocks come into the first tier, and what a tier evicts moves to the next if that wants it, as in the daemon's store.
What `cachefs.planning.eviction.tiering` adds to that is left out: transient blocks, pins, quotas of datasets, and tiers
that shrink.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cachefs.planning.eviction.policies import Policy
from cachefs.planning.eviction.policies.uses import Uses


class Evicted(NamedTuple):
    """A block that has left a tier. A simulation makes millions: 0.22 us each, where a frozen record takes 0.35."""

    key: bytes
    size: int  # bytes


class SimulatedTier:
    """One tier. Sizes are bytes."""

    def __init__(self, policy: Policy, capacity: int) -> None:
        self.free = capacity
        self._policy = policy
        self._sizes: dict[bytes, int] = {}  # of the blocks in it, by key

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    @property
    def sizes(self) -> Mapping[bytes, int]:
        """Of the blocks in it, by key."""
        return self._sizes

    def accessed(self, key: bytes) -> None:
        """A reader used the block, which may be in this tier or not."""
        self._policy.accessed(key)

    def admits(self, key: bytes, size: int) -> bool:
        """Does the policy want the block?"""
        return self._policy.admits(key, size, self.free)

    def make_room(self, key: bytes, size: int, step: int = 0) -> list[Evicted]:
        """Evict what must go for a block, as far as the policy evicts anything for it. step: where something must go,
        at least so many bytes of it do, as to find one block costs as much as to find many."""
        missing = size - self.free
        victims = self._policy.victims(max(missing, step), (), [key]) if missing > 0 else ()
        return [Evicted(victim, self.remove(victim)) for victim in victims]

    def add(self, key: bytes, size: int) -> bool:
        """Take the block if there is room. Is it in the tier now?"""
        if size > self.free:
            return False
        self._policy.added(key, size)
        self._sizes[key] = size
        self.free -= size
        return True

    def remove(self, key: bytes) -> int:
        """Take the block out. Returns its size. Raises KeyError where it is not there."""
        self._policy.removed(key)
        size = self._sizes.pop(key)
        self.free += size
        return size


class SimulatedTiers:
    """The tiers of a node, the fastest first."""

    def __init__(self, policies: Sequence[Policy], capacities: Sequence[int], uses: Uses) -> None:
        """One policy and one capacity (bytes) per tier; uses: what these policies have in common."""
        self.tiers = [SimulatedTier(policy, size) for policy, size in zip(policies, capacities, strict=True)]
        self._uses = uses

    def read(self, key: bytes, size: int) -> bool:
        """A reader needs the block. Was it there? If not it comes now, where a policy wants it."""
        if any(key in tier for tier in self.tiers):
            for tier in self.tiers:
                tier.accessed(key)
            return True
        self._offer(0, key, size)
        return False

    def evict(self, key: bytes) -> None:
        """Take the block out of every tier."""
        for tier in self.tiers:
            if key in tier:
                tier.remove(key)
                self._uses.forget(key)

    def _offer(self, number: int, key: bytes, size: int) -> None:
        """Bring the block into tier *number*, and what is evicted for it into the next one."""
        if number < len(self.tiers) and self.tiers[number].admits(key, size):
            for evicted in self.tiers[number].make_room(key, size):
                self._offer(number + 1, evicted.key, evicted.size)
            self.tiers[number].add(key, size)
        self._uses.forget(key)
