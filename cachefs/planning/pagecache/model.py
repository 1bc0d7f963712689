"""A model of one mount's pages in the kernel's page cache: the pages present, the pages coming, and their bytes."""

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

# Seconds after which the presence of pages is checked: the kernel reclaims single pages that were not used for a while.
# In a cold epoch of 20,000 files that were pushed 40 s ahead, 1 file in 70 had lost a page, though nothing else needed
# memory.
STALE_SECONDS: Final = 4.0
# An only copy is checked again when the time since it was last seen exceeds this many times the time left to fetch it:
# 3 times in an hour. It is assumed present for BELIEVED times as long.
LOOKED_FOR: Final = 4.0
BELIEVED: Final = 2.0
# Seconds within which the pusher has checked the first reads of a new order.
ANSWER_SECONDS: Final = 1.0
# Where this part of the recently checked only copies is gone, they are checked again after LOSING_SECONDS, or after the
# time that is left. Where the kernel reclaims single pages (1 to 7 % in 5 s), a tenth was gone now and then, without
# any lack of memory.
LOSING: Final = 0.25
LOSING_SECONDS: Final = 0.5
# Least number of checked only copies for that verdict, and the number after which earlier ones count half.
FEWEST_SOUGHT: Final = 32
MOST_SOUGHT: Final = 512
# Most reads of unplanned blocks that are remembered: 10 MB.
MOST_UNPLANNED: Final = 1 << 17


@dataclass(slots=True, eq=False)
class _Pages:
    """The state of the blocks of one snapshot. Each array has the shape (blocks of the space,)."""

    space: BlockSpace
    states: npt.NDArray[np.uint8]  # its PageState
    unread: npt.NDArray[np.bool_]  # pushed, and not read since by its intended readers
    asked_for: npt.NDArray[np.bool_]  # requested from the mount since its pages came
    since: npt.NDArray[np.float64]  # seconds at which its pages were last known present: pushed, read, or checked
    absent: npt.NDArray[np.bool_]  # in no tier of the node at the last check
    beyond: npt.NDArray[np.bool_]  # read, and its next read is later than tiers keep it
    left: npt.NDArray[np.bool_]  # its pages are left to the kernel: not counted for the budget, and not dropped

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
    """The page cache of one mount, inferred from orders and reads. Used from the event loop only.

    Pages that are the only copy of a block on the node are left to the kernel: they are never dropped, and take nothing
    of the budget, which is for pages that can be stored again. The same holds in a mount without pushes. It also holds
    for read pages that will soon be the only copy, as tiers are too small to keep their block until its next read; but
    not where the kernel loses pages, and needs the room for present only copies.
    """

    def __init__(self, plan: Plan, budget: int, shows: Callable[[str], bool] = lambda snapshot: True) -> None:
        """budget: bytes; shows: returns whether the mount shows a snapshot."""
        self.budget = budget  # most bytes of pages
        # Bytes of pages that are present, coming, or going, without those left to the kernel.
        self.used = 0
        self.sole_bytes = 0  # bytes of blocks of which the page cache has the only copy on the node
        self.going = 0  # bytes of pages that are about to be dropped
        self.wasted = 0  # blocks dropped unread since the start
        self.late = 0  # blocks read before their pages had come, since the start
        # Not to be changed by others, who may read it in other threads too: the mapping is replaced as a whole, and
        # each entry of an array is consistent by itself.
        self.states: PageStates = {}
        self._plan = plan
        self._shows = shows
        self._pages: dict[str, _Pages] = {}  # by snapshot
        self._candidates = Candidates(plan)
        self._mark = 0  # of the plan's consumed reads that were processed
        self._version = -1  # of the plan, at the last decision on orders
        self._replanned = self._decided = -np.inf  # when that version was first seen, and time of the last decision
        self._sought = self._missed = 0.0  # recently checked only copies, and those of them that were gone
        self._horizon = np.inf  # seconds to the next read within which tiers keep blocks
        # Reads of unplanned blocks: time, and the keys of the blocks.
        self._unplanned: deque[tuple[float, list[bytes]]] = deque()
        self._unplanned_keys = 0  # number of keys in `_unplanned`

    @property
    def spaces(self) -> Mapping[str, BlockSpace]:
        """The block space of each snapshot that may have pages."""
        return {snapshot: pages.space for snapshot, pages in self._pages.items()}

    @property
    def free(self) -> int:
        """Bytes that may still come; negative where the budget has shrunk, or readers brought more."""
        return self.budget - self.used

    def follow_plan(self) -> None:
        """Process the plan's consumed reads, and its new spaces that the mount shows."""
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
                    # The time to the next read of a tier's blocks changes with each estimate of the rate. Blocks that
                    # were read are therefore not dropped before the next call of `keep_until`.
                    self._look_beyond(known, ids, 0.0)

    def _forget_unplanned(self) -> bool:
        """Forget snapshots without pages and without a plan, as datasets are refreshed for as long as a mount lives.
        Returns whether there were any."""
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
        """Find the pages that are the only copy of their block. presence: states of blocks on the node. Takes 2 ms per
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
        """True where the kernel or a program drops pages: too many of the recently checked only copies were gone."""
        return self._missed > LOSING * max(self._sought, FEWEST_SOUGHT)

    def _note_sought(self, sought: int, missed: int) -> None:
        """Count checked only copies, and those of them that were gone."""
        if self._sought > MOST_SOUGHT:
            self._sought, self._missed = self._sought / 2, self._missed / 2
        self._sought, self._missed = self._sought + sought, self._missed + missed

    def keep_until(self, horizon: float) -> None:
        """Set the time to the next read within which tiers keep blocks, in seconds; inf: they keep all. Takes 50 ms per
        million held blocks, and no time while all are kept."""
        if self._horizon == horizon == np.inf:
            return
        self._horizon = horizon
        for pages in self._pages.values():
            pages.beyond[:] = False
            read = np.flatnonzero(DROPPABLE[pages.states] & ~pages.unread).astype(np.int32)
            self._look_beyond(pages, read, horizon)

    def _look_beyond(self, pages: _Pages, ids: Ids, horizon: float) -> None:
        """Find out which of these blocks, which were read, tiers do not keep until their next read: those read in
        *horizon* seconds, or later."""
        due = self._plan.next_use_of(pages.space.snapshot, ids)
        pages.beyond[ids] = (due >= horizon) & (due < np.inf)
        self._leave_to_kernel(pages, ids)

    def _leave_to_kernel(self, pages: _Pages, ids: Ids) -> None:
        """Leave the pages of these blocks to the kernel where no tier keeps the block, and take back the others.

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
        """Record that blocks without pages are about to be pushed."""
        pages = self._pages[blocks.snapshot]
        self._count(pages, blocks.ids)
        pages.states[blocks.ids] = COMING
        self._leave_to_kernel(pages, blocks.ids)

    def came(self, blocks: Blocks, now: float, *, failed: Ids) -> None:
        """Record that the order to store these blocks is done. failed: numbers of those that could not be stored, shape
        (n,), int32; they are not tried again until `retry`. now: seconds."""
        pages = self._pages.get(blocks.snapshot)
        if pages is None:  # the snapshot was forgotten meanwhile, as all of it was read and dropped
            return
        # A reader that has reached a block meanwhile has brought its pages.
        came = blocks.ids[pages.states[blocks.ids] == COMING]
        failed = failed[pages.states[failed] == COMING]
        pages.unread[came] = True
        pages.since[came] = now
        pages.states[came] = HELD
        # A block that its readers have requested has some pages: those brought by the readers.
        part = pages.asked_for[failed]
        pages.states[failed[part]] = PART_REFUSED
        self._refused(pages, failed[~part])

    def stale(self, snapshot: str, ids: Ids, now: float) -> Ids:
        """Return those of the blocks *ids* (shape (n,), int32) whose pages came so long ago that the kernel may have
        reclaimed some: shape (up to n,), int32, in the same order. now: seconds."""
        pages = self._pages.get(snapshot)
        if pages is None:
            return ids[:0]
        stale: Ids = ids[(pages.states[ids] == HELD) & (pages.since[ids] < now - STALE_SECONDS)]
        return stale

    def unsure(self, snapshot: str, ids: Ids, left: Seconds, now: float) -> Ids:
        """Return those of the blocks *ids* (shape (n,), int32) that must be fetched in *left* seconds (shape (n,)) if
        the kernel has lost their only copy, and that were last seen too long ago: shape (up to n,), int32, in the same
        order. Includes parts of large blocks, as their readers may have brought the rest. now: seconds."""
        pages = self._pages.get(snapshot)
        if pages is None:
            return ids[:0]
        trusted = np.maximum(LOSING_SECONDS, left) if self.is_losing else _trusted(left)
        age = now - pages.since[ids]
        unsure: Ids = ids[pages.absent[ids] & DROPPABLE[pages.states[ids]] & (age > trusted)]
        return unsure

    def has(self, snapshot: str, ids: Ids, left: Seconds, now: float) -> npt.NDArray[np.bool_]:
        """Return whether all pages of these blocks are present, seen so recently that the node need not fetch them in
        *left* seconds. ids: shape (n,), int32; left: shape (n,); now: seconds. Returns bool, shape (n,)."""
        pages = self._pages.get(snapshot)
        if pages is None:
            return np.zeros(len(ids), np.bool_)
        # Not reduced where many are gone: checks then come sooner, and so do their answers.
        believed = BELIEVED * _trusted(left)
        found: npt.NDArray[np.bool_] = pages.states[ids] == HELD
        if not self._is_new_order(now):
            found &= now - pages.since[ids] <= believed
        return found

    def note_decision(self, now: float) -> None:
        """Record that the pusher's next orders, checks included, are decided at *now* seconds."""
        if self._version != self._plan.version:
            self._version, self._replanned = self._plan.version, now
        self._decided = now

    def _is_new_order(self, now: float) -> bool:
        """Return whether an order was published so recently that its blocks could not be checked yet. They were last
        seen an epoch ago: 42 of 800 blocks were fetched as an epoch of more than 8 s ended, though their pages were
        present."""
        replanned = self._replanned if self._version == self._plan.version else now
        return now - replanned < ANSWER_SECONDS and now - self._decided < ANSWER_SECONDS

    def never_asked_for(self, snapshot: str) -> Ids:
        """Return held blocks that were not requested from the mount: shape (n,), int32, in ascending order."""
        pages = self._pages.get(snapshot)
        if pages is None:
            return np.zeros(0, np.int32)
        return np.flatnonzero((pages.states == HELD) & ~pages.asked_for).astype(np.int32)

    def checked(self, blocks: Blocks, failed: Ids, asked: float) -> None:
        """Record a check of these blocks. failed: numbers of the blocks that had lost pages which could not be stored
        again, shape (n,), int32; asked: seconds at which the check was ordered."""
        pages = self._pages.get(blocks.snapshot)
        if pages is None:  # the snapshot was forgotten meanwhile, as all of it was dropped
            return
        ids = blocks.ids
        # Blocks that were read or dropped meanwhile have newer information. Of a part, only the check is recorded.
        current = DROPPABLE[pages.states[ids]] & (pages.since[ids] < asked)
        pages.since[ids[current]] = asked
        whole = current & ~np.isin(ids, failed)
        held = current & pages.absent[ids] & (pages.states[ids] == HELD)
        self._note_sought(int(np.count_nonzero(held)), int(np.count_nonzero(held & ~whole)))
        pages.states[ids[whole]] = HELD
        self._refused(pages, ids[current & ~whole & (pages.states[ids] == HELD)])

    def retry(self) -> None:
        """Allow new tries of blocks that could not be stored."""
        for pages in self._pages.values():
            pages.states[pages.states == REFUSED] = OUT
            pages.states[pages.states == PART_REFUSED] = PART

    def there(self, blocks: Blocks) -> None:
        """Record pages that were present before the model."""
        pages = self._pages[blocks.snapshot]
        self._count(pages, blocks.ids)
        pages.states[blocks.ids] = HELD

    def settle(self) -> None:
        """Abandon open orders, whose results will not be reported: all coming or going pages count as present."""
        for pages in self._pages.values():
            open_ = (pages.states == COMING) | (pages.states == GOING)
            pages.since[open_] = -np.inf
            pages.states[open_] = HELD
        self.going = 0

    def droppable(self, blocks: Blocks) -> Blocks:
        """Return those of *blocks* with some or all pages, not about to go, and not left to the kernel."""
        pages = self._pages[blocks.snapshot]
        return Blocks(blocks.snapshot, blocks.ids[DROPPABLE[pages.states[blocks.ids]] & ~pages.left[blocks.ids]])

    def going_now(self, blocks: Blocks) -> None:
        """Record that pages of these blocks are about to be dropped."""
        pages = self._pages[blocks.snapshot]
        pages.states[blocks.ids] = GOING
        self.going += pages.bytes(blocks.ids)
        self.wasted += int(np.count_nonzero(pages.unread[blocks.ids]))

    def went(self, blocks: Blocks) -> None:
        """Record that the order to drop these blocks is done. Blocks that could not be dropped have no pages either,
        since there is no such file."""
        pages = self._pages[blocks.snapshot]
        self.going -= pages.bytes(blocks.ids)
        self._gone(pages, blocks.ids)

    def read(self, blocks: Blocks, tripped: Ids, now: float) -> None:
        """Record that the mount has read these blocks, so that the kernel has some or all of their pages. tripped:
        numbers of tripwires among them, which were left out on purpose, shape (n,), int32; now: seconds."""
        pages = self._pages[blocks.snapshot]
        ids = distinct(blocks.ids)
        absent = ids[INCOMPLETE[pages.states[ids]]]
        if len(absent) and self.budget and self._plan.spaces.get(blocks.snapshot) is not None:
            self.late += int(np.count_nonzero(~np.isin(absent, tripped))) if len(tripped) else len(absent)
        # A read that arrives although the pages should be present has found them gone.
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
        """Record `read` of the blocks with these keys, in all snapshots that have them. Reads of unplanned blocks are
        remembered: a job has read for a moment when it publishes. tripped: by snapshot."""
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
        """Process reads of a snapshot from before it was planned."""
        for when, keys in self._unplanned:
            ids = pages.space.ids(keys)
            ids = ids[ids != NO_BLOCK]
            if len(ids):
                self.read(Blocks(pages.space.snapshot, ids), ids, when)

    def _count(self, pages: _Pages, ids: Ids) -> None:
        """Count the pages of *ids*, which are coming or present, for the budget where they did not count before."""
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
        """Return blocks to drop, as `Candidates.victims`."""
        return self._candidates.victims(size, later_than, count, now)


def _trusted(left: Seconds) -> Seconds:
    """Return the seconds after which only copies needed in *left* seconds are checked again. Both have the shape
    (n,)."""
    return np.maximum(STALE_SECONDS, LOOKED_FOR * left)
