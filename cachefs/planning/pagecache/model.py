"""A model of one mount's pages in the kernel's page cache: what is there, and what should give way. No I/O.

The tiers' policies go by keys, one block after the other, at 37 us per victim. Pages come and go at 12,000 blocks a
second, so here the same rule (what is read last goes first) works on whole arrays.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.block import MAX_READ
from cachefs.planning.blocks.space import BlockSpace, Ids
from cachefs.planning.sequences.plan import Plan

OUT: Final = 0
COMING: Final = 1
HELD: Final = 2
GOING: Final = 3
REFUSED: Final = 4
# Some of its pages, as it is larger than what one read brings. It counts in full.
PART: Final = 5
# As PART, and the rest of it could not be pushed.
PART_REFUSED: Final = 6

# By state: is the block to be pushed? Does its reader have to ask for it? Does it not count? May it be dropped?
WANTED: Final = np.isin(np.arange(7), (OUT, PART))
_ABSENT: Final = np.isin(np.arange(7), (OUT, COMING, REFUSED, PART, PART_REFUSED))
_UNCOUNTED: Final = np.isin(np.arange(7), (OUT, REFUSED))
_DROPPABLE: Final = np.isin(np.arange(7), (HELD, PART, PART_REFUSED))

# Of what is held, the share that is looked at again and again for what to give up.
_PART: Final = 16
_FEWEST: Final = 1024
# A look at all blocks that brings nothing is not repeated at once: 12 ms with 300,000 held ones.
LOOK_SECONDS: Final = 0.25
# The kernel takes single pages back that nobody has used for a while: of 1 file in 70 within 45 s, where nothing else
# wanted memory.
STALE_SECONDS: Final = 4.0


@dataclass(frozen=True, slots=True)
class Blocks:
    """Some of one snapshot, in order."""

    snapshot: str
    ids: Ids


@dataclass(slots=True, eq=False)
class _Pages:
    """Per block of the space: states; unread: pushed, and not read since by those it was meant for; asked_for: the
    mount was seen to read it; since: when it was pushed, or looked for. candidates, fresh: to be given up, the latter
    as they came."""

    space: BlockSpace
    states: npt.NDArray[np.uint8]
    unread: npt.NDArray[np.bool_]
    asked_for: npt.NDArray[np.bool_]
    since: npt.NDArray[np.float64]
    candidates: Ids
    fresh: list[Ids] = field(default_factory=list)
    fresh_count: int = 0


class PageCacheModel:
    """Used from the event loop only. budget: bytes that pages may take; used: those that are there, are coming, or are
    not gone yet; wasted: blocks that were dropped unread; late: that were read before they had come; states: by
    snapshot, of each block, not to be changed: others may read them, in other threads too (it is replaced as a whole,
    but for the entries of its arrays)."""

    def __init__(self, plan: Plan, budget: int, shows: Callable[[str], bool] = lambda snapshot: True) -> None:
        """shows: does the mount show that snapshot?"""
        self.budget = budget
        self.used = 0
        self.going = 0
        self.wasted = 0
        self.late = 0
        self.states: Mapping[str, npt.NDArray[np.uint8]] = {}
        self._plan = plan
        self._shows = shows
        self._pages: dict[str, _Pages] = {}
        self._mark = 0
        self._version = -1
        self._looked = -LOOK_SECONDS

    @property
    def spaces(self) -> Mapping[str, BlockSpace]:
        """By snapshot."""
        return {snapshot: pages.space for snapshot, pages in self._pages.items()}

    @property
    def free(self) -> int:
        """Bytes that may come now; negative where the budget has shrunk, or readers brought more."""
        return self.budget - self.used

    def follow_plan(self) -> None:
        """Take note of what the plan says is read, and of spaces it has got that the mount shows."""
        unknown = [space for snapshot, space in self._plan.spaces.items() if snapshot not in self._pages]
        fresh = [space for space in unknown if self._shows(space.snapshot)]
        for space in fresh:
            self._pages[space.snapshot] = _nothing_of(space)
        if self._forget_unplanned() or fresh:
            self.states = {snapshot: pages.states for snapshot, pages in self._pages.items()}
        self._mark, consumed = self._plan.consumed_since(self._mark)
        for snapshot, ids in consumed or ():
            pages = self._pages.get(snapshot)
            if pages is not None:
                pages.unread[ids] = False
                _consider(pages, ids)

    def _forget_unplanned(self) -> bool:
        """Datasets are refreshed for as long as a mount lives. Is there any that was forgotten?"""
        gone = [
            snapshot
            for snapshot in self._pages.keys() - self._plan.spaces.keys()
            if not self._pages[snapshot].states.any()
        ]
        for snapshot in gone:
            del self._pages[snapshot]
        return bool(gone)

    # --- what happens -------------------------------------------------------------------------------------------------

    def coming(self, blocks: Blocks) -> None:
        """Blocks that are not there are about to be pushed."""
        pages = self._pages[blocks.snapshot]
        self._count(pages, blocks.ids)
        pages.states[blocks.ids] = COMING

    def came(self, blocks: Blocks, now: float, *, failed: Ids) -> None:
        """The order is done. failed: of its blocks; they are left alone until `retry`."""
        pages = self._pages.get(blocks.snapshot)
        if pages is None:  # forgotten since, as all of it was read and dropped
            return
        # Whoever read one meanwhile has brought its pages.
        came = blocks.ids[pages.states[blocks.ids] == COMING]
        failed = failed[pages.states[failed] == COMING]
        pages.unread[came] = True
        pages.since[came] = now
        pages.states[came] = HELD
        # Of a large one its readers have brought some.
        part = pages.asked_for[failed]
        pages.states[failed[part]] = PART_REFUSED
        self._refused(pages, failed[~part])

    def stale(self, snapshot: str, ids: Ids, now: float) -> Ids:
        """Those of *ids* whose pages the kernel may have taken back: they came long ago."""
        pages = self._pages.get(snapshot)
        if pages is None:
            return ids[:0]
        stale: Ids = ids[(pages.states[ids] == HELD) & (pages.since[ids] < now - STALE_SECONDS)]
        return stale

    def never_asked_for(self, snapshot: str) -> Ids:
        """What is held though the mount was not seen to read it."""
        pages = self._pages.get(snapshot)
        if pages is None:
            return np.zeros(0, np.int32)
        return np.flatnonzero((pages.states == HELD) & ~pages.asked_for).astype(np.int32)

    def looked_for(self, blocks: Blocks, now: float) -> None:
        self._pages[blocks.snapshot].since[blocks.ids] = now

    def lost(self, blocks: Blocks, failed: Ids) -> None:
        """Of the blocks that were looked for, these are not there, and could not be stored again."""
        pages = self._pages.get(blocks.snapshot)
        if pages is None:  # forgotten since, as all of it was dropped
            return
        failed = failed[pages.states[failed] == HELD]
        self._refused(pages, failed)

    def retry(self) -> None:
        for pages in self._pages.values():
            pages.states[pages.states == REFUSED] = OUT
            pages.states[pages.states == PART_REFUSED] = PART

    def there(self, blocks: Blocks) -> None:
        """Their pages were there before we were."""
        pages = self._pages[blocks.snapshot]
        self._count(pages, blocks.ids)
        pages.states[blocks.ids] = HELD

    def settle(self) -> None:
        """Nobody will say what became of what is coming and going: it may all be there."""
        for pages in self._pages.values():
            pages.states[(pages.states == COMING) | (pages.states == GOING)] = HELD
        self.going = 0

    def droppable(self, blocks: Blocks) -> Blocks:
        """Those of *blocks* whose pages are there, and not about to go."""
        states = self._pages[blocks.snapshot].states
        return Blocks(blocks.snapshot, blocks.ids[_DROPPABLE[states[blocks.ids]]])

    def going_now(self, blocks: Blocks) -> None:
        """Blocks that are held are about to be dropped."""
        pages = self._pages[blocks.snapshot]
        pages.states[blocks.ids] = GOING
        self.going += _bytes(pages, blocks.ids)
        self.wasted += int(np.count_nonzero(pages.unread[blocks.ids]))

    def went(self, blocks: Blocks) -> None:
        """Those that could not be dropped as well: there is no such file, so there are no pages."""
        pages = self._pages[blocks.snapshot]
        self.going -= _bytes(pages, blocks.ids)
        self._gone(pages, blocks.ids)

    def read(self, blocks: Blocks, tripped: Ids) -> None:
        """The mount has read these, so the kernel has their pages, or some. tripped: those that were to be read."""
        pages = self._pages[blocks.snapshot]
        ids = np.unique(blocks.ids)
        absent = ids[_ABSENT[pages.states[ids]]]
        if self._plan.spaces.get(blocks.snapshot) is not None:
            self.late += int(np.count_nonzero(~np.isin(absent, tripped)))
        pages.unread[ids] = False
        pages.asked_for[ids] = True
        _consider(pages, ids)
        self._count(pages, ids)
        whole = pages.space.sizes[ids] <= MAX_READ
        pages.states[ids[whole & (pages.states[ids] != GOING)]] = HELD
        pages.states[ids[~whole & _UNCOUNTED[pages.states[ids]]]] = PART

    def _count(self, pages: _Pages, ids: Ids) -> None:
        """*ids* are about to be there, or are: those that did not count do from now on."""
        self.used += _bytes(pages, ids[_UNCOUNTED[pages.states[ids]]])

    def _gone(self, pages: _Pages, ids: Ids) -> None:
        pages.states[ids] = OUT
        pages.unread[ids] = pages.asked_for[ids] = False
        self.used -= _bytes(pages, ids)

    def _refused(self, pages: _Pages, ids: Ids) -> None:
        self._gone(pages, ids)
        pages.states[ids] = REFUSED

    # --- what gives way -----------------------------------------------------------------------------------------------

    def victims(self, size: int, later_than: float, count: int, now: float) -> list[Blocks]:
        """At most *count* blocks that are held and read later than in *later_than* seconds, the last of all first,
        until they make *size* bytes."""
        if self._version == self._plan.version:
            found, total = self._furthest(size, later_than, count)
            if total >= size or now - self._looked < LOOK_SECONDS:
                return found
        self._version, self._looked = self._plan.version, now
        for pages in self._pages.values():
            pages.candidates = np.flatnonzero(_DROPPABLE[pages.states]).astype(np.int32)
        found, _ = self._furthest(size, later_than, count)
        self._keep_furthest()
        return found

    def _furthest(self, size: int, later_than: float, count: int) -> tuple[list[Blocks], int]:
        snapshots, whose, ids, due = self._ranked()
        order = np.argsort(-due, kind="stable")
        order = order[: np.count_nonzero(due > later_than)][:count]
        sizes = np.zeros(len(order), np.int64)
        for number, snapshot in enumerate(snapshots):
            theirs = whose[order] == number
            sizes[theirs] = self._pages[snapshot].space.sizes[ids[order[theirs]]]
        ends = np.cumsum(sizes)
        order = order[: int(np.searchsorted(ends, size)) + 1]
        found = [Blocks(snapshot, ids[order[whose[order] == number]]) for number, snapshot in enumerate(snapshots)]
        return [blocks for blocks in found if len(blocks.ids)], int(ends[len(order) - 1]) if len(order) else 0

    def _ranked(self) -> tuple[list[str], npt.NDArray[np.int64], Ids, npt.NDArray[np.float64]]:
        """All candidates: snapshots, whose each is, block, seconds until it is read."""
        snapshots = list(self._pages)
        for pages in self._pages.values():
            _gather(pages)
        blocks = [self._pages[snapshot].candidates for snapshot in snapshots]
        whose = np.repeat(np.arange(len(blocks)), [len(ids) for ids in blocks])
        due = [self._plan.next_use_of(snapshot, ids) for snapshot, ids in zip(snapshots, blocks, strict=True)]
        return (
            snapshots,
            whose,
            np.concatenate([np.zeros(0, np.int32), *blocks]),
            np.concatenate([np.zeros(0, np.float64), *due]),
        )

    def _keep_furthest(self) -> None:
        snapshots, whose, ids, due = self._ranked()
        wanted = max(_FEWEST, len(ids) // _PART)
        if len(ids) <= wanted:
            return
        kept = np.argpartition(due, len(due) - wanted)[-wanted:]
        for number, snapshot in enumerate(snapshots):
            self._pages[snapshot].candidates = ids[kept[whose[kept] == number]]


def _nothing_of(space: BlockSpace) -> _Pages:
    none = np.zeros(space.count, np.bool_)
    return _Pages(space, none.astype(np.uint8), none, none.copy(), np.zeros(space.count), np.zeros(0, np.int32))


def _consider(pages: _Pages, ids: Ids) -> None:
    """As candidates. Gathered now and then only, as they come by the dozen and may be as many as there are blocks."""
    pages.fresh.append(ids)
    pages.fresh_count += len(ids)
    if pages.fresh_count > max(_FEWEST, pages.space.count):
        _gather(pages)
    elif len(pages.fresh) > _FEWEST:
        pages.fresh = [np.concatenate(pages.fresh)]


def _gather(pages: _Pages) -> None:
    candidates = np.unique(np.concatenate((pages.candidates, *pages.fresh)))
    pages.candidates = candidates[_DROPPABLE[pages.states[candidates]]]
    pages.fresh, pages.fresh_count = [], 0


def _bytes(pages: _Pages, ids: Ids) -> int:
    return int(pages.space.sizes[ids].sum(dtype=np.int64))
