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
from cachefs.planning.pagecache.page_candidates import PageCandidates
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
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.timeline import Seconds

# Seconds after which the presence of pages is checked: the kernel reclaims single pages that were not used for a while.
# In a cold epoch of 20,000 files that were pushed 40 s ahead, 1 file in 70 had lost a page, though nothing else needed
# memory.
RECHECK_SECONDS: Final = 4.0
# An only copy is checked again when the time since it was last seen exceeds this many times the time left to fetch it:
# 3 times in an hour. It is assumed present for TRUST_FACTOR times as long.
RECHECK_FACTOR: Final = 4.0
TRUST_FACTOR: Final = 2.0
# Seconds within which the pusher has checked the first reads of a new order.
CHECK_RESPONSE_SECONDS: Final = 1.0
# Where this part of the recently checked only copies is gone, they are checked again after LOSS_RECHECK_SECONDS, or
# after the time that is left. Where the kernel reclaims single pages (1 to 7 % in 5 s), a tenth was gone now and then,
# without any lack of memory.
LOSS_SHARE: Final = 0.25
LOSS_RECHECK_SECONDS: Final = 0.5
# Least number of checked only copies for that verdict, and the number after which earlier ones count half.
MIN_CHECKED_COPIES: Final = 32
MAX_CHECKED_COPIES: Final = 512
# Most reads of unplanned blocks that are remembered: 10 MB.
MAX_UNPLANNED_READS: Final = 1 << 17


@dataclass(slots=True, eq=False)
class _SnapshotPages:
    """The state of the blocks of one snapshot. Each array has the shape (blocks of the space,)."""

    space: BlockSpace
    states: npt.NDArray[np.uint8]  # its PageState
    unread: npt.NDArray[np.bool_]  # pushed, and not read since by its intended readers
    requested: npt.NDArray[np.bool_]  # requested from the mount since its pages came
    last_seen: npt.NDArray[np.float64]  # seconds at which its pages were last known present: pushed, read, or checked
    absent: npt.NDArray[np.bool_]  # in no tier of the node at the last check
    beyond_horizon: npt.NDArray[np.bool_]  # read, and its next read is later than tiers keep it
    left_to_kernel: npt.NDArray[
        np.bool_
    ]  # its pages are left to the kernel: not counted for the budget, and not dropped

    @classmethod
    def empty(cls, space: BlockSpace) -> "_SnapshotPages":
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

    def __init__(self, plan: Plan, budget: int, is_shown: Callable[[str], bool] = lambda snapshot: True) -> None:
        """budget: bytes; is_shown: returns whether the mount shows a snapshot."""
        self.budget = budget  # most bytes of pages
        # Bytes of pages that are present, coming, or going, without those left to the kernel.
        self.used = 0
        self.sole_copy_bytes = 0  # bytes of blocks of which the page cache has the only copy on the node
        self.dropping_bytes = 0  # bytes of pages that are about to be dropped
        self.wasted_blocks = 0  # blocks dropped unread since the start
        self.late_blocks = 0  # blocks read before their pages had come, since the start
        # Not to be changed by others, who may read it in other threads too: the mapping is replaced as a whole, and
        # each entry of an array is consistent by itself.
        self.states: PageStates = {}
        self._plan = plan
        self._is_shown = is_shown
        self._pages: dict[str, _SnapshotPages] = {}  # by snapshot
        self._candidates = PageCandidates(plan)
        self._mark = 0  # of the plan's consumed reads that were processed
        self._version = -1  # of the plan, at the last decision on orders
        self._replanned = self._decided = -np.inf  # when that version was first seen, and time of the last decision
        self._checked_copies = self._lost_copies = 0.0  # recently checked only copies, and those of them that were gone
        self._horizon = np.inf  # seconds to the next read within which tiers keep blocks
        # Reads of unplanned blocks: time, and the keys of the blocks.
        self._unplanned: deque[tuple[float, list[bytes]]] = deque()
        self._unplanned_keys = 0  # number of keys in `_unplanned`

    def set_budget(self, budget: int) -> None:
        """Set the most bytes of pages."""
        self.budget = budget

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
        fresh = [space for space in unknown if self._is_shown(space.snapshot)]
        for space in fresh:
            pages = self._pages[space.snapshot] = _SnapshotPages.empty(space)
            self._candidates.add_snapshot(space, pages.states, pages.left_to_kernel)
            self._replay_unplanned_reads(pages)
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
                    # were read are therefore not dropped before the next call of `set_horizon`.
                    self._find_beyond_horizon(known, ids, 0.0)

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
            self._candidates.remove_snapshot(snapshot)
        return bool(gone)

    # --- what happens -------------------------------------------------------------------------------------------------

    def follow_tiers(self, presence: TierStates) -> None:
        """Find the pages that are the only copy of their block. presence: states of blocks on the node. Takes 2 ms per
        million blocks."""
        self.sole_copy_bytes = 0
        for snapshot, pages in self._pages.items():
            here = presence.get(snapshot)
            if here is None:
                continue
            np.equal(here, ABSENT, out=pages.absent)
            there = DROPPABLE[pages.states]
            changed = np.flatnonzero((there & (pages.absent | pages.beyond_horizon)) != pages.left_to_kernel)
            self._leave_to_kernel(pages, changed.astype(np.int32))
            self.sole_copy_bytes += int(pages.space.sizes[there & pages.absent].sum(dtype=np.int64))

    @property
    def is_losing_pages(self) -> bool:
        """True where the kernel or a program drops pages: too many of the recently checked only copies were gone."""
        return self._lost_copies > LOSS_SHARE * max(self._checked_copies, MIN_CHECKED_COPIES)

    def _count_checked_copies(self, checked: int, lost: int) -> None:
        """Count checked only copies, and those of them that were gone."""
        if self._checked_copies > MAX_CHECKED_COPIES:
            self._checked_copies, self._lost_copies = self._checked_copies / 2, self._lost_copies / 2
        self._checked_copies, self._lost_copies = self._checked_copies + checked, self._lost_copies + lost

    def set_horizon(self, horizon: float) -> None:
        """Set the time to the next read within which tiers keep blocks, in seconds; inf: they keep all. Takes 50 ms per
        million held blocks, and no time while all are kept."""
        if self._horizon == horizon == np.inf:
            return
        self._horizon = horizon
        for pages in self._pages.values():
            pages.beyond_horizon[:] = False
            read = np.flatnonzero(DROPPABLE[pages.states] & ~pages.unread).astype(np.int32)
            self._find_beyond_horizon(pages, read, horizon)

    def _find_beyond_horizon(self, pages: _SnapshotPages, ids: Ids, horizon: float) -> None:
        """Find out which of these blocks, which were read, tiers do not keep until their next read: those read in
        *horizon* seconds, or later."""
        due = self._plan.next_use_of(pages.space.snapshot, ids)
        pages.beyond_horizon[ids] = (due >= horizon) & (due < np.inf)
        self._leave_to_kernel(pages, ids)

    def _leave_to_kernel(self, pages: _SnapshotPages, ids: Ids) -> None:
        """Leave the pages of these blocks to the kernel where no tier keeps the block, and take back the others.

        A block may be named twice, as a reader may read it twice."""
        ids = distinct(ids)
        left = DROPPABLE[pages.states[ids]] & (pages.absent[ids] | pages.beyond_horizon[ids])
        changed = left != pages.left_to_kernel[ids]
        ids, left = ids[changed], left[changed]
        if len(ids):
            self.used += pages.bytes(ids[~left]) - pages.bytes(ids[left])
            pages.left_to_kernel[ids] = left
            self._candidates.consider(Blocks(pages.space.snapshot, ids[~left]))

    def note_store_ordered(self, blocks: Blocks) -> None:
        """Record that blocks without pages are about to be pushed."""
        pages = self._pages[blocks.snapshot]
        self._count_bytes(pages, blocks.ids)
        pages.states[blocks.ids] = COMING
        self._leave_to_kernel(pages, blocks.ids)

    def note_stored(self, blocks: Blocks, now: float, *, failed: Ids) -> None:
        """Record that the order to store these blocks is done. failed: numbers of those that could not be stored, shape
        (n,), int32; they are not tried again until `allow_retries`. now: seconds."""
        pages = self._pages.get(blocks.snapshot)
        if pages is None:  # the snapshot was forgotten meanwhile, as all of it was read and dropped
            return
        # A reader that has reached a block meanwhile has brought its pages.
        came = blocks.ids[pages.states[blocks.ids] == COMING]
        failed = failed[pages.states[failed] == COMING]
        pages.unread[came] = True
        pages.last_seen[came] = now
        pages.states[came] = HELD
        # A block that its readers have requested has some pages: those brought by the readers.
        part = pages.requested[failed]
        pages.states[failed[part]] = PART_REFUSED
        self._note_refused(pages, failed[~part])

    def stale_blocks(self, snapshot: str, ids: Ids, now: float) -> Ids:
        """Return those of the blocks *ids* (shape (n,), int32) whose pages came so long ago that the kernel may have
        reclaimed some: shape (up to n,), int32, in the same order. now: seconds."""
        pages = self._pages.get(snapshot)
        if pages is None:
            return ids[:0]
        stale: Ids = ids[(pages.states[ids] == HELD) & (pages.last_seen[ids] < now - RECHECK_SECONDS)]
        return stale

    def unsure_blocks(self, snapshot: str, ids: Ids, left: Seconds, now: float) -> Ids:
        """Return those of the blocks *ids* (shape (n,), int32) that must be fetched in *left* seconds (shape (n,)) if
        the kernel has lost their only copy, and that were last seen too long ago: shape (up to n,), int32, in the same
        order. Includes parts of large blocks, as their readers may have brought the rest. now: seconds."""
        pages = self._pages.get(snapshot)
        if pages is None:
            return ids[:0]
        trusted = np.maximum(LOSS_RECHECK_SECONDS, left) if self.is_losing_pages else _recheck_seconds(left)
        age = now - pages.last_seen[ids]
        unsure: Ids = ids[pages.absent[ids] & DROPPABLE[pages.states[ids]] & (age > trusted)]
        return unsure

    def are_present(self, snapshot: str, ids: Ids, left: Seconds, now: float) -> npt.NDArray[np.bool_]:
        """Return whether all pages of these blocks are present, seen so recently that the node need not fetch them in
        *left* seconds. ids: shape (n,), int32; left: shape (n,); now: seconds. Returns bool, shape (n,)."""
        pages = self._pages.get(snapshot)
        if pages is None:
            return np.zeros(len(ids), np.bool_)
        # Not reduced where many are gone: checks then come sooner, and so do their answers.
        believed = TRUST_FACTOR * _recheck_seconds(left)
        found: npt.NDArray[np.bool_] = pages.states[ids] == HELD
        if not self._is_new_order(now):
            found &= now - pages.last_seen[ids] <= believed
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
        return now - replanned < CHECK_RESPONSE_SECONDS and now - self._decided < CHECK_RESPONSE_SECONDS

    def never_requested(self, snapshot: str) -> Ids:
        """Return held blocks that were not requested from the mount: shape (n,), int32, in ascending order."""
        pages = self._pages.get(snapshot)
        if pages is None:
            return np.zeros(0, np.int32)
        return np.flatnonzero((pages.states == HELD) & ~pages.requested).astype(np.int32)

    def note_checked(self, blocks: Blocks, failed: Ids, ordered_at: float) -> None:
        """Record a check of these blocks. failed: numbers of the blocks that had lost pages which could not be stored
        again, shape (n,), int32; ordered_at: seconds at which the check was ordered."""
        pages = self._pages.get(blocks.snapshot)
        if pages is None:  # the snapshot was forgotten meanwhile, as all of it was dropped
            return
        ids = blocks.ids
        # Blocks that were read or dropped meanwhile have newer information. Of a part, only the check is recorded.
        current = DROPPABLE[pages.states[ids]] & (pages.last_seen[ids] < ordered_at)
        pages.last_seen[ids[current]] = ordered_at
        complete = current & ~np.isin(ids, failed)
        were_present = current & pages.absent[ids] & (pages.states[ids] == HELD)
        self._count_checked_copies(int(np.count_nonzero(were_present)), int(np.count_nonzero(were_present & ~complete)))
        pages.states[ids[complete]] = HELD
        self._note_refused(pages, ids[current & ~complete & (pages.states[ids] == HELD)])

    def allow_retries(self) -> None:
        """Allow new tries of blocks that could not be stored."""
        for pages in self._pages.values():
            pages.states[pages.states == REFUSED] = OUT
            pages.states[pages.states == PART_REFUSED] = PART

    def note_present(self, blocks: Blocks) -> None:
        """Record pages that were present before the model."""
        pages = self._pages[blocks.snapshot]
        self._count_bytes(pages, blocks.ids)
        pages.states[blocks.ids] = HELD

    def abandon_orders(self) -> None:
        """Abandon open orders, whose results will not be reported: all coming or going pages count as present."""
        for pages in self._pages.values():
            open_ = (pages.states == COMING) | (pages.states == GOING)
            pages.last_seen[open_] = -np.inf
            pages.states[open_] = HELD
        self.dropping_bytes = 0

    def filter_droppable(self, blocks: Blocks) -> Blocks:
        """Return those of *blocks* with some or all pages, not about to go, and not left to the kernel."""
        pages = self._pages[blocks.snapshot]
        return Blocks(
            blocks.snapshot, blocks.ids[DROPPABLE[pages.states[blocks.ids]] & ~pages.left_to_kernel[blocks.ids]]
        )

    def note_drop_ordered(self, blocks: Blocks) -> None:
        """Record that pages of these blocks are about to be dropped."""
        pages = self._pages[blocks.snapshot]
        pages.states[blocks.ids] = GOING
        self.dropping_bytes += pages.bytes(blocks.ids)
        self.wasted_blocks += int(np.count_nonzero(pages.unread[blocks.ids]))

    def note_dropped(self, blocks: Blocks) -> None:
        """Record that the order to drop these blocks is done. Blocks that could not be dropped have no pages either,
        since there is no such file."""
        pages = self._pages[blocks.snapshot]
        self.dropping_bytes -= pages.bytes(blocks.ids)
        self._note_gone(pages, blocks.ids)

    def note_read(self, blocks: Blocks, tripwires: Ids, now: float) -> None:
        """Record that the mount has read these blocks, so that the kernel has some or all of their pages. tripwires:
        numbers of tripwires among them, which were left out on purpose, shape (n,), int32; now: seconds."""
        pages = self._pages[blocks.snapshot]
        ids = distinct(blocks.ids)
        absent = ids[INCOMPLETE[pages.states[ids]]]
        if len(absent) and self.budget and self._plan.spaces.get(blocks.snapshot) is not None:
            self.late_blocks += int(np.count_nonzero(~np.isin(absent, tripwires))) if len(tripwires) else len(absent)
        # A read that arrives although the pages should be present has found them gone.
        gone = int(
            np.count_nonzero((pages.states[ids] == HELD) & pages.absent[ids] & (now - pages.last_seen[ids] > 1.0))
        )
        self._count_checked_copies(gone, gone)
        pages.unread[ids] = False
        pages.requested[ids] = True
        self._candidates.consider(Blocks(blocks.snapshot, ids))
        self._count_bytes(pages, ids)
        complete = pages.space.sizes[ids] <= MAX_READ
        pages.states[ids[complete & (pages.states[ids] != GOING)]] = HELD
        pages.last_seen[ids[complete]] = now
        self._leave_to_kernel(pages, ids)
        pages.states[ids[~complete & UNCOUNTED[pages.states[ids]]]] = PART

    def note_read_keys(self, keys: Sequence[bytes], tripwires: Mapping[str, Ids], now: float) -> None:
        """Call `note_read` for the blocks with these keys, in all snapshots that have them. Reads of unplanned blocks
        are remembered: a job has read for a moment when it publishes. tripwires: by snapshot."""
        unknown = np.ones(len(keys), np.bool_)
        for snapshot, pages in self._pages.items():
            ids = pages.space.ids(keys)
            unknown &= ids == NO_BLOCK
            ids = ids[ids != NO_BLOCK]
            if len(ids):
                self.note_read(Blocks(snapshot, ids), tripwires.get(snapshot, ids[:0]), now)
        if unknown.any():
            self._unplanned.append((now, [keys[index] for index in np.flatnonzero(unknown).tolist()]))
            self._unplanned_keys += len(self._unplanned[-1][1])
            while self._unplanned_keys > MAX_UNPLANNED_READS and len(self._unplanned) > 1:
                self._unplanned_keys -= len(self._unplanned.popleft()[1])

    def _replay_unplanned_reads(self, pages: _SnapshotPages) -> None:
        """Process reads of a snapshot from before it was planned."""
        for when, keys in self._unplanned:
            ids = pages.space.ids(keys)
            ids = ids[ids != NO_BLOCK]
            if len(ids):
                self.note_read(Blocks(pages.space.snapshot, ids), ids, when)

    def _count_bytes(self, pages: _SnapshotPages, ids: Ids) -> None:
        """Count the pages of *ids*, which are coming or present, for the budget where they did not count before."""
        self.used += pages.bytes(ids[UNCOUNTED[pages.states[ids]]])

    def _note_gone(self, pages: _SnapshotPages, ids: Ids) -> None:
        self.used -= pages.bytes(ids[~pages.left_to_kernel[ids]])
        pages.states[ids] = OUT
        pages.unread[ids] = pages.requested[ids] = pages.beyond_horizon[ids] = pages.left_to_kernel[ids] = False

    def _note_refused(self, pages: _SnapshotPages, ids: Ids) -> None:
        self._note_gone(pages, ids)
        pages.states[ids] = REFUSED

    # --- what is evicted ----------------------------------------------------------------------------------------------

    def choose_victims(self, size: int, later_than: float, count: int, now: float) -> list[Blocks]:
        """Return blocks to drop, as `PageCandidates.choose_victims`."""
        return self._candidates.choose_victims(size, later_than, count, now)


def _recheck_seconds(left: Seconds) -> Seconds:
    """Return the seconds after which only copies needed in *left* seconds are checked again. Both have the shape
    (n,)."""
    return np.maximum(RECHECK_SECONDS, RECHECK_FACTOR * left)
