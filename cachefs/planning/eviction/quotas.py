"""Quotas: what single datasets may take of the tiers, and for how long.

A dataset with a share has, within each tier, a policy of its own of the tier's kind. That policy decides which of the
dataset's blocks are evicted for others of the same dataset, as in a tier of that size. Room that the dataset does not
use is available to all.

A block counts for the dataset whose fetch brought it, also where other datasets have it. A restart forgets that: blocks
found at the start, or when a quota is set, count for the first dataset that claims them. For the time to live, a read
is one that a mount reports or that the plan foresees, and a restart counts as a read.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from cachefs.planning.eviction.policies import EvictionPolicy
from cachefs.planning.sequences.plan import Plan

# Blocks whose future is looked up in one call, under the store's lock: 1 ms.
_EXPIRED_AT_ONCE: Final = 1024
# Least room made at once: 1/256 of the dataset's quota, as in a tier, since each step costs a commit.
_AHEAD_SHIFT: Final = 8
# A dataset with less than 1/64 of its quota free has no room for blocks that no reader waits for.
_FREE_SHIFT: Final = 6


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of one dataset."""

    dataset: str  # its name
    snapshots: frozenset[str]  # ids of the snapshots that the dataset has
    share: float = 1.0  # of each tier's bytes
    ttl: float = math.inf  # seconds that a block stays after its last read
    max_bytes: float = math.inf  # bytes of each tier

    @property
    def has_size_limit(self) -> bool:
        """True where the quota limits the dataset's bytes."""
        return self.share < 1 or self.max_bytes < math.inf


@dataclass(slots=True, eq=False)
class _LimitedDataset:
    """One dataset's blocks on this node."""

    quota: Quota
    policies: Sequence[EvictionPolicy]  # by tier
    used: list[int]  # bytes by tier: of blocks that are kept, and of blocks that are being written
    # Time of each block's last read (monotonic seconds), oldest first, including transient blocks.
    last_read: OrderedDict[bytes, float] = field(default_factory=OrderedDict)
    kept: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # tier and bytes of blocks that are kept
    being_written: dict[bytes, tuple[int, int]] = field(
        default_factory=dict
    )  # the same of blocks that are being written
    expected: dict[bytes, int] = field(default_factory=dict)  # number of expected fetches of the block

    def note_read(self, key: bytes, now: float) -> None:
        """Record a read of the block."""
        self.last_read[key] = now
        self.last_read.move_to_end(key)


class Quotas:
    """Tracks the blocks of datasets with a quota. Its methods are the events in the life of such a block, and the
    queries before them."""

    def __init__(self, capacities: Sequence[int], policies: Callable[[], Sequence[EvictionPolicy]], plan: Plan) -> None:
        """capacities: bytes by tier; policies: makes a policy for each tier."""
        self.fetched_snapshots: set[str] = set()  # ids of snapshots for which blocks came; emptied by the caller
        self._capacities = capacities
        self._make_policies = policies
        self._plan = plan
        self._limited: dict[str, _LimitedDataset] = {}  # by name of the dataset
        self._of_snapshot: dict[str, _LimitedDataset] = {}  # snapshot id -> the limited dataset that has it
        self._owners: dict[bytes, _LimitedDataset] = {}  # block key -> the dataset for which the block counts

    # --- what is allowed ----------------------------------------------------------------------------------------------

    def set_quota(self, quota: Quota) -> None:
        """Set or replace the quota of a dataset."""
        known = self._limited.get(quota.dataset)
        if known is None:
            self._limited[quota.dataset] = _LimitedDataset(quota, self._make_policies(), [0] * len(self._capacities))
        else:
            known.quota = quota
        self._name_snapshots()

    def remove_quota(self, dataset: str) -> None:
        """Remove the quota of a dataset, if any: its blocks stay, and count for no dataset."""
        gone = self._limited.pop(dataset, None)
        if gone is not None:
            for key in gone.last_read:
                del self._owners[key]
            self._name_snapshots()

    def set_capacities(self, capacities: Sequence[int]) -> None:
        """Set the capacities of the tiers: bytes by tier."""
        self._capacities = capacities

    def _name_snapshots(self) -> None:
        self._of_snapshot = {
            snapshot: one
            for name, one in sorted(self._limited.items(), reverse=True)
            for snapshot in one.quota.snapshots
        }

    def _tier_limit(self, one: _LimitedDataset, tier: int) -> int:
        return int(min(one.quota.max_bytes, one.quota.share * self._capacities[tier]))

    # --- what happens -------------------------------------------------------------------------------------------------

    def claim_block(self, key: bytes, snapshot: str, now: float) -> bool:
        """Count a block of *snapshot* that is about to come, or was found. Returns whether it now counts for the
        dataset of *snapshot*."""
        one = self._of_snapshot.get(snapshot)
        if one is None or key in self._owners:
            return False
        self._owners[key] = one
        one.last_read[key] = now
        return True

    def expect_fetch(self, key: bytes, snapshot: str, now: float) -> bool:
        """Record that a fetch is about to bring a block of *snapshot*. Returns False where the block counts for no
        dataset; otherwise it counts for one at least until a matching call of `end_expected_fetch`."""
        self.fetched_snapshots.add(snapshot)
        self.claim_block(key, snapshot, now)
        one = self._owners.get(key)
        if one is None:
            return False
        one.expected[key] = one.expected.get(key, 0) + 1
        return True

    def end_expected_fetch(self, key: bytes, *, is_here: bool) -> None:
        """End an expected fetch. is_here: whether the block is on this node."""
        one = self._owners.get(key)
        if one is None:
            return
        left = one.expected.pop(key, 1) - 1
        if left > 0:
            one.expected[key] = left
        elif not is_here:
            self.forget_block(key)

    def note_reserved(self, tier: int, key: bytes, size: int) -> None:
        """Count the block, for which *tier* has reserved room."""
        one = self._owners.get(key)
        if one is not None and key not in one.being_written and one.kept.get(key, (None,))[0] != tier:
            one.being_written[key] = tier, size
            one.used[tier] += size

    def note_written(self, key: bytes) -> None:
        """Record that the write of a block has ended, with or without success. `note_added` then tells where it is."""
        one = self._owners.get(key)
        tier, size = one.being_written.pop(key, (0, 0)) if one is not None else (0, 0)
        if one is not None:
            one.used[tier] -= size

    def note_added(self, tier: int, key: bytes, size: int) -> None:
        """Record that *tier* keeps the block, which takes *size* bytes of it."""
        one = self._owners.get(key)
        if one is not None:
            self.note_removed(key)
            one.kept[key] = tier, size
            one.used[tier] += size
            one.policies[tier].note_added(key, size)

    def note_removed(self, key: bytes) -> None:
        """Record that the block has left its tier; it may still move to another one."""
        one = self._owners.get(key)
        location = one.kept.pop(key, None) if one is not None else None
        if one is not None and location is not None:
            tier, size = location
            one.used[tier] -= size
            one.policies[tier].note_removed(key)

    def forget_block(self, key: bytes) -> None:
        """Record that the block is not on this node. It still counts while a fetch is expected."""
        self.note_removed(key)
        one = self._owners.get(key)
        if one is not None and key not in one.expected:
            self.note_written(key)
            del self._owners[key], one.last_read[key]

    def note_accessed(self, keys: Iterable[bytes], now: float) -> None:
        """Record uses of these blocks, oldest first. Blocks of no limited dataset are ignored. now: monotonic
        seconds."""
        if not self._owners:
            return
        for key in keys:
            one = self._owners.get(key)
            if one is not None:
                one.note_read(key, now)
                for policy in one.policies:
                    policy.note_accessed(key)

    # --- admission and eviction ---------------------------------------------------------------------------------------

    def room_left(self, tier: int, key: bytes) -> float:
        """Return the bytes that the block's dataset may still take of *tier*: inf without a limit, negative where it
        has too much."""
        one = self._owners.get(key)
        if one is None or not one.quota.has_size_limit or one.kept.get(key, (None,))[0] == tier:
            return math.inf
        return self._tier_limit(one, tier) - one.used[tier]

    def room_for(self, tier: int, key: bytes, snapshot: str) -> float:
        """Return about how many bytes the dataset of *snapshot* may still take, or would evict for this block."""
        one = self._of_snapshot.get(snapshot)
        if one is None or not one.quota.has_size_limit:
            return math.inf
        return max(0, self._tier_limit(one, tier) - one.used[tier]) + one.policies[tier].replaceable_bytes(key)

    def allowance(self, snapshot: str) -> float:
        """Return the bytes by which the dataset of *snapshot* may still grow; inf without a limit."""
        one = self._of_snapshot.get(snapshot)
        if one is None or not one.quota.has_size_limit:
            return math.inf
        quotas = [self._tier_limit(one, tier) for tier in range(len(self._capacities))]
        return sum(max(0, quota - (quota >> _FREE_SHIFT) - used) for quota, used in zip(quotas, one.used, strict=True))

    def choose_victims(self, tier: int, size: int, pinned: Collection[bytes], incoming: bytes) -> Sequence[bytes]:
        """Return blocks of *incoming*'s dataset that free *size* bytes for it, or none."""
        one = self._owners[incoming]
        policy = one.policies[tier]
        if not policy.can_evict:
            return ()
        ahead = max(size, self._tier_limit(one, tier) >> _AHEAD_SHIFT)
        return policy.choose_victims(ahead, pinned, [incoming]) or policy.choose_victims(size, pinned, [incoming])

    def choose_surplus(self, tier: int, size: int, pinned: Collection[bytes]) -> list[bytes]:
        """Return some unpinned blocks to evict after quotas were lowered: those chosen by the policy, else those unread
        for longest. Empty when there are no more. size: about how many bytes at once."""
        for one in self._limited.values():
            excess = min(size, one.used[tier] - self._tier_limit(one, tier))
            if excess > 0 and one.quota.has_size_limit:
                policy = one.policies[tier]
                chosen = policy.choose_victims(excess, pinned) if policy.can_evict else ()
                if found := list(chosen) or _longest_unread(one, tier, excess, pinned):
                    return found
        return []

    def choose_expired(self, now: float, pinned: Collection[bytes]) -> list[bytes] | None:
        """Return some blocks unread for their time to live that no plan foresees; empty where all examined blocks are
        still wanted; None when there are no more. now: monotonic seconds, the same in all these calls."""
        for one in self._limited.values():
            if overdue := _overdue(one, now):
                awaited = self._plan.next_use(overdue) < math.inf
                kept = {key for key, wanted in zip(overdue, awaited.tolist(), strict=True) if wanted or key in pinned}
                for key in kept:
                    one.note_read(key, now)
                return [key for key in overdue if key not in kept]
        return None

    def catch_up(self, tier: int) -> bool:
        """Process a part of the work that a change of the plan has left. Returns False where there was none."""
        return any(one.policies[tier].catch_up() for one in self._limited.values())


def _overdue(one: _LimitedDataset, now: float) -> list[bytes]:
    found: list[bytes] = []
    for key, read in one.last_read.items():
        if now - read <= one.quota.ttl or len(found) == _EXPIRED_AT_ONCE:
            break
        found.append(key)
    return found


def _longest_unread(one: _LimitedDataset, tier: int, size: int, pinned: Collection[bytes]) -> list[bytes]:
    found: list[bytes] = []
    for key in one.last_read:
        location = one.kept.get(key)
        if size <= 0:
            break
        if location is not None and location[0] == tier and key not in pinned:
            found.append(key)
            size -= location[1]
    return found
