"""What to do next with one mount's page cache: which pages to store ahead of readers, to drop, and to check.

What is read soonest comes first, into room that is free. Once the budget is full, what is read last is evicted for what
is read sooner. What is dropped makes room only when the pusher says that it is gone, so that the pages never exceed the
budget; a little is kept free so that orders need not wait for that.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.presence import Presence
from cachefs.planning.blocks.space import Ids
from cachefs.planning.pagecache.leftovers import Leftovers
from cachefs.planning.pagecache.lookahead import Due, PushLookahead, Reader, Room
from cachefs.planning.pagecache.model import PageCacheModel
from cachefs.planning.pagecache.orders import Action, FileBlocks, Order
from cachefs.planning.pagecache.states import Blocks, PageStates, bytes_of
from cachefs.planning.sequences.plan import Plan

# Orders and bytes that a pusher is given at once: enough to be busy while a report travels, little enough to change
# one's mind. On an idle machine 4 orders are enough. It is twice as many, since beside two readers at full speed a
# report and its answer take 30 ms.
MAX_ORDERS: Final = 8
MAX_BYTES: Final = 96 << 20
# Blocks and bytes of one order, at most: the pusher works on the next order while the last one is reported.
BLOCKS: Final = 96
ORDER_BYTES: Final = MAX_BYTES // 4
# The share of the budget that is kept free: 1/16.
_FREE_SHIFT: Final = 4
# Blocks that have come to the node, and pages that have gone, are found after so many seconds.
LOOK_AGAIN: Final = 0.2
# Blocks that could not be pushed are tried again after so many seconds.
REFUSED_SECONDS: Final = 2.0
# What an earlier daemon has had pushed is dropped after so many seconds, unless a job of this one is going to read it.
UNPLANNED_SECONDS: Final = 10.0
# Once in CHECK_SECONDS it is checked whether pages are still there, of at most MOST_CHECKED blocks of each reader, with
# no more than MOST_CHECKS such orders open: of pages that were pushed long ago and are read within AHEAD_SECONDS; and
# of pages that are the only copy on the node, of a block that must be fetched within SOLE_SECONDS if they are gone. A
# check takes the pusher 20 us.
CHECK_SECONDS: Final = 0.2
AHEAD_SECONDS: Final = 1.0
SOLE_SECONDS: Final = 60.0
MOST_CHECKED: Final = 1024
MOST_CHECKS: Final = 2
# From time to time it is found out which blocks the tiers will not keep until they are read again. That takes 60 ms per
# million blocks, so it is done once in 5 s for so many. Tiers are counted on for RELIABLE of their size, as they have
# blocks that are fetched ahead, too.
FORESEE_SECONDS: Final = 5e-6
RELIABLE: Final = 0.8
# Blocks of all snapshots that this look takes into account: every n-th one.
SAMPLED: Final = 1 << 16
# Seconds, for each block of the snapshots, between two looks at all pages for only copies: 80 ms for 10^7 blocks.
FOLLOW_SECONDS: Final = 1e-6
# Weight of a new observation of the time that an order takes.
_LEARN: Final = 0.2


@dataclass(frozen=True, slots=True)
class Audience:
    """The consumers that read what one mount shows."""

    here: Sequence[Reader]  # those that read through the mount, or of which nobody knows through which mounts they read
    elsewhere: frozenset[str] = frozenset()  # snapshots that are read through other mounts only


NOBODY: Final = Audience(())


class PushPlan:
    """Decides for one mount. The caller carries out the `next_orders`, and tells `done` what came of each."""

    def __init__(
        self,
        plan: Plan,
        presence: Presence,
        shows: Callable[[str], bool],
        first_serial: int,
        capacity: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """shows: does the mount show that snapshot? first_serial: of the first order, beyond those of earlier daemons:
        a report of what one of them has ordered must not be taken for a report of these orders. capacity: bytes that
        the node's tiers keep."""
        self._plan = plan
        self._capacity = capacity
        self.pages = PageCacheModel(plan, 0, shows)
        self.latency = 0.0  # seconds from an order to the report of it, smoothed
        # Bytes that were stored since readers come to them, by snapshot, of those that are in the plan.
        self.stored: dict[str, int] = {}
        self._presence = presence
        self._lookahead = PushLookahead(plan)
        self._leftovers = Leftovers()
        self._orders: dict[int, Order] = {}  # those of which nobody has said what came of them, by serial number
        self._serials = itertools.count(first_serial)
        # What is stored since somebody seems to come to it: the blocks, and bytes.
        self._guessed: deque[tuple[FileBlocks, int]] = deque()
        self._elsewhere: frozenset[str] = frozenset()  # snapshots that are read through other mounts only
        self._pushes = True  # and does not only look what readers have left there
        # When it was last done, in seconds:
        self._retried = -math.inf  # trying again what could not be stored
        self._looked = -math.inf  # looking for what has come to the node
        self._checked = -math.inf  # looking for pages that the kernel has taken back
        self._foreseen = -math.inf  # finding out what the tiers keep
        self._followed = -math.inf  # finding out which pages are the only copy of their block

    @property
    def states(self) -> PageStates:
        """The states of `pages`, without those of snapshots that are read through other mounts only."""
        elsewhere = self._elsewhere
        if not elsewhere:  # policies ask for each block
            return self.pages.states
        return {snapshot: states for snapshot, states in self.pages.states.items() if snapshot not in elsewhere}

    @property
    def is_busy(self) -> bool:
        """So many orders are open that `next_orders` gives none."""
        return len(self._orders) >= MAX_ORDERS or self._bytes_ordered() >= MAX_BYTES

    @property
    def is_idle(self) -> bool:
        """Returns whether no known job reads what the mount shows, and no guess or leftover waits."""
        return not (self.pages.spaces or self._guessed or self._leftovers)

    @property
    def needs_audience(self) -> bool:
        """Does what `next_orders` gives depend on who reads? Not while so many orders are open that there are none, nor
        while pages of an earlier daemon are left."""
        return not self.is_busy and not self._leftovers

    # --- what happens -------------------------------------------------------------------------------------------------

    def begin(self, budget: int, held: Iterable[FileBlocks], now: float, *, pushes: bool = True) -> None:
        """A pusher begins to take orders. What was there stays. Nobody knows which of the last orders were carried
        out, so all that they were about counts as there.

        budget: bytes of pages; held: those that it knows to be there; now: seconds, as elsewhere; pushes: it stores and
        drops pages, and does not only check which are there.
        """
        self._pushes = pushes
        self._orders.clear()
        self.pages.settle()
        self.pages.budget = budget
        self._leftovers.begin(held, now + UNPLANNED_SECONDS)
        self._lookahead.rewind()

    def done(self, serial: int, failed: npt.NDArray[np.integer], now: float) -> None:
        """An order was carried out, but for those of its blocks with the indices *failed* (shape (n,), any integers).
        Orders of before `begin` are ignored."""
        order = self._orders.pop(serial, None)
        if order is None or order.ids is None:
            return
        blocks = Blocks(order.files.snapshot, order.ids)
        if order.action is Action.DROP:
            self.pages.went(blocks)
        elif order.action is Action.CHECK:
            self.pages.checked(blocks, order.ids[failed], order.given)
        else:
            self.latency += _LEARN * (now - order.given - self.latency)
            self.pages.came(blocks, now, failed=order.ids[failed])
            self._count_stored(order.size, blocks, order.ids[failed])

    def _count_stored(self, size: int, blocks: Blocks, failed: Ids) -> None:
        space = self.pages.spaces.get(blocks.snapshot)
        if space is not None:
            before = self.stored.get(blocks.snapshot, 0)
            self.stored[blocks.snapshot] = before + size - bytes_of(space.sizes, failed)

    def guess(self, files: FileBlocks, size: int) -> None:
        """Somebody who has published nothing seems to come to these blocks, of *size* bytes. Their pages are like those
        that readers bring: the budget must have room for them, and the kernel drops them when it likes."""
        self._guessed.append((files, size))
        while len(self._guessed) > MAX_ORDERS:
            self._guessed.popleft()  # its reader is there by now

    # --- what to do next ----------------------------------------------------------------------------------------------

    def next_orders(self, audience: Audience, now: float, lead: float = 0.0) -> Iterator[Order]:
        """What is to be done now, at *now* seconds. Each order is decided when it is asked for: `done` may be called in
        between, and an order that nobody asks for any more is not lost. The audience counts where the plan
        `needs_audience`. lead: seconds before its read that a block which is not on the node must be fetched.
        """
        waits = not self.needs_audience
        self._follow(now)
        if self.is_busy:
            return
        if waits or self._leftovers:
            # Nothing is added to what is left, as nobody knows how many bytes that is.
            yield from self._drop_leftovers(now)
            return
        self._elsewhere = audience.elsewhere
        readers = audience.here
        for blocks in self._to_drop(readers, now) if self._pushes else ():
            # What was found for the first of these orders may have gone by the second.
            there = self.pages.droppable(blocks)
            if len(there.ids):
                yield self._order(Action.DROP, there, now)
        yield from self._to_check(readers, now, lead)
        while not self.is_busy:
            # Half of what is kept free is for pages that readers bring, and that are reported later.
            free = self.pages.free - (self.pages.budget >> (_FREE_SHIFT + 1))
            due = self._due(readers, min(free, MAX_BYTES - self._bytes_ordered()))
            if due is None:
                break
            yield self._order(Action.STORE, Blocks(due.snapshot, due.ids), now)

        while self._guessed and not self.is_busy:
            files, size = self._guessed.popleft()
            on_the_way = sum(order.size for order in self._orders.values() if order.ids is None)
            if size <= self.pages.free - (self.pages.budget >> _FREE_SHIFT) - on_the_way:
                yield self._open(Order(next(self._serials), Action.STORE, files, None, size, now))

    def _follow(self, now: float) -> None:
        """Take note of what has changed in the plan, and on the node."""
        self.pages.note_decision(now)
        planned = self.pages.spaces.keys()
        self.pages.follow_plan()
        if self.pages.spaces.keys() - planned:
            # What a job has read before it was planned may exceed the budget. None of that is dropped before it is
            # known what the tiers keep.
            self._looked = self._foreseen = -math.inf
        if len(self.stored) > len(self.pages.spaces):
            self.stored = {name: size for name, size in self.stored.items() if name in self.pages.spaces}
        if self._leftovers:
            for blocks in self._leftovers.claim(self.pages.spaces):
                self.pages.there(blocks)
        if now - self._retried > REFUSED_SECONDS:
            self._retried = now
            self.pages.retry()
        if now - self._looked > LOOK_AGAIN:
            self._looked = now
            self._lookahead.rewind()
            count = sum(space.count for space in self.pages.spaces.values())
            if now - self._foreseen > FORESEE_SECONDS * count:
                self._foreseen = now
                self.pages.keep_until(self._horizon())
            if now - self._followed > FOLLOW_SECONDS * count:
                self._followed = now
                self.pages.follow_tiers(self._presence.states)

    def _horizon(self) -> float:
        """Seconds within which those blocks are read that the tiers keep, as they keep what is read soonest; inf where
        they have room for all that is read, and where the page cache has no room for more than the budget."""
        capacity, spaces = self._capacity(), self.pages.spaces
        if self.pages.is_losing or capacity >= sum(space.bytes for space in spaces.values()):
            return math.inf
        stride = 1 + sum(space.count for space in spaces.values()) // SAMPLED
        due = [self._plan.next_use_of(name, np.arange(0, space.count, stride)) for name, space in spaces.items()]
        seconds = np.concatenate(due)
        sizes = np.concatenate([space.sizes[::stride] for space in spaces.values()])[seconds < np.inf]
        seconds = seconds[seconds < np.inf]
        total = stride * int(sizes.sum(dtype=np.int64))
        if total <= capacity:
            return math.inf
        kept = int(RELIABLE * capacity / total * len(seconds))
        return float(np.partition(seconds, kept)[kept])

    def _due(self, readers: Sequence[Reader], room: int) -> Due | None:
        """The blocks of one order to store, of at most *room* bytes: one block at least, if that has room."""
        if room <= 0:
            return None
        wanted = Room(BLOCKS, min(room, ORDER_BYTES), room)
        return self._lookahead.take(readers, self.pages.states, self._presence.states, wanted)

    def _drop_leftovers(self, now: float) -> Iterator[Order]:
        while not self.is_busy and (files := self._leftovers.take(BLOCKS, now)) is not None:
            yield self._open(Order(next(self._serials), Action.DROP, files, None, 0, now))

    def _to_drop(self, readers: Sequence[Reader], now: float) -> Iterator[Blocks]:
        """Tripwires, what is read through other mounts, and what is evicted for what is read sooner."""
        pages = self.pages
        self._lookahead.barred = self._lookahead.tripwires(readers)
        for snapshot, tripwires in self._lookahead.barred.items():
            if snapshot in pages.states:
                yield pages.droppable(Blocks(snapshot, tripwires))
        for snapshot in self._elsewhere:
            yield Blocks(snapshot, pages.never_asked_for(snapshot)[:BLOCKS])
        reserve = pages.budget >> _FREE_SHIFT
        wanted = reserve - pages.free - pages.going
        if wanted <= reserve // 4:  # many at a time: to find one costs as much as to find hundreds
            return
        overdrawn = -pages.free - pages.going
        if overdrawn > 0:
            yield from pages.victims(overdrawn, -math.inf, BLOCKS, now)
            return
        # Nothing is evicted for what is read later.
        due = self._lookahead.peek(readers, pages.states, self._presence.states, BLOCKS)
        if due is not None:
            yield from pages.victims(wanted, float(due.seconds[0]), BLOCKS, now)

    def _to_check(self, readers: Sequence[Reader], now: float, lead: float) -> Iterator[Order]:
        """What is read soon and was seen long ago: the kernel may have taken pages back."""
        if now - self._checked < CHECK_SECONDS:
            return
        self._checked = now
        for reader in readers:
            under_way = [one.ids for one in self._orders.values() if one.action is Action.CHECK and one.ids is not None]
            if len(under_way) >= MOST_CHECKS:
                return
            found = [np.zeros(0, np.int32)]
            if self._pushes:
                soon = self._lookahead.soon(reader, AHEAD_SECONDS, every=reader.every)
                found.append(self.pages.stale(reader.snapshot, soon.ids, now))
            if self.pages.sole_bytes:
                # Reads that come too soon for a push are fetched too, unless their pages are seen: a job that rested
                # for 8 s between two epochs had the first 64 samples of the next fetched again.
                soon = self._lookahead.soon(replace(reader, skip=0), lead + SOLE_SECONDS)
                found.append(self.pages.unsure(reader.snapshot, soon.ids, soon.seconds - lead, now))
            ids = np.concatenate(found)
            ids = ids[np.sort(np.unique(ids, return_index=True)[1])]
            if under_way and len(ids):
                ids = ids[~np.isin(ids, np.concatenate(under_way))]
            if len(ids):
                yield self._order(Action.CHECK, Blocks(reader.snapshot, ids[:MOST_CHECKED]), now)

    def _bytes_ordered(self) -> int:
        return sum(order.size for order in self._orders.values())

    def _order(self, action: Action, blocks: Blocks, now: float) -> Order:
        space, size = self.pages.spaces[blocks.snapshot], 0
        if action is Action.DROP:
            self.pages.going_now(blocks)
        elif action is Action.STORE:
            self.pages.coming(blocks)
            size = bytes_of(space.sizes, blocks.ids)
        files = FileBlocks(blocks.snapshot, *space.refs(blocks.ids))
        return self._open(Order(next(self._serials), action, files, blocks.ids, size, now))

    def _open(self, order: Order) -> Order:
        self._orders[order.serial] = order
        return order
