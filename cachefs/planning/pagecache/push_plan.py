"""Decides the next actions on one mount's page cache: which pages to store ahead of readers, to drop, and to check.

The soonest reads come first, into free room. Once the budget is full, blocks read last are evicted for blocks read
sooner. Dropped pages make room only when the pusher reports that they are gone, so that the pages never exceed the
budget; a little is kept free so that commands need not wait for that.

The plan returns `PageCommand`s for the pusher: small records over arrays. `UnplannedPages` keeps the pages that were
pushed under an earlier daemon, of snapshots that are in no plan yet.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.presence import Presence
from cachefs.planning.blocks.space import BlockSpace, Ids
from cachefs.planning.pagecache.model import PageCacheModel
from cachefs.planning.pagecache.push_lookahead import DueBlocks, PushLimits, PushLookahead, PushReader
from cachefs.planning.pagecache.states import Blocks, PageStates, bytes_of
from cachefs.planning.sequences.plan import Plan

# Most open orders and bytes of a pusher: enough to be busy while a report travels, few enough for a change of plan. On
# an idle machine 4 orders are enough. It is twice as many, since beside two readers at full speed a report and its
# answer take 30 ms.
MAX_OPEN_COMMANDS: Final = 8
MAX_OPEN_BYTES: Final = 96 << 20
# Most blocks and bytes of one order: the pusher works on the next order while the last one is reported.
COMMAND_BLOCKS: Final = 96
COMMAND_BYTES: Final = MAX_OPEN_BYTES // 4
# The share of the budget that is kept free: 1/16.
_FREE_SHIFT: Final = 4
# Seconds between searches for blocks that have come to the node, and for lost pages.
SEARCH_SECONDS: Final = 0.2
# Seconds until blocks that could not be pushed are tried again.
REFUSED_SECONDS: Final = 2.0
# Seconds after which pages pushed under an earlier daemon are dropped, unless a job of this one is going to read them.
UNPLANNED_SECONDS: Final = 10.0
# Once in CHECK_SECONDS pages are checked, of at most MAX_CHECKED_BLOCKS blocks of each reader, with at most
# MAX_OPEN_CHECKS such orders open: pages that were pushed long ago and are read within CHECK_AHEAD_SECONDS; and only
# copies on the node, of blocks that must be fetched within SOLE_COPY_SECONDS if their pages are gone. A check takes the
# pusher 20 us.
CHECK_SECONDS: Final = 0.2
CHECK_AHEAD_SECONDS: Final = 1.0
SOLE_COPY_SECONDS: Final = 60.0
MAX_CHECKED_BLOCKS: Final = 1024
MAX_OPEN_CHECKS: Final = 2
# Seconds per block between computations of the blocks that the tiers will not keep until their next read. One takes 60
# ms per million blocks, so it is made once in 5 s for a million. Tiers count with RELIABLE_SHARE of their size, as they
# also have blocks that are fetched ahead.
HORIZON_SECONDS_PER_BLOCK: Final = 5e-6
RELIABLE_SHARE: Final = 0.8
# Most blocks of all snapshots that this computation samples: every n-th one.
SAMPLED_BLOCKS: Final = 1 << 16
# Seconds per block of the snapshots between two searches for only copies: 80 ms for 10^7 blocks.
FOLLOW_SECONDS_PER_BLOCK: Final = 1e-6
# Weight of a new observation of the time that an order takes.
_LATENCY_WEIGHT: Final = 0.2


class PageAction(StrEnum):
    """The action on the pages of an order's blocks."""

    STORE = "store"
    DROP = "drop"
    CHECK = "check"  # after an earlier store: store pages again that the kernel has reclaimed


@dataclass(frozen=True, slots=True, eq=False)
class FileBlocks:
    """Blocks of one snapshot, named by their files. Unlike block numbers these names need no block space."""

    snapshot: str
    entries: npt.NDArray[np.int64]  # entry of the file in the snapshot, shape (n,)
    numbers: npt.NDArray[np.int64]  # number of the block within its file, shape (n,)

    def __len__(self) -> int:
        return len(self.entries)

    def split(self, count: int) -> "tuple[FileBlocks, FileBlocks]":
        """Return the first *count* blocks, and the rest."""
        return (
            FileBlocks(self.snapshot, self.entries[:count], self.numbers[:count]),
            FileBlocks(self.snapshot, self.entries[count:], self.numbers[count:]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PageCommand:
    """An action on the pages of some blocks, in their order."""

    serial: int  # identifies the order in reports
    action: PageAction
    files: FileBlocks  # the blocks
    ids: Ids | None  # the same blocks by their numbers, int32; None where their snapshot is in no plan
    size: int  # bytes that may come into the page cache: 0 unless pages are to be stored
    decided_at: float  # time of the decision, in seconds


class UnplannedPages:
    """The pages are kept for a while, since a job that continues after a restart of the daemon soon has a plan again,
    and then dropped. Their bytes are unknown, as sizes are in the plan's spaces."""

    def __init__(self) -> None:
        self._files: dict[str, FileBlocks] = {}  # by snapshot
        self._until = math.inf  # seconds until which a plan may claim the pages

    def __bool__(self) -> bool:
        return bool(self._files)

    def replace_pages(self, reported: Iterable[FileBlocks], until: float) -> None:
        """Replace the leftovers by the pages that a pusher reports. until: seconds, after which they are dropped."""
        self._files = {files.snapshot: files for files in reported}
        self._until = until

    def claim_planned(self, spaces: Mapping[str, BlockSpace]) -> Iterator[Blocks]:
        """Yield and remove the leftovers of snapshots that have a space, by block numbers."""
        for snapshot in self._files.keys() & spaces.keys():
            yield Blocks(snapshot, _block_numbers(self._files.pop(snapshot), spaces[snapshot]))

    def take_overdue(self, count: int, now: float) -> FileBlocks | None:
        """Return and remove at most *count* overdue blocks of one snapshot, to be dropped; None where there are
        none."""
        if not self._files or now <= self._until:
            return None
        snapshot, files = self._files.popitem()
        first, remaining = files.split(count)
        if len(remaining):
            self._files[snapshot] = remaining
        return first


def _block_numbers(files: FileBlocks, space: BlockSpace) -> Ids:
    """Return the numbers of the blocks in *space*, in ascending order, without those that it does not have."""
    starts, ids = space.blocks_of(files.entries)
    wanted = starts[:-1] + files.numbers
    return np.unique(ids[wanted[wanted < starts[1:]]])


@dataclass(frozen=True, slots=True)
class MountConsumers:
    """The consumers that read a mount's snapshots."""

    readers: Sequence[PushReader]  # those that read through the mount, or through unknown mounts
    read_elsewhere: frozenset[str] = frozenset()  # snapshots that are read through other mounts only


NO_CONSUMERS: Final = MountConsumers(())


class PushPlan:
    """Decides for one mount. The caller executes the `next_commands`, and reports the result of each to `note_done`."""

    def __init__(
        self,
        plan: Plan,
        presence: Presence,
        is_shown: Callable[[str], bool],
        first_serial: int,
        capacity: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """is_shown: returns whether the mount shows a snapshot; first_serial: of the first order, beyond those of
        earlier daemons, so that reports of their orders are not taken for reports of these; capacity: returns the bytes
        that the node's tiers keep."""
        self._plan = plan
        self._capacity = capacity
        self.pages = PageCacheModel(plan, 0, is_shown)
        self.latency = 0.0  # smoothed seconds from an order to its report
        # Bytes stored ahead of planned reads, by planned snapshot.
        self.stored_bytes: dict[str, int] = {}
        self._presence = presence
        self._lookahead = PushLookahead(plan)
        self._unplanned_pages = UnplannedPages()
        self._open_commands: dict[int, PageCommand] = {}  # open orders, by serial number
        self._serials = itertools.count(first_serial)
        # Guesses to store: blocks, and their bytes.
        self._readahead: deque[tuple[FileBlocks, int]] = deque()
        self._elsewhere: frozenset[str] = frozenset()  # snapshots that are read through other mounts only
        self._pushes = True  # False: pages are only checked
        # Times of the last, in seconds:
        self._retried_at = -math.inf  # retry of blocks that could not be stored
        self._searched_at = -math.inf  # search for blocks that have come to the node
        self._checked_at = -math.inf  # check for pages that the kernel has reclaimed
        self._horizon_at = -math.inf  # computation of the blocks that the tiers keep
        self._followed_at = -math.inf  # search for only copies

    @property
    def states(self) -> PageStates:
        """The states of `pages`, without snapshots that are read through other mounts only."""
        elsewhere = self._elsewhere
        if not elsewhere:  # the common case; policies ask for each block
            return self.pages.states
        return {snapshot: states for snapshot, states in self.pages.states.items() if snapshot not in elsewhere}

    @property
    def is_busy(self) -> bool:
        """True where there are so many open orders that `next_commands` gives none."""
        return len(self._open_commands) >= MAX_OPEN_COMMANDS or self._open_bytes() >= MAX_OPEN_BYTES

    @property
    def is_idle(self) -> bool:
        """True where no known job reads what the mount shows, and no guess or leftover waits."""
        return not (self.pages.spaces or self._readahead or self._unplanned_pages)

    @property
    def needs_consumers(self) -> bool:
        """True where `next_commands` depends on the audience: not while it gives no orders, nor while pages of an
        earlier daemon are left."""
        return not self.is_busy and not self._unplanned_pages

    # --- what happens -------------------------------------------------------------------------------------------------

    def start_pusher(self, budget: int, reported: Iterable[FileBlocks], now: float, *, pushes: bool = True) -> None:
        """Start a pusher. Its page cache stays. Which of the last orders were executed is unknown, so all their pages
        count as present.

        budget: bytes of pages; reported: blocks that the pusher knows to be present; now: seconds, as elsewhere;
        pushes: whether it stores and drops pages, and does not only check them.
        """
        self._pushes = pushes
        self._open_commands.clear()
        self.pages.abandon_orders()
        self.pages.set_budget(budget)
        self._unplanned_pages.replace_pages(reported, now + UNPLANNED_SECONDS)
        self._lookahead.rewind()

    def note_done(self, serial: int, failed: npt.NDArray[np.integer], now: float) -> None:
        """Record that an order was executed, except for its blocks with the indices *failed* (shape (n,), any
        integers). Orders from before `start_pusher` are ignored."""
        order = self._open_commands.pop(serial, None)
        if order is None or order.ids is None:
            return
        blocks = Blocks(order.files.snapshot, order.ids)
        if order.action is PageAction.DROP:
            self.pages.note_dropped(blocks)
        elif order.action is PageAction.CHECK:
            self.pages.note_checked(blocks, order.ids[failed], order.decided_at)
        else:
            self.latency += _LATENCY_WEIGHT * (now - order.decided_at - self.latency)
            self.pages.note_stored(blocks, now, failed=order.ids[failed])
            self._count_stored(order.size, blocks, order.ids[failed])

    def _count_stored(self, size: int, blocks: Blocks, failed: Ids) -> None:
        space = self.pages.spaces.get(blocks.snapshot)
        if space is not None:
            before = self.stored_bytes.get(blocks.snapshot, 0)
            self.stored_bytes[blocks.snapshot] = before + size - bytes_of(space.sizes, failed)

    def queue_readahead(self, files: FileBlocks, size: int) -> None:
        """Queue blocks, of *size* bytes, that a reader without a publication seems to come to. Their pages count like
        pages brought by readers: the budget must have room for them, and the kernel may drop them."""
        self._readahead.append((files, size))
        while len(self._readahead) > MAX_OPEN_COMMANDS:
            self._readahead.popleft()  # its reader has arrived by now

    # --- what to do next ----------------------------------------------------------------------------------------------

    def next_commands(self, consumers: MountConsumers, now: float, lead: float = 0.0) -> Iterator[PageCommand]:
        """Yield the next orders, at *now* seconds. Each is decided when it is requested: `note_done` may be called in
        between, and an order that is not requested any more is not lost. The audience matters where the plan
        `needs_consumers`. lead: seconds before its read at which a block that is not on the node must be fetched.
        """
        waits = not self.needs_consumers
        self._follow_changes(now)
        if self.is_busy:
            return
        if waits or self._unplanned_pages:
            # No page is stored beside leftovers, as their bytes are unknown.
            yield from self._drop_unplanned_pages(now)
            return
        self._elsewhere = consumers.read_elsewhere
        readers = consumers.readers
        for blocks in self._blocks_to_drop(readers, now) if self._pushes else ():
            # Blocks found for the first of these orders may be gone at the second.
            there = self.pages.filter_droppable(blocks)
            if len(there.ids):
                yield self._make_command(PageAction.DROP, there, now)
        yield from self._check_commands(readers, now, lead)
        while not self.is_busy:
            # Half of the free reserve is for pages that readers bring, and that are reported later.
            free = self.pages.free - (self.pages.budget >> (_FREE_SHIFT + 1))
            due = self._next_due(readers, min(free, MAX_OPEN_BYTES - self._open_bytes()))
            if due is None:
                break
            yield self._make_command(PageAction.STORE, Blocks(due.snapshot, due.ids), now)

        while self._readahead and not self.is_busy:
            files, size = self._readahead.popleft()
            open_bytes = sum(order.size for order in self._open_commands.values() if order.ids is None)
            if size <= self.pages.free - (self.pages.budget >> _FREE_SHIFT) - open_bytes:
                yield self._add_open(PageCommand(next(self._serials), PageAction.STORE, files, None, size, now))

    def _follow_changes(self, now: float) -> None:
        """Process changes of the plan and of the node."""
        self.pages.note_decision(now)
        planned = self.pages.spaces.keys()
        self.pages.follow_plan()
        if self.pages.spaces.keys() - planned:
            # Blocks that a job has read before it was planned may exceed the budget. None is dropped before the blocks
            # kept by the tiers are known.
            self._searched_at = self._horizon_at = -math.inf
        if len(self.stored_bytes) > len(self.pages.spaces):
            self.stored_bytes = {name: size for name, size in self.stored_bytes.items() if name in self.pages.spaces}
        if self._unplanned_pages:
            for blocks in self._unplanned_pages.claim_planned(self.pages.spaces):
                self.pages.note_present(blocks)
        if now - self._retried_at > REFUSED_SECONDS:
            self._retried_at = now
            self.pages.allow_retries()
        if now - self._searched_at > SEARCH_SECONDS:
            self._searched_at = now
            self._lookahead.rewind()
            count = sum(space.count for space in self.pages.spaces.values())
            if now - self._horizon_at > HORIZON_SECONDS_PER_BLOCK * count:
                self._horizon_at = now
                self.pages.set_horizon(self._horizon())
            if now - self._followed_at > FOLLOW_SECONDS_PER_BLOCK * count:
                self._followed_at = now
                self.pages.follow_tiers(self._presence.states)

    def _horizon(self) -> float:
        """Return the time to the next read within which the tiers keep blocks, in seconds, as they keep those read
        soonest; inf where they have room for all planned blocks, or the page cache has no room beyond the budget."""
        capacity, spaces = self._capacity(), self.pages.spaces
        if self.pages.is_losing_pages or capacity >= sum(space.bytes for space in spaces.values()):
            return math.inf
        stride = 1 + sum(space.count for space in spaces.values()) // SAMPLED_BLOCKS
        due = [self._plan.next_use_of(name, np.arange(0, space.count, stride)) for name, space in spaces.items()]
        seconds = np.concatenate(due)
        sizes = np.concatenate([space.sizes[::stride] for space in spaces.values()])[seconds < np.inf]
        seconds = seconds[seconds < np.inf]
        total = stride * int(sizes.sum(dtype=np.int64))
        if total <= capacity:
            return math.inf
        kept = int(RELIABLE_SHARE * capacity / total * len(seconds))
        return float(np.partition(seconds, kept)[kept])

    def _next_due(self, readers: Sequence[PushReader], room: int) -> DueBlocks | None:
        """Return the blocks of one order to store, at most *room* bytes: at least one block, if that fits."""
        if room <= 0:
            return None
        wanted = PushLimits(COMMAND_BLOCKS, min(room, COMMAND_BYTES), room)
        return self._lookahead.take_blocks(readers, self.pages.states, self._presence.states, wanted)

    def _drop_unplanned_pages(self, now: float) -> Iterator[PageCommand]:
        while not self.is_busy and (files := self._unplanned_pages.take_overdue(COMMAND_BLOCKS, now)) is not None:
            yield self._add_open(PageCommand(next(self._serials), PageAction.DROP, files, None, 0, now))

    def _blocks_to_drop(self, readers: Sequence[PushReader], now: float) -> Iterator[Blocks]:
        """Yield tripwires, blocks read through other mounts, and blocks evicted for sooner reads."""
        pages = self.pages
        self._lookahead.barred = self._lookahead.next_tripwires(readers)
        for snapshot, tripwires in self._lookahead.barred.items():
            if snapshot in pages.states:
                yield pages.filter_droppable(Blocks(snapshot, tripwires))
        for snapshot in self._elsewhere:
            yield Blocks(snapshot, pages.never_requested(snapshot)[:COMMAND_BLOCKS])
        reserve = pages.budget >> _FREE_SHIFT
        wanted = reserve - pages.free - pages.dropping_bytes
        if wanted <= reserve // 4:  # in large steps: to find one block costs as much as to find hundreds
            return
        overdrawn = -pages.free - pages.dropping_bytes
        if overdrawn > 0:
            yield from pages.choose_victims(overdrawn, -math.inf, COMMAND_BLOCKS, now)
            return
        # Blocks are evicted only for sooner reads.
        due = self._lookahead.peek_blocks(readers, pages.states, self._presence.states, COMMAND_BLOCKS)
        if due is not None:
            yield from pages.choose_victims(wanted, float(due.seconds[0]), COMMAND_BLOCKS, now)

    def _check_commands(self, readers: Sequence[PushReader], now: float, lead: float) -> Iterator[PageCommand]:
        """Yield checks of blocks that are read soon and were seen long ago: the kernel may have reclaimed pages."""
        if now - self._checked_at < CHECK_SECONDS:
            return
        self._checked_at = now
        for reader in readers:
            open_checks = [
                command.ids
                for command in self._open_commands.values()
                if command.action is PageAction.CHECK and command.ids is not None
            ]
            if len(open_checks) >= MAX_OPEN_CHECKS:
                return
            found = [np.zeros(0, np.int32)]
            if self._pushes:
                soon = self._lookahead.blocks_within(
                    reader, CHECK_AHEAD_SECONDS, tripwire_interval=reader.tripwire_interval
                )
                found.append(self.pages.stale_blocks(reader.snapshot, soon.ids, now))
            if self.pages.sole_copy_bytes:
                # Reads that come too soon for a push are fetched too, unless their pages were seen: a job that rested
                # for 8 s between two epochs had the first 64 samples of the next fetched again.
                soon = self._lookahead.blocks_within(replace(reader, skipped_reads=0), lead + SOLE_COPY_SECONDS)
                found.append(self.pages.unsure_blocks(reader.snapshot, soon.ids, soon.seconds - lead, now))
            ids = np.concatenate(found)
            ids = ids[np.sort(np.unique(ids, return_index=True)[1])]
            if open_checks and len(ids):
                ids = ids[~np.isin(ids, np.concatenate(open_checks))]
            if len(ids):
                yield self._make_command(PageAction.CHECK, Blocks(reader.snapshot, ids[:MAX_CHECKED_BLOCKS]), now)

    def _open_bytes(self) -> int:
        return sum(order.size for order in self._open_commands.values())

    def _make_command(self, action: PageAction, blocks: Blocks, now: float) -> PageCommand:
        space, size = self.pages.spaces[blocks.snapshot], 0
        if action is PageAction.DROP:
            self.pages.note_drop_ordered(blocks)
        elif action is PageAction.STORE:
            self.pages.note_store_ordered(blocks)
            size = bytes_of(space.sizes, blocks.ids)
        files = FileBlocks(blocks.snapshot, *space.refs(blocks.ids))
        return self._add_open(PageCommand(next(self._serials), action, files, blocks.ids, size, now))

    def _add_open(self, command: PageCommand) -> PageCommand:
        self._open_commands[command.serial] = command
        return command
