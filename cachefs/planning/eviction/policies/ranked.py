"""Policies based on the plan: each block has a score, and the block with the highest score is evicted first.

Scores are computed for whole arrays, and only for a short list of candidates each time. That loses nothing. After an
examination of all blocks the candidates are those with the highest scores. Later only a block that was consumed or
added meanwhile can score higher than a candidate, and such a block becomes a candidate too. Eviction is therefore
exact, except for different speeds of two consumers.

Blocks in the page cache that the tier below would keep are evicted before others (see MemoryCoverage in
cachefs.planning.pagecache.states). Blocks enter and leave the page cache between two examinations: a block that has
entered is no candidate yet and stays in memory a little longer, at most until half of the candidates are taken; a block
that has left ranks by its own next read at once.

In a cluster, copies of other nodes' blocks are evicted before all else (see cachefs.planning.cluster.ownership). There
are few, as each is evicted soon after its read, so they have a list of their own, which is examined each time. Second
copies are in this list too, behind all others; where there are many, only as many as may be evicted next.

Measured at 1.3 million blocks and 8 consumers: an examination of all blocks takes 60 to 100 ms, once per 2,048 victims;
a batch of 256 victims 1.5 ms; all in all 37 us per victim. `note_added` takes 7 us. Each tier needs 5 bytes per block
of the snapshot, and some 100 per unplanned block. Copies raise the cost of a victim by a tenth.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import NO_BLOCK, BlockSpace, Numbers, distinct
from cachefs.planning.cluster.ownership import COPY_PENALTY, Ownership
from cachefs.planning.pagecache.states import MemoryCoverage
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.timeline import Seconds

# Candidates after an examination of all blocks: one in _CANDIDATE_RATIO of them, within these limits.
_CANDIDATE_RATIO: Final = 32
_MIN_CANDIDATES: Final = 64
_MAX_CANDIDATES: Final = 4096
# Unsettled blocks, which came before their snapshot was planned, that one call looks up in the plan: 3 ms.
_SETTLED_AT_ONCE: Final = 4096
_KEYS_AT_ONCE: Final = 256


@dataclass(slots=True, eq=False)
class _TierBlocks:
    """The tier's blocks of one snapshot."""

    space: BlockSpace
    sizes: npt.NDArray[np.uint32]  # per block of the space: bytes as accounted by the tier, 0 where it lacks the block
    excluded: npt.NDArray[np.bool_]  # per block: pinned when examined; examined again when the plan changes
    count: int = 0  # blocks that the tier has
    candidates: npt.NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, np.intp))
    fresh: list[int] = field(default_factory=list)  # blocks added since the last examination
    # Blocks that are another node's to keep; of very many, those with the highest scores.
    copies: npt.NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, np.intp))


class RankedPolicy:
    """Base of policies with scores, which subclasses define. Blocks of no planned snapshot (*unplanned* ones) have an
    infinite score: they are evicted first, the oldest first. A block is taken where there is room, or where others
    score higher. Without any publication, the blocks that came first stay, as with `minio`.
    """

    def __init__(self, plan: Plan, coverage: MemoryCoverage | None = None, ownership: Ownership | None = None) -> None:
        """coverage: blocks in page caches that the tier below keeps, evicted first; None to ignore page caches.
        ownership: which blocks are this node's to keep; None without other nodes."""
        self.bytes = 0  # size of all blocks it holds
        self._plan = plan
        self._coverage = coverage
        self._ownership = ownership
        self._lost_mark = 0  # mark of `Ownership.lost_since` up to which changes were processed
        self._spaces: dict[str, BlockSpace] = {}
        self._members: dict[str, _TierBlocks] = {}
        self._unplanned: dict[bytes, int] = {}  # size of each block, the oldest first
        self._unsettled: dict[bytes, int] = {}  # blocks not yet looked up in the planned snapshots
        self._version = -1  # of the plan, at the last examination of all blocks
        self._pin_count = 0  # number of pins at that examination
        self._mark = 0  # mark of the plan's consumed reads that were processed
        self._victims_taken = 0  # victims since that examination
        self._is_stale = True  # whether the candidates must be checked: blocks were added, removed, or read
        self._victims_before_examination = 0  # victims after which all blocks are examined again
        # The candidate with the lowest score at the last examination (its snapshot, and its number as an array of one);
        # None where all blocks became candidates.
        self._lowest_candidate: tuple[str, npt.NDArray[np.intp]] | None = None

    @property
    def can_evict(self) -> bool:
        return not self._plan.is_empty

    def _scores(self, snapshot: str, ids: Numbers) -> Seconds:
        """Return the score of each of the blocks *ids* (shape (n,)) of *snapshot*: shape (n,), float64."""
        raise NotImplementedError

    def _base_scores(self, snapshot: str, ids: Numbers) -> Seconds:
        """Return the scores by which blocks are compared, apart from the priority of copies."""
        scores = self._scores(snapshot, ids)
        owed = self._ownership.pending_handoffs.get(snapshot) if self._ownership is not None else None
        if owed is not None:
            scores[owed[ids.astype(np.intp, copy=False)]] = -COPY_PENALTY
        if self._coverage is None or (self._ownership is not None and snapshot in self._ownership.owned):
            # Other nodes cannot fetch blocks from page caches.
            return scores
        return self._coverage.raise_scores(snapshot, ids, scores)

    def _eviction_scores(self, snapshot: str, ids: Numbers) -> Seconds:
        """Return `_base_scores`, with copies above all other blocks."""
        scores = self._base_scores(snapshot, ids)
        if self._ownership is not None:
            copies = self._first_to_evict(self._ownership, snapshot, ids, scores)
            self._ownership.raise_copies(snapshot, ids, copies, scores)
        return scores

    def _first_to_evict(
        self, ownership: Ownership, snapshot: str, ids: Numbers, scores: Seconds
    ) -> npt.NDArray[np.bool_]:
        """Return which blocks are copies to be evicted first: shape (n,), bool. scores: of `_base_scores`, shape
        (n,)."""
        raised = ownership.evictable_copies(snapshot, ids, scores)
        mine = ownership.owned.get(snapshot)
        if self._coverage is not None and mine is not None:
            # A reader that is about to read the block reads it from the page cache.
            raised |= ~mine[ids.astype(np.intp, copy=False)] & self._coverage.are_covered(snapshot, ids)
        return raised

    def _incoming_scores(self, snapshot: str, ids: Numbers) -> Seconds:
        """Return the score that blocks must exceed to be evicted for these. A copy displaces only copies, however soon
        it is read: the cluster may have no other copy of blocks that are this node's to keep. A second copy that is not
        about to be read here displaces only other copies, and second ones that are read later."""
        scores = self._eviction_scores(snapshot, ids)
        mine = self._ownership.owned.get(snapshot) if self._ownership is not None else None
        if mine is not None:
            copies = ~mine[ids.astype(np.intp, copy=False)]
            scores[copies] = np.maximum(scores[copies], COPY_PENALTY / 2)
        return scores

    def incoming_score(self, key: bytes) -> float:
        """Return the score that a block must exceed to be evicted for this one; inf for an unplanned one."""
        return float(self._incoming_scores_of([key])[0])

    def _incoming_scores_of(self, keys: Sequence[bytes]) -> Seconds:
        """Return the `incoming_score` of each of these blocks: shape (keys,), float64."""
        scores = np.full(len(keys), np.inf)
        left = list(range(len(keys)))
        for snapshot, space in self._plan.spaces.items():
            numbers = [space.find(keys[index]) for index in left]
            here = [index for index, number in zip(left, numbers, strict=True) if number != NO_BLOCK]
            if here:
                ids = np.array([number for number in numbers if number != NO_BLOCK], np.intp)
                scores[here] = self._incoming_scores(snapshot, ids)
            left = [index for index, number in zip(left, numbers, strict=True) if number == NO_BLOCK]
            if not left:
                break
        return scores

    def can_admit(self, key: bytes, size: int, free: int) -> bool:
        return size <= free or (self.can_evict and self.incoming_score(key) < float("inf"))

    def note_added(self, key: bytes, size: int) -> None:
        self._settle_blocks()
        self.note_removed(key)
        self.bytes += size
        place = self._find(key)
        if place is None:
            self._unplanned[key] = size
        else:
            self._add_planned(*place, size)

    def note_accessed(self, key: bytes) -> None:
        """Ignore uses, which are known from the plan."""

    def note_removed(self, key: bytes) -> None:
        for others in (self._unplanned, self._unsettled):
            size = others.pop(key, 0)
            self.bytes -= size
            if size:
                return
        place = self._find(key)
        if place is not None:
            members, number = place
            self.bytes -= int(members.sizes[number])
            members.count -= bool(members.sizes[number])
            members.sizes[number] = 0
            self._is_stale = True

    def rank_incoming(self, keys: Sequence[bytes], pinned: Collection[bytes]) -> list[int]:
        if not self.can_evict:
            return []
        self._settle_blocks()
        scores = self._incoming_scores_of(keys)
        order = np.argsort(scores, kind="stable")
        return [int(place) for place in order[: int(np.count_nonzero(scores < self._highest_score(pinned)))]]

    def choose_victims(self, size: int, pinned: Collection[bytes], incoming: Sequence[bytes] = ()) -> Sequence[bytes]:
        if size > self.bytes or (incoming and not self.can_evict):
            return ()
        self._settle_blocks()
        bound = float(self._incoming_scores_of(incoming).max()) if incoming else float("-inf")
        if bound == float("inf"):
            return ()
        found: dict[bytes, None] = {}
        sources = (self._oldest_unplanned, self._unplanned_among_unsettled)
        ranked = (self._copies_by_score, self._candidates_by_score, self._others_by_score)
        for candidates in (*(one(pinned) for one in sources), *(one(bound, pinned) for one in ranked)):
            for key, block_size in candidates:
                if key in found:  # found earlier as a copy
                    continue
                found[key] = None
                size -= block_size
                if size <= 0:
                    self._victims_taken += len(found)
                    return list(found)
        return ()

    @property
    def next_score(self) -> float:
        """The score of the next victim, as of the last examination; inf where any block may be the next. -inf before
        the first examination, or where the policy evicts nothing."""
        if not self.can_evict:
            return -math.inf
        if self._unplanned or self._unsettled:
            return math.inf
        scores = (self._eviction_scores(snapshot, one.candidates) for snapshot, one in self._members.items())
        return max((float(some.max()) for some in scores if len(some)), default=-math.inf)

    def replaceable_bytes(self, incoming: bytes) -> int:
        """Return about how many bytes would be evicted for this block: those of unplanned blocks, and of candidates
        with a higher score."""
        score = self.incoming_score(incoming)
        if not self.can_evict or score == float("inf"):
            return 0
        self._settle_blocks()
        self._update_candidates(())
        total = sum(self._unplanned.values())
        for snapshot, members in self._members.items():
            ids = members.candidates
            if len(members.copies):
                ids = distinct(np.concatenate([ids, members.copies]))
            above = self._eviction_scores(snapshot, ids) > score
            total += int(members.sizes[ids[above]].sum(dtype=np.int64))
        return total

    def last_use(self, key: bytes) -> int | None:
        return None

    def catch_up(self) -> bool:
        behind = bool(self._unsettled)
        self._settle_blocks()
        return behind

    # --- blocks in the tier -------------------------------------------------------------------------------------------

    def _settle_blocks(self) -> None:
        if self._plan.spaces is not self._spaces:
            self._spaces = self._plan.spaces
            self._follow_spaces()
            self._is_stale = True
        if self._unsettled:
            self._settle_some(_SETTLED_AT_ONCE)

    def _follow_spaces(self) -> None:
        """Follow a change of the planned snapshots. Blocks of a removed snapshot move to another planned snapshot that
        has them, and else stay in the members, where they take less memory than as unplanned ones."""
        for snapshot, space in self._spaces.items():
            known = self._members.get(snapshot)
            if known is None:
                nothing = np.zeros(space.count, np.uint32)
                self._members[snapshot] = _TierBlocks(space, nothing, np.zeros(space.count, np.bool_))
                self._unsettled.update(self._unplanned)
                self._unplanned = {}
            else:
                known.space = space
        for snapshot, old in list(self._members.items()):
            if snapshot not in self._spaces:
                for planned in self._spaces:
                    _move_common_blocks(old, self._members[planned])
                if not old.count:
                    del self._members[snapshot]

    def _settle_some(self, count: int) -> list[tuple[bytes, int]]:
        """Look up some unsettled blocks in the planned snapshots. Returns those found in none, each with its size."""
        unplanned = []
        keys = list(islice(self._unsettled, count))
        homes: list[tuple[_TierBlocks, int] | None] = [None] * len(keys)
        for members in self._members.values():
            ids = members.space.ids(keys)
            for index in np.flatnonzero(ids != NO_BLOCK).tolist():
                homes[index] = homes[index] or (members, int(ids[index]))
        for key, home in zip(keys, homes, strict=True):
            size = self._unsettled.pop(key)
            if home is None:
                self._unplanned[key] = size
                unplanned.append((key, size))
            else:
                self._add_planned(*home, size)
        return unplanned

    def _find(self, key: bytes) -> tuple[_TierBlocks, int] | None:
        """Return the members that the block belongs to, or would belong to, and its number there."""
        would_be = None
        for snapshot, members in self._members.items():
            number = members.space.find(key)
            if number != NO_BLOCK:
                if members.sizes[number]:
                    return members, number
                if would_be is None and snapshot in self._spaces:
                    would_be = members, number
        return would_be

    def _add_planned(self, members: _TierBlocks, number: int, size: int) -> None:
        self._is_stale = True
        members.sizes[number] = size
        members.count += 1
        members.fresh.append(number)

    # --- eviction -----------------------------------------------------------------------------------------------------

    def _oldest_unplanned(self, pinned: Collection[bytes]) -> Iterator[tuple[bytes, int]]:
        passed = []
        used_up = False
        try:
            for key, size in self._unplanned.items():
                if key not in pinned:
                    yield key, size
                else:
                    passed.append(key)
            used_up = True
        finally:
            # Many pinned blocks are moved to the far end, so that they are not passed over each time.
            if used_up or len(passed) > _MIN_CANDIDATES:
                for key in passed:
                    self._unplanned[key] = self._unplanned.pop(key)

    def _unplanned_among_unsettled(self, pinned: Collection[bytes]) -> Iterator[tuple[bytes, int]]:
        """Yield more unplanned blocks, as long as each batch of unsettled ones has any, so that the work is in
        proportion to the result. All at once would take 2 s per million, under the store's lock; `catch_up` does the
        rest."""
        while self._unsettled and (found := self._settle_some(_SETTLED_AT_ONCE)):
            for key, size in found:
                if key not in pinned:
                    yield key, size

    def _highest_score(self, pinned: Collection[bytes]) -> float:
        """Return the highest score; inf where some blocks are not settled yet, or all candidates are gone."""
        if self._unplanned or self._unsettled:
            return math.inf
        self._update_candidates(pinned)
        scores = [
            self._eviction_scores(snapshot, ids)
            for snapshot, one in self._members.items()
            for ids in (one.candidates, one.copies)
        ]
        return max((float(some.max()) for some in scores if len(some)), default=math.inf)

    def _copies_by_score(self, bound: float, pinned: Collection[bytes]) -> Iterator[tuple[bytes, int]]:
        """Yield copies that score more than *bound*, highest first."""
        if self._ownership is not None:
            self._update_candidates(pinned)
            copies = [(one, members.copies) for one, members in self._members.items()]
            yield from self._by_score(copies, bound, pinned, copies=True)

    def _candidates_by_score(self, bound: float, pinned: Collection[bytes]) -> Iterator[tuple[bytes, int]]:
        """Yield candidates that score more than *bound*, highest first."""
        self._update_candidates(pinned)
        yield from self._by_score([(one, members.candidates) for one, members in self._members.items()], bound, pinned)

    def _others_by_score(self, bound: float, pinned: Collection[bytes]) -> Iterator[tuple[bytes, int]]:
        """Yield all other blocks above *bound*, for calls that need more than the candidates. Each such call examines
        all blocks, unless even the lowest candidate of the last examination scores too low."""
        if (
            self._lowest_candidate is None
            or float(self._base_scores(self._lowest_candidate[0], self._lowest_candidate[1])[0]) <= bound
        ):
            return
        others = []
        for snapshot, members in self._members.items():
            there = (members.sizes > 0) & ~members.excluded
            there[members.candidates] = False
            others.append((snapshot, np.flatnonzero(there)))
        yield from self._by_score(others, bound, pinned)

    def _by_score(
        self, blocks: list[tuple[str, npt.NDArray[np.intp]]], bound: float, pinned: Collection[bytes], *,
        copies: bool = False,
    ) -> Iterator[tuple[bytes, int]]:  # fmt: skip
        """Yield those of the blocks that score more than *bound*, highest first. copies: only copies to be evicted
        first; else all others."""
        blocks = [(snapshot, ids) for snapshot, ids in blocks if len(ids)]
        if not blocks:
            return
        whose = np.repeat(np.arange(len(blocks)), [len(ids) for _, ids in blocks])
        ids = np.concatenate([ids for _, ids in blocks])
        scores = np.concatenate([self._scores_of_kind(snapshot, ids, copies=copies) for snapshot, ids in blocks])
        order = np.argsort(-scores, kind="stable")
        order = order[: int(np.count_nonzero(scores > bound))]
        for start in range(0, len(order), _KEYS_AT_ONCE):
            for index in order[start : start + _KEYS_AT_ONCE].tolist():
                members = self._members[blocks[whose[index]][0]]
                number = int(ids[index])
                key = members.space.key(number)
                if key in pinned:
                    members.excluded[number] = self._is_stale = True
                else:
                    yield key, int(members.sizes[number])

    def _scores_of_kind(self, snapshot: str, ids: Numbers, *, copies: bool) -> Seconds:
        """Return `_eviction_scores` of copies to be evicted first, or of all others: -inf for the rest."""
        if self._ownership is None:
            return self._base_scores(snapshot, ids)
        scores = self._base_scores(snapshot, ids)
        raised = self._first_to_evict(self._ownership, snapshot, ids, scores)
        if copies:
            self._ownership.raise_copies(snapshot, ids, raised, scores)
        scores[raised != copies] = -np.inf
        return scores

    def _update_candidates(self, pinned: Collection[bytes]) -> None:
        """Update the candidates."""
        mark, consumed = self._plan.consumed_since(self._mark)
        lost_mark, lost = self._ownership.lost_since(self._lost_mark) if self._ownership is not None else (0, [])
        self._lost_mark = lost_mark
        if (
            consumed is None
            or lost is None
            or self._version != self._plan.version
            or self._victims_taken >= self._victims_before_examination
        ):
            self._examine_all(mark, pinned)
            return
        self._mark = mark
        if not consumed and not lost and not self._is_stale:
            return
        self._is_stale = False
        for snapshot, members in self._members.items():
            new: list[Numbers] = [ids for whose, ids in consumed if whose == snapshot]
            came: list[Numbers] = [np.array(members.fresh, np.intp)] if members.fresh else []
            members.fresh = []
            new += came
            if self._ownership is not None:
                self._follow_copies(snapshot, members, [*came, *(ids for whose, ids in lost if whose == snapshot)])
            if new:
                members.candidates = distinct(np.concatenate([members.candidates, *new]))
            ids = members.candidates
            members.candidates = ids[(members.sizes[ids] > 0) & ~members.excluded[ids]]
        if sum(len(members.candidates) for members in self._members.values()) > 4 * self._candidate_limit():
            self._keep_highest([(one, members.candidates) for one, members in self._members.items()])

    def _examine_all(self, mark: int, pinned: Collection[bytes]) -> None:
        spare = self._version != self._plan.version or self._pin_count != len(pinned)
        self._version, self._mark, self._victims_taken, self._is_stale = self._plan.version, mark, 0, False
        everyone = []
        for snapshot, members in self._members.items():
            members.fresh = []
            members.copies = np.zeros(0, np.intp)
            if spare:
                members.excluded[:] = False
                ids = members.space.ids(list(pinned))
                members.excluded[ids[ids != NO_BLOCK]] = True
            everyone.append((snapshot, np.flatnonzero((members.sizes > 0) & ~members.excluded)))
            self._follow_copies(snapshot, members, [everyone[-1][1]])
        self._pin_count = len(pinned)
        self._keep_highest(everyone)
        self._victims_before_examination = max(1, self._candidate_limit() // 2)

    def _follow_copies(self, snapshot: str, members: _TierBlocks, new: list[Numbers]) -> None:
        """Update the list of copies. new: blocks that may be copies, and were not in the list."""
        mine = self._ownership.owned.get(snapshot) if self._ownership is not None else None
        if mine is None:
            if len(members.copies):
                members.copies = np.zeros(0, np.intp)
            return
        ids = np.concatenate([members.copies, *new]).astype(np.intp, copy=False)
        ids = ids[(members.sizes[ids] > 0) & ~members.excluded[ids] & ~mine[ids]]
        ids = distinct(ids) if new else ids
        if len(ids) > 4 * _MAX_CANDIDATES:  # more than can be evicted before the next examination of all blocks
            has_second = self._ownership is not None and snapshot in self._ownership.second_copies
            scores = self._eviction_scores(snapshot, ids) if has_second else self._base_scores(snapshot, ids)
            ids = ids[np.argpartition(scores, len(ids) - _MAX_CANDIDATES)[-_MAX_CANDIDATES:]]
        members.copies = ids

    def _candidate_limit(self) -> int:
        return min(
            max(sum(members.count for members in self._members.values()) // _CANDIDATE_RATIO, _MIN_CANDIDATES),
            _MAX_CANDIDATES,
        )

    def _keep_highest(self, blocks: list[tuple[str, npt.NDArray[np.intp]]]) -> None:
        whose = np.repeat(np.arange(len(blocks)), [len(ids) for _, ids in blocks])
        scores = np.concatenate(
            [np.zeros(0), *(self._scores_of_kind(snapshot, ids, copies=False) for snapshot, ids in blocks)]
        )
        ids = np.concatenate([np.zeros(0, np.intp), *(ids for _, ids in blocks)])
        if self._ownership is not None:
            whose, ids, scores = (one[scores > -np.inf] for one in (whose, ids, scores))
        self._lowest_candidate = None
        if len(scores) > (wanted := self._candidate_limit()):
            kept = np.argpartition(scores, len(scores) - wanted)[-wanted:]
            whose, ids = whose[kept], ids[kept]
            self._lowest_candidate = blocks[int(whose[0])][0], ids[:1]
        for number, (snapshot, _) in enumerate(blocks):
            self._members[snapshot].candidates = ids[whose == number]


def _move_common_blocks(old: _TierBlocks, new: _TierBlocks) -> None:
    """Move blocks of *old* to *new*, where both snapshots have them."""
    common = old.space.counterparts(new.space)
    if common is None:
        return
    ids = np.flatnonzero((old.sizes > 0) & (common != NO_BLOCK))
    new.sizes[common[ids]] = old.sizes[ids]
    old.sizes[ids] = 0
    old.count -= len(ids)
    new.count += len(ids)
