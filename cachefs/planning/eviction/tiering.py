"""Decides the fate of the blocks of a node: which tier takes a block, which blocks are evicted for it, which are
transient, and which are pinned.

A block that no policy admits is *transient*: it is in the memory tier for the readers that wait for it, first in, first
out, and is evicted before all others. Where a policy never evicts, room is held back for transient blocks. Where one
does, they are few, and displace each other once there are enough of them.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from cachefs.block import MEMORY
from cachefs.planning.blocks.presence import Presence, state_in_tier
from cachefs.planning.eviction.policies import EvictionPolicy
from cachefs.planning.eviction.policies.lru import Lru, UseOrder
from cachefs.planning.eviction.quotas import Quotas

# Least room made at once: 1/1024 of the tier, or of a small one up to 2 MiB: to evict blocks of 110 KB one by one takes
# 0.9 ms each, 16 at once 0.3. More is not made, since room that is made too early makes the cache smaller.
_AHEAD_SHIFT: Final = 10
_AHEAD_BYTES: Final = 2 << 20
# But no more than 1/128 of it; 1/32 where evicted blocks move to the next tier.
_MOST_AHEAD_SHIFT: Final = 7
_MOST_MOVED_SHIFT: Final = 5
# A tier with less than 1/64 free is full.
_FREE_SHIFT: Final = 6
# Blocks that are chosen, or move between two lists, in one call: the store calls under its lock, and they take 3 to 10
# ms.
_BLOCKS_AT_ONCE: Final = 512
# Transient blocks that stay for their readers even where a policy evicts: 8 readers with 4 blocks each.
_MIN_TRANSIENT_BLOCKS: Final = 32


class TierRoom(Protocol):
    """The part of a tier that decisions use, in bytes."""

    @property
    def number(self) -> int:
        """MEMORY or SSD (cachefs.block)."""

    @property
    def capacity(self) -> int:
        """Bytes of blocks that fit into its budget."""

    @property
    def limit(self) -> int:
        """Bytes it may take now: fewer than `capacity` where the machine has less room."""

    @property
    def used(self) -> int:
        """Bytes it takes now."""

    @property
    def free(self) -> int:
        """Bytes that can be reserved now; negative where its limit has sunk below what it uses."""

    @property
    def problem(self) -> str:
        """Why it takes no new blocks; empty while it does."""


@dataclass(frozen=True, slots=True)
class TierLocation:
    """The tier of a block, and its size there."""

    tier: int  # number of the tier: MEMORY or SSD (cachefs.block)
    size: int  # bytes of the block, as the tier accounts for them


class IncomingBlock(NamedTuple):
    """A block that is to come into a tier."""

    key: bytes
    size: int  # bytes, as the tier accounts for them


def transient_room(budget: int, largest: int, capacity: int) -> int:
    """Return the bytes of the memory tier for transient blocks. largest: bytes of the largest block in a tier."""
    return min(max(budget // 8, 4 * largest), capacity)


def has_free_room(tier: TierRoom) -> bool:
    """Return whether the tier has room for blocks without evictions. Room is made in larger steps than needed, so a
    little free room counts as a full tier."""
    return not tier.problem and tier.free > tier.capacity >> _FREE_SHIFT


@dataclass(frozen=True, slots=True)
class TierPolicies:
    """The policies of a node's tiers."""

    by_tier: Sequence[EvictionPolicy]
    # Shared by these policies and those of quotas, so that a block that moves keeps its place in the order of uses.
    uses: UseOrder


@dataclass(slots=True)
class TierCounts:
    """Counters of one tier."""

    blocks: int = 0  # in it now
    evicted: int = 0  # moved down or dropped since the start


class Tiering:
    """Makes the decisions, and tracks where blocks are. Each public method is one event in the life of a block, or one
    query before it. Not thread-safe, but `free_bytes` may be called at any time.
    """

    def __init__(
        self,
        tiers: Sequence[TierRoom],
        policies: TierPolicies,
        quotas: Quotas,
        presence: Presence,
        locate: Callable[[bytes], TierLocation | None],
        transient: int,
    ) -> None:
        """locate: returns where a block is according to the index; transient: bytes for transient blocks (see
        `transient_room`)."""
        self.quotas = quotas  # knows which blocks count for which dataset
        self.counts = [TierCounts() for _ in tiers]  # by tier number
        self._presence = presence
        self._tiers = tiers
        self._policies = policies.by_tier
        self._uses = policies.uses
        self._locate = locate
        self._memory = tiers[MEMORY]
        self._transient = Lru()
        self._pinned: set[bytes] = set()
        self._was_evicting = self._policies[MEMORY].can_evict  # as of the last `_follow_policy`
        # bytes that must still move between policy and transient blocks after a change of `can_evict`
        self._to_move = 0
        self._transient_budget = transient  # bytes for transient blocks
        self._recovered = 0  # bytes found in memory at the start, without transient blocks

    def set_capacities(self, transient: int) -> None:
        """Adapt to changed capacities of the tiers. transient: as at the start."""
        self._transient_budget = transient
        self.quotas.set_capacities([tier.capacity for tier in self._tiers])

    # --- what happens -------------------------------------------------------------------------------------------------

    def note_recovered(self, tier: int, key: bytes, size: int) -> None:
        """Record a block of an earlier run."""
        self.counts[tier].blocks += 1
        policy = self._policies[tier]
        if tier == MEMORY and not policy.can_evict:
            # Which blocks were transient is not recorded: to a policy that keeps any fixed set they are all alike.
            if self._recovered + size > self._memory.capacity - self._transient_budget:
                self._transient.note_added(key, size)
                return
            self._recovered += size
        policy.note_added(key, size)

    def note_entered(self, key: bytes, location: TierLocation, *, transient: bool) -> None:
        """Record that a block is in a tier now that was in none before."""
        if transient:
            self._transient.note_added(key, location.size)
        else:
            self._hand_to_policy(key, location)
        self.counts[location.tier].blocks += 1
        self._presence.set_state(key, state_in_tier(location.tier))

    def note_left(self, key: bytes, tier: int) -> None:
        """Record that a block has left its tier, and the node."""
        self._forget_block(key, tier)
        self.quotas.forget_block(key)
        self._uses.forget_use(key)
        self._presence.set_state(key, state_in_tier(None))

    def adopt_blocks(self, keys: Iterable[bytes]) -> None:
        """Hand transient blocks among these to the policy, as they are this node's to keep from now on: the node that
        had them drops them."""
        for key in keys:
            location = self._locate(key) if key in self._transient else None
            if location is not None:
                self._transient.note_removed(key)
                self._hand_to_policy(key, location)

    def note_moved(self, key: bytes, old: int, new: TierLocation) -> None:
        """Record that a block has moved from tier *old* to another one."""
        self._forget_block(key, old)
        if new.tier < old:
            self._uses.forget_use(key)  # a copy up is for a use soon, and counts as a new use
        self._hand_to_policy(key, new)
        self._uses.forget_use(key)
        self.counts[new.tier].blocks += 1
        self._presence.set_state(key, state_in_tier(new.tier))

    def note_accessed(self, keys: Sequence[bytes], now: float) -> None:
        """Record uses of these blocks, oldest first. now: monotonic seconds."""
        for key in keys:
            for policy in self._policies:
                policy.note_accessed(key)
        self.quotas.note_accessed(keys, now)

    def claim_blocks(self, keys: Iterable[bytes], snapshot: str, now: float) -> None:
        """Count blocks that are here, and count for no dataset, for the dataset that has *snapshot*."""
        for key in keys:
            location = self._locate(key)
            if location is not None and self.quotas.claim_block(key, snapshot, now) and key not in self._transient:
                self._count_for_dataset(key, location)

    def pin_blocks(self, keys: Iterable[bytes]) -> None:
        """Keep these blocks, once a policy has admitted them, until they are unpinned or evicted by name."""
        self._pinned.update(keys)

    def unpin_blocks(self, keys: Iterable[bytes]) -> None:
        """Allow evictions of these blocks again."""
        self._pinned.difference_update(keys)

    # --- which block may come -----------------------------------------------------------------------------------------

    def free_bytes(self, tier: TierRoom) -> int:
        """Return the bytes that are neither in use nor reserved. Room is made in larger steps than needed, so a little
        free room counts as none."""
        little = max(tier.capacity >> _FREE_SHIFT, self._eviction_step(tier))
        return 0 if tier.problem else max(0, tier.free - self._reserved_bytes(tier) - little)

    @property
    def free_by_tier(self) -> tuple[int, ...]:
        """`free_bytes` of each tier."""
        return tuple(self.free_bytes(tier) for tier in self._tiers)

    @property
    def transient_readahead_bytes(self) -> int:
        """Bytes that transient blocks without a waiting reader may take: none where a policy evicts, as others would be
        evicted for them."""
        return 0 if self._policies[MEMORY].can_evict or self._memory.problem else self._transient_share // 2

    @property
    def can_keep_copies(self) -> bool:
        """True where copies of other nodes' blocks may take room beyond that of transient ones. Where a policy never
        evicts, they would take it for ever, and this node's own blocks would find none."""
        return self._policies[MEMORY].can_evict

    @property
    def max_extra_bytes(self) -> int:
        """Most bytes that `choose_victims` frees beyond a block's need, over all tiers."""
        return sum(self._eviction_step(tier) for tier in self._tiers)

    def room_for(self, key: bytes, snapshot: str = "") -> int:
        """Return about how many bytes are free, or taken by blocks that would be evicted for this one of *snapshot*."""
        self._follow_policy()
        room = 0
        for tier in self._tiers:
            if not tier.problem:
                here = max(0, tier.free - self._reserved_bytes(tier)) + self._policies[tier.number].replaceable_bytes(
                    key
                )
                room += int(min(here, self.quotas.room_for(tier.number, key, snapshot)))
        return room

    def room_in(self, tier: TierRoom, key: bytes, *, transient: bool) -> int:
        """Return the bytes that a block may take without any eviction."""
        self._follow_policy()
        if transient:
            return tier.free
        return int(min(tier.free - self._reserved_bytes(tier), self.quotas.room_left(tier.number, key)))

    def rank_incoming(self, tier: TierRoom, blocks: Sequence[IncomingBlock]) -> list[int]:
        """Return the blocks (as indices) for which others may be evicted, most wanted first."""
        policy = self._policies[tier.number]
        if tier.number == MEMORY and self._transient.bytes >= sum(block.size for block in blocks):
            # Transient blocks give way to all blocks that the policy admits. Beyond their own room they are copies of
            # other nodes' blocks, which count as free room to a policy that never evicts.
            spare = 0 if policy.can_evict else max(0, self._transient.bytes - self._transient_share)
            return [index for index, block in enumerate(blocks) if policy.can_admit(block.key, block.size, spare)]
        return policy.rank_incoming([block.key for block in blocks], self._pinned)

    def _reserved_bytes(self, tier: TierRoom) -> int:
        """Return the room that a policy which never evicts must leave for transient blocks."""
        if tier.number != MEMORY or self._policies[MEMORY].can_evict:
            return 0
        return max(0, self._transient_share - self._transient.bytes)

    @property
    def _transient_share(self) -> int:
        """Bytes for transient blocks: at most half of a tier that has shrunk."""
        memory = self._memory
        return (
            self._transient_budget
            if memory.limit >= memory.capacity
            else min(self._transient_budget, memory.limit // 2)
        )

    # --- which blocks are evicted -------------------------------------------------------------------------------------

    def choose_victims(self, tier: TierRoom, blocks: Sequence[IncomingBlock], *, transient: bool) -> list[bytes]:
        """Return blocks to evict so that there is room for all of these, or else for the first of them; or none. No
        other call returns them again."""
        first = blocks[0]
        free = tier.free if transient else tier.free - self._reserved_bytes(tier)
        # Where the block's dataset is at its quota, blocks of the dataset are evicted, which makes room in the tier
        # too.
        if not transient and (room := self.quotas.room_left(tier.number, first.key)) < first.size:
            missing = first.size - min(free, int(room))
            return self._release_blocks(tier, self.quotas.choose_victims(tier.number, missing, self._pinned, first.key))
        for wanted in (blocks, blocks[:1]) if len(blocks) > 1 else (blocks,):
            missing = max(1, sum(block.size for block in wanted) - free)
            incoming = [] if transient else [block.key for block in wanted]
            if victims := self._choose_victims(tier, missing, incoming):
                return victims
        return []

    def _choose_victims(self, tier: TierRoom, size: int, incoming: Sequence[bytes]) -> list[bytes]:
        """Return blocks that free *size* bytes for each of *incoming*, or for transient ones where that is empty; or
        none."""
        ahead = self._eviction_step(tier)
        sizes = (size,) if size >= ahead else (ahead, size)
        tries = [(size_to_free, 0, self._pinned) for size_to_free in sizes if incoming or size_to_free == size]
        if not self._must_keep_transient(tier):
            tries = []
        share = self._transient.bytes if tier.number == MEMORY else 0
        # A reader waits for a transient block, so even a pinned one is evicted for it.
        tries += [(size_to_free, share, self._pinned if incoming else set()) for size_to_free in sizes]
        for size_to_free, transient, pinned in tries:
            if victims := self._choose_and_release(tier, size_to_free, transient, pinned, incoming):
                return victims
        return []

    def _eviction_step(self, tier: TierRoom) -> int:
        """Return the least bytes that come free where a tier makes room."""
        most = _MOST_AHEAD_SHIFT if tier is self._tiers[-1] else _MOST_MOVED_SHIFT
        return max(tier.capacity >> _AHEAD_SHIFT, min(tier.capacity >> most, _AHEAD_BYTES))

    def excess_bytes(self, tier: TierRoom) -> int:
        """Return the bytes that must go after the tier's limit was lowered; 0 or less where none must. Where the policy
        never evicts, the room for transient blocks is included, as it would not be made otherwise."""
        return -self._transient_excess(tier, 0) - tier.free

    def choose_surplus(self, tier: TierRoom) -> list[bytes]:
        """Return some blocks to evict since the tier must shrink; none where its policy names none. Call again until
        `excess_bytes` is gone: each call finds about _BLOCKS_AT_ONCE blocks."""
        size = min(self.excess_bytes(tier), self._bytes_at_once(tier))
        if size <= 0:
            return []
        transient = self._transient_excess(tier, self._transient.bytes) if tier.number == MEMORY else 0
        return self._choose_and_release(tier, size, max(0, transient), self._pinned) or self._choose_and_release(
            tier, transient, transient, ()
        )

    def _transient_excess(self, tier: TierRoom, most: int) -> int:
        """Return the bytes, at most *most*, by which transient blocks exceed their room in a tier that has shrunk;
        negative where they have less. Where the policy evicts, they have no room of their own."""
        if tier.number != MEMORY or self._policies[MEMORY].can_evict or tier.limit >= tier.capacity:
            return most
        return min(most, self._transient.bytes - self._transient_share)

    def filter_unpinned(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return those of these blocks that are not pinned."""
        return [key for key in keys if key not in self._pinned]

    def choose_beyond_quotas(self, tier: TierRoom) -> list[bytes]:
        """Return some blocks to evict since datasets exceed their quotas of the tier; none when there are no more."""
        return self._release_blocks(
            tier, self.quotas.choose_surplus(tier.number, self._bytes_at_once(tier), self._pinned)
        )

    def choose_expired(self, now: float) -> list[bytes] | None:
        """Return some blocks expired at *now* (monotonic seconds), or none of the examined ones; None when there are no
        more."""
        return self.quotas.choose_expired(now, self._pinned)

    def catch_up(self, tier: TierRoom) -> bool:
        """Process a part of the work that a change of the plan has left. Returns False where there was none; until then
        the other calls may name fewer blocks of the tier than there are."""
        moving = self._to_move > 0
        self._follow_policy()
        return self._policies[tier.number].catch_up() or self.quotas.catch_up(tier.number) or moving

    def _bytes_at_once(self, tier: TierRoom) -> int:
        """Return the bytes of about _BLOCKS_AT_ONCE blocks of the tier."""
        blocks = self.counts[tier.number].blocks
        return _BLOCKS_AT_ONCE * tier.used // blocks if blocks else tier.capacity

    def _must_keep_transient(self, tier: TierRoom) -> bool:
        """Return whether transient blocks are so few that some may not have been read yet by their waiting readers."""
        if tier.number != MEMORY or not self._policies[MEMORY].can_evict:
            return False
        return len(self._transient) < _MIN_TRANSIENT_BLOCKS and self._transient.bytes < self._transient_budget // 2

    def _choose_and_release(
        self, tier: TierRoom, size: int, transient: int, pinned: Collection[bytes], incoming: Sequence[bytes] = ()
    ) -> list[bytes]:
        """Return blocks that free *size* bytes, the first *transient* bytes from transient blocks; or none."""
        transient = min(size, transient)
        policy = self._policies[tier.number]
        victims = (
            list(policy.choose_victims(size - transient, pinned, incoming))
            if size > transient and policy.can_evict
            else []
        )
        if size > transient and not victims:
            return []
        self._release_blocks(tier, victims)
        for key in self._transient.choose_victims(transient, ()):
            self._transient.note_removed(key)
            victims.append(key)
        return victims

    def _release_blocks(self, tier: TierRoom, keys: Sequence[bytes]) -> list[bytes]:
        for key in keys:
            self._policies[tier.number].note_removed(key)
            self.quotas.note_removed(key)
        return list(keys)

    def _hand_to_policy(self, key: bytes, location: TierLocation) -> None:
        self._policies[location.tier].note_added(key, location.size)
        self.quotas.note_added(location.tier, key, location.size)

    def _count_for_dataset(self, key: bytes, location: TierLocation) -> None:
        """Count a block for its dataset, with the last use known to its tier. A new use would be later than all in the
        memory tier, and the SSD tier would then take nothing from there."""
        used = self._policies[location.tier].last_use(key)
        if used is not None:
            self._uses.moving_uses[key] = used
        self.quotas.note_added(location.tier, key, location.size)
        if used is not None:
            self._uses.forget_use(key)

    def _forget_block(self, key: bytes, tier: int) -> None:
        self._policies[tier].note_removed(key)
        self.quotas.note_removed(key)
        self._transient.note_removed(key)
        self.counts[tier].blocks -= 1

    def _follow_policy(self) -> None:
        """Follow a policy that begins to evict with the first publication, or stops without any. Blocks then move
        between policy and transient ones, some at each call: 200,000 at once would take half a second."""
        policy = self._policies[MEMORY]
        if policy.can_evict != self._was_evicting:
            self._was_evicting = policy.can_evict
            kept = self._memory.used - self._transient.bytes
            self._to_move = (
                self._transient.bytes if self._was_evicting else kept - (self._memory.capacity - self._transient_budget)
            )
        if self._to_move > 0:
            self._move_some(min(self._to_move, self._bytes_at_once(self._memory)))

    def _move_some(self, size: int) -> None:
        """Move blocks of *size* bytes or more between policy and transient ones."""
        policy = self._policies[MEMORY]
        source, target = (self._transient, policy) if self._was_evicting else (policy, self._transient)
        keys = source.choose_victims(size, self._pinned) or source.choose_victims(size, ())
        if not keys and source.catch_up():
            return
        self._to_move = self._to_move - size if keys else 0
        for key in keys:
            source.note_removed(key)
            self.quotas.note_removed(key)
            location = self._locate(key)
            if location is not None and location.tier == MEMORY:
                target.note_added(key, location.size)
                if self._was_evicting:
                    self.quotas.note_added(MEMORY, key, location.size)
