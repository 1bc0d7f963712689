"""Simulates tiers without bytes: the policies' own objects decide, and only the size of each block is kept.

Blocks come into the first tier, and blocks evicted from a tier move to the next if it wants them, as in the daemon's
store. Omitted are the additions of `cachefs.planning.eviction.tiering`: transient blocks, pins, quotas of datasets, and
tiers that shrink.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cachefs.planning.eviction.policies import EvictionPolicy
from cachefs.planning.eviction.policies.lru import UseOrder


class EvictedBlock(NamedTuple):
    """A block that has left a tier. A simulation makes millions: 0.22 us each, where a frozen record takes 0.35."""

    key: bytes
    size: int  # bytes


class SimulatedTier:
    """One tier. Sizes are bytes."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.free = capacity
        self._policy = policy
        self._sizes: dict[bytes, int] = {}  # key -> size of the blocks in it

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    @property
    def sizes(self) -> Mapping[bytes, int]:
        """Key -> size of the blocks in it."""
        return self._sizes

    def note_accessed(self, key: bytes) -> None:
        """Record a use of a block, which may be in this tier or not."""
        self._policy.note_accessed(key)

    def can_admit(self, key: bytes, size: int) -> bool:
        """Return whether the policy wants the block."""
        return self._policy.can_admit(key, size, self.free)

    def make_room(self, key: bytes, size: int, step: int = 0) -> list[EvictedBlock]:
        """Evict blocks to make room for a block, as far as the policy evicts for it. step: least bytes of an eviction,
        as finding one block costs as much as finding many."""
        missing = size - self.free
        victims = self._policy.choose_victims(max(missing, step), (), [key]) if missing > 0 else ()
        return [EvictedBlock(victim, self.remove_block(victim)) for victim in victims]

    def add_block(self, key: bytes, size: int) -> bool:
        """Take the block if there is room. Returns whether it is in the tier now."""
        if size > self.free:
            return False
        self._policy.note_added(key, size)
        self._sizes[key] = size
        self.free -= size
        return True

    def remove_block(self, key: bytes) -> int:
        """Remove the block. Returns its size. Raises KeyError where it is not there."""
        self._policy.note_removed(key)
        size = self._sizes.pop(key)
        self.free += size
        return size


class SimulatedTiers:
    """The tiers of a node, the fastest first."""

    def __init__(self, policies: Sequence[EvictionPolicy], capacities: Sequence[int], uses: UseOrder) -> None:
        """One policy and one capacity (bytes) per tier; uses: shared by these policies."""
        self.tiers = [SimulatedTier(policy, size) for policy, size in zip(policies, capacities, strict=True)]
        self._uses = uses

    def read_block(self, key: bytes, size: int) -> bool:
        """Read a block. Returns whether it was in a tier; otherwise it comes now, where a policy wants it."""
        if any(key in tier for tier in self.tiers):
            for tier in self.tiers:
                tier.note_accessed(key)
            return True
        self._offer(0, key, size)
        return False

    def evict_block(self, key: bytes) -> None:
        """Remove the block from every tier."""
        for tier in self.tiers:
            if key in tier:
                tier.remove_block(key)
                self._uses.forget_use(key)

    def _offer(self, number: int, key: bytes, size: int) -> None:
        """Bring the block into tier *number*, and the blocks evicted for it into the next one."""
        if number < len(self.tiers) and self.tiers[number].can_admit(key, size):
            for evicted in self.tiers[number].make_room(key, size):
                self._offer(number + 1, evicted.key, evicted.size)
            self.tiers[number].add_block(key, size)
        self._uses.forget_use(key)
