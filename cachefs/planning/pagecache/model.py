"""A model of one mount's pages in the kernel's page cache: what is there, what is on its way, and what it takes."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.block import MAX_READ
from cachefs.planning.blocks.presence import ABSENT, TierStates
from cachefs.planning.blocks.space import NO_BLOCK, BlockSpace, Ids, distinct
from cachefs.planning.pagecache.candidates import Candidates
from cachefs.planning.pagecache.states import (
    COMING,
    DROPPABLE,
    GOING,
    HELD,
    INCOMPLETE,
    OUT,
    PART,
    PART_REFUSED,
    REFUSED,
    UNCOUNTED,
    Blocks,
    PageStates,
    bytes_of,
)
from cachefs.planning.sequences.course import Seconds
from cachefs.planning.sequences.plan import Plan

# Seconds after which it is checked whether pages are still there: the kernel takes single ones back that nobody has
# used for a while. In a cold epoch of 20,000 files that were pushed 40 s ahead, 1 file in 70 had lost a page, though
# nothing else wanted memory.
STALE_SECONDS: Final = 4.0
# What only the page cache has is checked again when the time since it was last seen exceeds so many times the time that
# is left to bring it: 3 times in an hour. It is believed to be there for twice as long.
LOOKED_FOR: Final = 4.0
BELIEVED: Final = 2.0
# Seconds within which the pusher has looked for what a new order reads first.
ANSWER_SECONDS: Final = 1.0
# Where this part of the only copies that were looked for of late is gone, they are looked for again after so many
# seconds, or after the time that is left. Where the kernel takes single pages back (1 to 7 % in 5 s), a tenth was gone
# now and then, without any want of room.
LOSING: Final = 0.25
LOSING_SECONDS: Final = 0.5
# Only copies that must have been looked for before their loss means anything, and after which earlier ones count half.
FEWEST_SOUGHT: Final = 32
MOST_SOUGHT: Final = 512
# Reads of blocks in no plan that are remembered: 10 MB.
MOST_UNPLANNED: Final = 1 << 17


@dataclass(slots=True, eq=False)
class _Pages:
    """What is known of the blocks of one snapshot. Each array has the shape (blocks of the space,)."""

    space: BlockSpace
    states: npt.NDArray[np.uint8]  # its PageState
    unread: npt.NDArray[np.bool_]  # was it pushed, and not read since by those it was meant for?
    asked_for: npt.NDArray[np.bool_]  # was the mount seen to read it since its pages came?
    since: npt.NDArray[np.float64]  # seconds at which its pages were last known to be there: pushed, read, or checked
    absent: npt.NDArray[np.bool_]  # had no tier of the node the block, when that was looked at last?
    beyond: npt.NDArray[np.bool_]  # was it read, and is read again later than what tiers keep?
    left: npt.NDArray[np.bool_]  # are its pages left to the kernel: not counted for the budget, and not dropped?

    @classmethod
    def nothing_of(cls, space: BlockSpace) -> "_Pages":
        none = np.zeros(space.count, np.bool_)
        return cls(
            space,
            none.astype(np.uint8),
            none,
            none.copy(),
            np.full(space.count, -np.inf),
            *(none.copy() for _ in range(3)),
        )

    def bytes(self, ids: Ids) -> int:
        return bytes_of(self.space.sizes, ids)


class PageCacheModel:
    """What is in the page cache of one mount, as far as orders and reads tell. Used from the event loop only.

    Pages that are the only copy of a block on the node are left to the kernel: they are never dropped, and take nothing
    of the budget, which is for pages that can be stored again. A mount without pushes keeps them just so. The
    same holds for pages that were read and will soon be the only copy, as tiers are too small to keep their block until
    it is read again; but not where the kernel loses pages, and needs the room for those that are the only copy.
    """

    def __init__(self, plan: Plan, budget: int, shows: Callable[[str], bool] = lambda snapshot: True) -> None:
        """budget: bytes; shows: does the mount show that snapshot?"""
        self.budget = budget  # bytes that pages may take
        # Bytes of pages that are there, are coming, or are not gone yet, but for what is left to the kernel.
        self.used = 0
        self.sole_bytes = 0  # bytes of blocks of which the page cache has the only copy on the node
        self.going = 0  # bytes of pages that are about to be dropped
        self.wasted = 0  # blocks that were dropped unread, since the start
        self.late = 0  # blocks that were read before their pages had come, since the start
        # Not to be changed by others, who may read it in other threads too: the mapping is replaced as a whole, and
        # each entry of an array is right by itself.
        self.states: PageStates = {}
        self._plan = plan
        self._shows = shows
        self._pages: dict[str, _Pages] = {}  # by snapshot
        self._candidates = Candidates(plan)
        self._mark = 0  # up to which the plan has told what was read
        self._version = -1  # of the plan, as the pusher's orders were decided last
        self._replanned = self._decided = -np.inf  # when that version was first seen, and when they were decided last
        self._sought = self._missed = 0.0  # only copies that were looked for of late, and those of them that were gone
        self._horizon = np.inf  # seconds within which blocks are read that tiers keep
        # Reads of blocks that were in no plan: when, and the keys of the blocks.
        self._unplanned: deque[tuple[float, list[bytes]]] = deque()
        self._unplanned_keys = 0  # in all of them

    @property
    def spaces(self) -> Mapping[str, BlockSpace]:
        """The block space of each snapshot of which there may be pages."""
        return {snapshot: pages.space for snapshot, pages in self._pages.items()}

    @property
    def free(self) -> int:
        """Bytes that may come now; negative where the budget has shrunk, or readers brought more."""
        return self.budget - self.used

    def follow_plan(self) -> None:
        """Take note of what the plan says was read, and of the spaces it has got that the mount shows."""
        unknown = [space for snapshot, space in self._plan.spaces.items() if snapshot not in self._pages]
        fresh = [space for space in unknown if self._shows(space.snapshot)]
        for space in fresh:
            pages = self._pages[space.snapshot] = _Pages.nothing_of(space)
            self._candidates.add(space, pages.states, pages.left)
            self._recall(pages)
        if self._forget_unplanned() or fresh:
            self.states = {snapshot: pages.states for snapshot, pages in self._pages.items()}
        self._mark, consumed = self._plan.consumed_since(self._mark)
        for snapshot, ids in consumed or ():
            known = self._pages.get(snapshot)
            if known is not None:
                known.unread[ids] = False
                self._candidates.consider(Blocks(snapshot, ids))
                if self._horizon < np.inf:
                    # How soon a tier's blocks are read changes with every estimate of the rate. So nothing that was
                    # read is dropped before the next look at what tiers keep.
                    self._look_beyond(known, ids, 0.0)

    def _forget_unplanned(self) -> bool:
        """Forget snapshots that have no pages and no plan any more: datasets are refreshed for as long as a mount
        lives. Was there any?"""
        gone = [
            snapshot
            for snapshot in self._pages.keys() - self._plan.spaces.keys()
            if not self._pages[snapshot].states.any()
        ]
        for snapshot in gone:
            del self._pages[snapshot]
            self._candidates.remove(snapshot)
        return bool(gone)

    # --- what happens -------------------------------------------------------------------------------------------------

    def follow_tiers(self, presence: TierStates) -> None:
        """Find out which pages are the only copy of their block. presence: states of blocks on the node. Takes 2 ms per
        million blocks."""
        self.sole_bytes = 0
        for snapshot, pages in self._pages.items():
            here = presence.get(snapshot)
            if here is None:
                continue
            np.equal(here, ABSENT, out=pages.absent)
            there = DROPPABLE[pages.states]
            changed = np.flatnonzero((there & (pages.absent | pages.beyond)) != pages.left)
            self._leave_to_kernel(pages, changed.astype(np.int32))
            self.sole_bytes += int(pages.space.sizes[there & pages.absent].sum(dtype=np.int64))

    @property
    def is_losing(self) -> bool:
        """Does the kernel take pages back, or a program drop them? Too many of the only copies that were looked for of
        late were gone."""
        return self._missed > LOSING * max(self._sought, FEWEST_SOUGHT)

    def _note_sought(self, sought: int, missed: int) -> None:
        """So many only copies were looked for, and so many of them were gone."""
        if self._sought > MOST_SOUGHT:
            self._sought, self._missed = self._sought / 2, self._missed / 2
        self._sought, self._missed = self._sought + sought, self._missed + missed

    def keep_until(self, horizon: float) -> None:
        """Tiers keep blocks that are read sooner than in *horizon* seconds, and others not for long; inf: they keep
        all. Takes 50 ms per million blocks that are held, and nothing while all are kept."""
        if self._horizon == horizon == np.inf:
            return
        self._horizon = horizon
        for pages in self._pages.values():
            pages.beyond[:] = False
            read = np.flatnonzero(DROPPABLE[pages.states] & ~pages.unread).astype(np.int32)
            self._look_beyond(pages, read, horizon)

    def _look_beyond(self, pages: _Pages, ids: Ids, horizon: float) -> None:
        """Find out which of these blocks, which were read, tiers do not keep until they are read again: those that are
        read in *horizon* seconds, or later."""
        due = self._plan.next_use_of(pages.space.snapshot, ids)
        pages.beyond[ids] = (due >= horizon) & (due < np.inf)
        self._leave_to_kernel(pages, ids)

    def _leave_to_kernel(self, pages: _Pages, ids: Ids) -> None:
        """Leave the pages of those of these blocks to the kernel that no tier keeps, and take back the others.

        A block may be named twice, as a reader may read it twice."""
        ids = distinct(ids)
        left = DROPPABLE[pages.states[ids]] & (pages.absent[ids] | pages.beyond[ids])
        changed = left != pages.left[ids]
        ids, left = ids[changed], left[changed]
        if len(ids):
            self.used += pages.bytes(ids[~left]) - pages.bytes(ids[left])
            pages.left[ids] = left
            self._candidates.consider(Blocks(pages.space.snapshot, ids[~left]))

    def coming(self, blocks: Blocks) -> None:
        """Blocks that are not there are about to be pushed."""
        pages = self._pages[blocks.snapshot]
        self._count(pages, blocks.ids)
        pages.states[blocks.ids] = COMING
        self._leave_to_kernel(pages, blocks.ids)

    def came(self, blocks: Blocks, now: float, *, failed: Ids) -> None:
        """The order to store these blocks is done. failed: numbers of those of them that could not be stored, shape
        (n,), int32; they are left alone until `retry`. now: seconds."""
        pages = self._pages.get(blocks.snapshot)
        if pages is None:  # forgotten since, as all of it was read and dropped
            return
        # A reader who came to a block meanwhile has brought its pages.
        came = blocks.ids[pages.states[blocks.ids] == COMING]
        failed = failed[pages.states[failed] == COMING]
        pages.unread[came] = True
        pages.since[came] = now
        pages.states[came] = HELD
        # A block that its readers have asked for has some pages: those that they have brought.
        part = pages.asked_for[failed]
        pages.states[failed[part]] = PART_REFUSED
        self._refused(pages, failed[~part])

    def stale(self, snapshot: str, ids: Ids, now: float) -> Ids:
        """Those of the blocks *ids* (shape (n,), int32) whose pages came so long ago that the kernel may have taken
        some back: shape (up to n,), int32, in the same order. now: seconds."""
        pages = self._pages.get(snapshot)
        if pages is None:
            return ids[:0]
        stale: Ids = ids[(pages.states[ids] == HELD) & (pages.since[ids] < now - STALE_SECONDS)]
        return stale

    def unsure(self, snapshot: str, ids: Ids, left: Seconds, now: float) -> Ids:
        """Those of the blocks *ids* (shape (n,), int32) that the node must bring in *left* seconds (shape (n,)) if the
        kernel has lost their only copy, and that were last seen too long ago: shape (up to n,), int32, in the same
        order. Parts of large blocks are among them, as their readers may have brought the rest. now: seconds."""
        pages = self._pages.get(snapshot)
        if pages is None:
            return ids[:0]
        trusted = np.maximum(LOSING_SECONDS, left) if self.is_losing else _trusted(left)
        age = now - pages.since[ids]
        unsure: Ids = ids[pages.absent[ids] & DROPPABLE[pages.states[ids]] & (age > trusted)]
        return unsure

    def has(self, snapshot: str, ids: Ids, left: Seconds, now: float) -> npt.NDArray[np.bool_]:
        """Are all pages of these blocks there, as seen so lately that the node need not bring them in *left* seconds?
        ids: shape (n,), int32; left: shape (n,); now: seconds. Returns bool, shape (n,)."""
        pages = self._pages.get(snapshot)
        if pages is None:
            return np.zeros(len(ids), np.bool_)
        # Also where many are gone: what is looked for sooner is answered sooner.
        believed = BELIEVED * _trusted(left)
        found: npt.NDArray[np.bool_] = pages.states[ids] == HELD
        if not self._is_new_order(now):
            found &= now - pages.since[ids] <= believed
        return found

    def note_decision(self, now: float) -> None:
        """Notes that the pusher's next orders are decided at *now* seconds, checks among them."""
        if self._version != self._plan.version:
            self._version, self._replanned = self._plan.version, now
        self._decided = now

    def _is_new_order(self, now: float) -> bool:
        """Has an order been published so lately that its blocks could not be looked for yet? They were last seen an
        epoch ago: 42 of 800 blocks were fetched as an epoch of more than 8 s ended, though their pages were there."""
        replanned = self._replanned if self._version == self._plan.version else now
        return now - replanned < ANSWER_SECONDS and now - self._decided < ANSWER_SECONDS

    def never_asked_for(self, snapshot: str) -> Ids:
        """Blocks that are held though the mount was not seen to read them: shape (n,), int32, in ascending order."""
        pages = self._pages.get(snapshot)
        if pages is None:
            return np.zeros(0, np.int32)
        return np.flatnonzero((pages.states == HELD) & ~pages.asked_for).astype(np.int32)

    def checked(self, blocks: Blocks, failed: Ids, asked: float) -> None:
        """Pages of these blocks were checked. failed: numbers of the blocks of which some pages are gone and could not
        be stored again, shape (n,), int32; asked: seconds at which the check was ordered."""
        pages = self._pages.get(blocks.snapshot)
        if pages is None:  # forgotten since, as all of it was dropped
            return
        ids = blocks.ids
        # What was read or dropped meanwhile is known better. Of a part it is remembered that it was looked for.
        current = DROPPABLE[pages.states[ids]] & (pages.since[ids] < asked)
        pages.since[ids[current]] = asked
        whole = current & ~np.isin(ids, failed)
        held = current & pages.absent[ids] & (pages.states[ids] == HELD)
        self._note_sought(int(np.count_nonzero(held)), int(np.count_nonzero(held & ~whole)))
        pages.states[ids[whole]] = HELD
        self._refused(pages, ids[current & ~whole & (pages.states[ids] == HELD)])

    def retry(self) -> None:
        """What could not be stored may be tried again."""
        for pages in self._pages.values():
            pages.states[pages.states == REFUSED] = OUT
            pages.states[pages.states == PART_REFUSED] = PART

    def there(self, blocks: Blocks) -> None:
        """Pages of these blocks were there before the model was."""
        pages = self._pages[blocks.snapshot]
        self._count(pages, blocks.ids)
        pages.states[blocks.ids] = HELD

    def settle(self) -> None:
        """Nobody will say what became of open orders: all that was coming or going may be there."""
        for pages in self._pages.values():
            open_ = (pages.states == COMING) | (pages.states == GOING)
            pages.since[open_] = -np.inf
            pages.states[open_] = HELD
        self.going = 0

    def droppable(self, blocks: Blocks) -> Blocks:
        """Those of *blocks* whose pages are there, some or all, are not about to go, and are not left to the kernel."""
        pages = self._pages[blocks.snapshot]
        return Blocks(blocks.snapshot, blocks.ids[DROPPABLE[pages.states[blocks.ids]] & ~pages.left[blocks.ids]])

    def going_now(self, blocks: Blocks) -> None:
        """Pages of these blocks are about to be dropped."""
        pages = self._pages[blocks.snapshot]
        pages.states[blocks.ids] = GOING
        self.going += pages.bytes(blocks.ids)
        self.wasted += int(np.count_nonzero(pages.unread[blocks.ids]))

    def went(self, blocks: Blocks) -> None:
        """The order to drop these blocks is done. Those that could not be dropped have no pages either, since there is
        no such file."""
        pages = self._pages[blocks.snapshot]
        self.going -= pages.bytes(blocks.ids)
        self._gone(pages, blocks.ids)

    def read(self, blocks: Blocks, tripped: Ids, now: float) -> None:
        """The mount has read these blocks, so that the kernel has their pages, or some of them. tripped: numbers of
        those that were left out on purpose, to see them read, shape (n,), int32; now: seconds."""
        pages = self._pages[blocks.snapshot]
        ids = distinct(blocks.ids)
        absent = ids[INCOMPLETE[pages.states[ids]]]
        if len(absent) and self.budget and self._plan.spaces.get(blocks.snapshot) is not None:
            self.late += int(np.count_nonzero(~np.isin(absent, tripped))) if len(tripped) else len(absent)
        # A read that comes here although the pages should be there has found them gone.
        gone = int(np.count_nonzero((pages.states[ids] == HELD) & pages.absent[ids] & (now - pages.since[ids] > 1.0)))
        self._note_sought(gone, gone)
        pages.unread[ids] = False
        pages.asked_for[ids] = True
        self._candidates.consider(Blocks(blocks.snapshot, ids))
        self._count(pages, ids)
        whole = pages.space.sizes[ids] <= MAX_READ
        pages.states[ids[whole & (pages.states[ids] != GOING)]] = HELD
        pages.since[ids[whole]] = now
        self._leave_to_kernel(pages, ids)
        pages.states[ids[~whole & UNCOUNTED[pages.states[ids]]]] = PART

    def read_keys(self, keys: Sequence[bytes], tripped: Mapping[str, Ids], now: float) -> None:
        """`read` of the blocks with these keys, in whichever snapshots they are. Reads of what is in no plan are
        remembered: a job has read for a moment when it has published what it reads. tripped: by snapshot."""
        unknown = np.ones(len(keys), np.bool_)
        for snapshot, pages in self._pages.items():
            ids = pages.space.ids(keys)
            unknown &= ids == NO_BLOCK
            ids = ids[ids != NO_BLOCK]
            if len(ids):
                self.read(Blocks(snapshot, ids), tripped.get(snapshot, ids[:0]), now)
        if unknown.any():
            self._unplanned.append((now, [keys[place] for place in np.flatnonzero(unknown).tolist()]))
            self._unplanned_keys += len(self._unplanned[-1][1])
            while self._unplanned_keys > MOST_UNPLANNED and len(self._unplanned) > 1:
                self._unplanned_keys -= len(self._unplanned.popleft()[1])

    def _recall(self, pages: _Pages) -> None:
        """Take note of what was read of a snapshot before it was planned."""
        for when, keys in self._unplanned:
            ids = pages.space.ids(keys)
            ids = ids[ids != NO_BLOCK]
            if len(ids):
                self.read(Blocks(pages.space.snapshot, ids), ids, when)

    def _count(self, pages: _Pages, ids: Ids) -> None:
        """Pages of *ids* are coming, or are there: those that took nothing of the budget do from now on."""
        self.used += pages.bytes(ids[UNCOUNTED[pages.states[ids]]])

    def _gone(self, pages: _Pages, ids: Ids) -> None:
        self.used -= pages.bytes(ids[~pages.left[ids]])
        pages.states[ids] = OUT
        pages.unread[ids] = pages.asked_for[ids] = pages.beyond[ids] = pages.left[ids] = False

    def _refused(self, pages: _Pages, ids: Ids) -> None:
        self._gone(pages, ids)
        pages.states[ids] = REFUSED

    # --- what is evicted ----------------------------------------------------------------------------------------------

    def victims(self, size: int, later_than: float, count: int, now: float) -> list[Blocks]:
        """Blocks to drop, as `Candidates.victims` says."""
        return self._candidates.victims(size, later_than, count, now)


def _trusted(left: Seconds) -> Seconds:
    """Returns the seconds after which only copies are looked for again that are needed in *left* seconds. Both have the
    shape (n,)."""
    return np.maximum(STALE_SECONDS, LOOKED_FOR * left)
