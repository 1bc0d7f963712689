"""Whose is which block: what the tiers' policies keep, what is passing, what is pinned, what datasets may have. The
store's decisions, no I/O.

A block nobody's policy admits is *passing*: it is in the memory tier for the readers that wait for it, first in, first
out, ahead of everything else. Where a policy never evicts, room is held back for such blocks; where one does, they are
few, and displace each other once there are enough.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from cachefs_daemon.store.segment_writer import span
from cachefs_daemon.store.tier import Tier

from cachefs.block import MEMORY, Location
from cachefs.planning.blocks.presence import Presence, state_of
from cachefs.planning.eviction.policies import Policy
from cachefs.planning.eviction.policies.lru import Lru
from cachefs.planning.eviction.policies.uses import Uses
from cachefs.planning.eviction.quotas import Quotas

# Each time room is made, at least 1/1024 of the tier: with 110 KB blocks a commit for each halves the rate of puts. But
# what is made too early is a smaller cache.
_AHEAD_SHIFT: Final = 10
# A tier of which less than 1/64 is free is full.
_FREE_SHIFT: Final = 6
# So many passing blocks stay for their readers even where a policy evicts: 8 readers with 4 blocks each.
_PASSING_KEPT: Final = 32


class Tiering:
    """Every call but `free` needs the store's lock. tiers, policies: by tier number; uses: of the policies, and of
    those of limits; residents: who watches is told; limits: who knows whose blocks are limited."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        policies: Sequence[Policy],
        uses: Uses,
        limits: Quotas,
        get: Callable[[bytes], Location | None],
        block_size: int,
    ) -> None:
        """get: where a block is, as of the index."""
        self.residents = Presence()
        self.limits = limits
        self._tiers = tiers
        self._policies = policies
        self._uses = uses
        self._get = get
        self._memory = tiers[MEMORY]
        self._passing = Lru()
        self._pinned: set[bytes] = set()
        self._evicting = policies[MEMORY].evicts
        self._share = min(max(self._memory.config.budget // 8, 4 * span(block_size)), self._memory.capacity)
        self._recovered = 0

    # --- what happens -------------------------------------------------------------------------------------------------

    def recovered(self, tier: Tier, key: bytes, size: int) -> None:
        """A block of an earlier run was found."""
        tier.blocks += 1
        policy = self._policies[tier.number]
        if tier is self._memory and not policy.evicts:
            # Which blocks were passing is not recorded: to a policy that keeps any fixed set they are all alike.
            if self._recovered + size > tier.capacity - self._share:
                self._passing.added(key, size)
                return
            self._recovered += size
        policy.added(key, size)

    def entered(self, key: bytes, location: Location, *, passing: bool) -> None:
        if passing:
            self._passing.added(key, span(location.length))
        else:
            self._keep(location.tier, key, span(location.length))
        self._tiers[location.tier].blocks += 1
        self.residents.set(key, state_of(location))

    def left(self, key: bytes, location: Location) -> None:
        self._forget(key, location)
        self.limits.forget(key)
        self._uses.forget(key)
        self.residents.set(key, state_of(None))

    def moved(self, key: bytes, old: Location, new: Location) -> None:
        """From one tier to another."""
        self._forget(key, old)
        if new.tier < old.tier:
            self._uses.forget(key)  # who has it copied up is about to use it
        self._keep(new.tier, key, span(new.length))
        self._uses.forget(key)
        self._tiers[new.tier].blocks += 1
        self.residents.set(key, state_of(new))

    def accessed(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            for policy in self._policies:
                policy.accessed(key)

    def claim(self, keys: Iterable[bytes], snapshot: str, now: float) -> None:
        """Count blocks that are here for the dataset that has *snapshot*, if they count for none."""
        for key in keys:
            location = self._get(key)
            if location is not None and self.limits.claim(key, snapshot, now) and key not in self._passing:
                self._count(location.tier, key, span(location.length))

    def pin(self, keys: Iterable[bytes]) -> None:
        self._pinned.update(keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        self._pinned.difference_update(keys)

    # --- who may come -------------------------------------------------------------------------------------------------

    def free(self, tier: Tier) -> int:
        """Bytes that nobody uses or is about to: room is made in larger steps than it is needed in, so a little free
        room is that of a full tier."""
        return 0 if tier.problem else max(0, tier.free - self._held_back(tier) - (tier.capacity >> _FREE_SHIFT))

    @property
    def step(self) -> int:
        """Bytes that `makers_of_room` frees beyond what a block needs, over all tiers, at most."""
        return sum(tier.capacity >> _AHEAD_SHIFT for tier in self._tiers)

    def room_for(self, key: bytes, snapshot: str) -> int:
        """About how many bytes are free, or taken by blocks that would be given up for this one of *snapshot*."""
        self._follow_policy()
        room = 0
        for tier in self._tiers:
            if not tier.problem:
                here = max(0, tier.free - self._held_back(tier)) + self._policies[tier.number].replaceable(key)
                room += int(min(here, self.limits.room_for(tier.number, key, snapshot)))
        return room

    def room_in(self, tier: Tier, key: bytes, size: int, *, passing: bool) -> int | None:
        """Bytes that a block may take without anyone leaving; None where the policy does not want it at all."""
        self._follow_policy()
        if passing:
            return tier.free
        free = int(min(tier.free - self._held_back(tier), self.limits.room(tier.number, key)))
        return free if self._policies[tier.number].admits(key, size, free) else None

    def _held_back(self, tier: Tier) -> int:
        """Room for passing blocks that a policy which never evicts must leave."""
        if tier is not self._memory or self._policies[MEMORY].evicts:
            return 0
        return max(0, self._share - self._passing.bytes)

    # --- who goes -----------------------------------------------------------------------------------------------------

    def makers_of_room(self, tier: Tier, size: int, key: bytes, *, passing: bool) -> list[bytes]:
        """Blocks that free *size* bytes or more for a block, or none; nobody else will be given the same."""
        incoming = b"" if passing else key
        ahead = max(size, tier.capacity >> _AHEAD_SHIFT)
        # Its dataset's own blocks first, where that is at its limit: that makes room in the tier as well.
        if not passing and self.limits.room(tier.number, key) - (tier.free - self._held_back(tier)) < size:
            return self._part_with(tier, self.limits.victims(tier.number, size, self._pinned, key))
        if self._keeps_passing(tier):
            for wanted in (size,) if passing else (ahead, size):
                if victims := self._take(tier, wanted, 0, self._pinned, incoming):
                    return victims
        share = self._passing.bytes if tier is self._memory else 0
        # A reader waits for a passing block: it goes before a pin.
        pinned = () if passing else self._pinned
        return self._take(tier, ahead, share, pinned, incoming) or self._take(tier, size, share, pinned, incoming)

    def surplus(self, tier: Tier, size: int) -> list[bytes]:
        """Blocks that free *size* bytes as the tier must shrink, or none."""
        return self._take(tier, size, self._passing.bytes if tier is self._memory else 0, self._pinned)

    def beyond_limits(self, tier: Tier) -> list[bytes]:
        """Blocks that must go since datasets have more of the tier than they may."""
        return self._part_with(tier, self.limits.surplus(tier.number, self._pinned))

    def expired(self, now: float) -> list[bytes]:
        """Blocks whose time is over; none when there are no more."""
        return self.limits.expired(now, self._pinned)

    def _keeps_passing(self, tier: Tier) -> bool:
        """Are passing blocks so few that what their readers have not read yet may be among them?"""
        if tier is not self._memory or not self._policies[MEMORY].evicts:
            return False
        return len(self._passing) < _PASSING_KEPT and self._passing.bytes < self._share // 2

    def _take(
        self, tier: Tier, size: int, passing: int, pinned: Collection[bytes], incoming: bytes = b""
    ) -> list[bytes]:
        """Blocks that free *size* bytes, the first *passing* of them of passing blocks, or none."""
        passing = min(size, passing)
        policy = self._policies[tier.number]
        victims = list(policy.victims(size - passing, pinned, incoming)) if size > passing and policy.evicts else []
        if size > passing and not victims:
            return []
        self._part_with(tier, victims)
        for key in self._passing.victims(passing, ()):
            self._passing.removed(key)
            victims.append(key)
        return victims

    def _part_with(self, tier: Tier, keys: Sequence[bytes]) -> list[bytes]:
        for key in keys:
            self._policies[tier.number].removed(key)
            self.limits.removed(key)
        return list(keys)

    def _keep(self, tier: int, key: bytes, size: int) -> None:
        self._policies[tier].added(key, size)
        self.limits.added(tier, key, size)

    def _count(self, tier: int, key: bytes, size: int) -> None:
        """For its dataset, as of the last use that its tier knows: a new one would be later than all in the memory
        tier, of which the SSD tier would then take nothing."""
        used = self._policies[tier].last_use(key)
        if used is not None:
            self._uses.between[key] = used
        self.limits.added(tier, key, size)
        if used is not None:
            self._uses.forget(key)

    def _forget(self, key: bytes, location: Location) -> None:
        self._policies[location.tier].removed(key)
        self.limits.removed(key)
        self._passing.removed(key)
        self._tiers[location.tier].blocks -= 1

    def _follow_policy(self) -> None:
        """A policy begins to evict when something is published, and ends when nothing is."""
        policy = self._policies[MEMORY]
        if policy.evicts == self._evicting:
            return
        self._evicting = policy.evicts
        if self._evicting:
            source: Policy = self._passing
            target, excess = policy, self._passing.bytes
        else:
            source, target = policy, self._passing
            excess = self._memory.used - self._passing.bytes - (self._memory.capacity - self._share)
        keys = source.victims(excess, self._pinned) or source.victims(excess, ()) if excess > 0 else ()
        for key in keys:
            source.removed(key)
            self.limits.removed(key)
            location = self._get(key)
            if location is not None and location.tier == MEMORY:
                target.added(key, span(location.length))
                if self._evicting:
                    self.limits.added(MEMORY, key, span(location.length))
