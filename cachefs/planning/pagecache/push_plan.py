"""Decides the next actions on one mount's page cache: which pages to store ahead of readers, to drop, and to check.

The soonest reads come first, into free room. Once the budget is full, blocks read last are evicted for blocks read
sooner. Dropped pages make room only when the pusher reports that they are gone, so that the pages never exceed the
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

# Most open orders and bytes of a pusher: enough to be busy while a report travels, few enough for a change of plan. On
# an idle machine 4 orders are enough. It is twice as many, since beside two readers at full speed a report and its
# answer take 30 ms.
MAX_ORDERS: Final = 8
MAX_BYTES: Final = 96 << 20
# Most blocks and bytes of one order: the pusher works on the next order while the last one is reported.
BLOCKS: Final = 96
ORDER_BYTES: Final = MAX_BYTES // 4
# The share of the budget that is kept free: 1/16.
_FREE_SHIFT: Final = 4
# Seconds between searches for blocks that have come to the node, and for lost pages.
LOOK_AGAIN: Final = 0.2
# Seconds until blocks that could not be pushed are tried again.
REFUSED_SECONDS: Final = 2.0
# Seconds after which pages pushed under an earlier daemon are dropped, unless a job of this one is going to read them.
UNPLANNED_SECONDS: Final = 10.0
# Once in CHECK_SECONDS pages are checked, of at most MOST_CHECKED blocks of each reader, with at most MOST_CHECKS such
# orders open: pages that were pushed long ago and are read within AHEAD_SECONDS; and only copies on the node, of blocks
# that must be fetched within SOLE_SECONDS if their pages are gone. A check takes the pusher 20 us.
CHECK_SECONDS: Final = 0.2
AHEAD_SECONDS: Final = 1.0
SOLE_SECONDS: Final = 60.0
MOST_CHECKED: Final = 1024
MOST_CHECKS: Final = 2
# Seconds per block between computations of the blocks that the tiers will not keep until their next read. One takes 60
# ms per million blocks, so it is made once in 5 s for a million. Tiers count with RELIABLE of their size, as they also
# have blocks that are fetched ahead.
FORESEE_SECONDS: Final = 5e-6
RELIABLE: Final = 0.8
# Most blocks of all snapshots that this computation samples: every n-th one.
SAMPLED: Final = 1 << 16
# Seconds per block of the snapshots between two searches for only copies: 80 ms for 10^7 blocks.
FOLLOW_SECONDS: Final = 1e-6
# Weight of a new observation of the time that an order takes.
_LEARN: Final = 0.2


@dataclass(frozen=True, slots=True)
class Audience:
    """The consumers that read a mount's snapshots."""

    here: Sequence[Reader]  # those that read through the mount, or through unknown mounts
    elsewhere: frozenset[str] = frozenset()  # snapshots that are read through other mounts only


NO_NODE: Final = Audience(())


class PushPlan:
    """Decides for one mount. The caller executes the `next_orders`, and reports the result of each to `done`."""

    def __init__(
        self,
        plan: Plan,
        presence: Presence,
        shows: Callable[[str], bool],
        first_serial: int,
        capacity: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """shows: returns whether the mount shows a snapshot; first_serial: of the first order, beyond those of earlier
        daemons, so that reports of their orders are not taken for reports of these; capacity: returns the bytes that
        the node's tiers keep."""
        self._plan = plan
        self._capacity = capacity
        self.pages = PageCacheModel(plan, 0, shows)
        self.latency = 0.0  # smoothed seconds from an order to its report
        # Bytes stored ahead of planned reads, by planned snapshot.
        self.stored: dict[str, int] = {}
        self._presence = presence
        self._lookahead = PushLookahead(plan)
        self._leftovers = Leftovers()
        self._orders: dict[int, Order] = {}  # open orders, by serial number
        self._serials = itertools.count(first_serial)
        # Guesses to store: blocks, and their bytes.
        self._guessed: deque[tuple[FileBlocks, int]] = deque()
        self._elsewhere: frozenset[str] = frozenset()  # snapshots that are read through other mounts only
        self._pushes = True  # False: pages are only checked
        # Times of the last, in seconds:
        self._retried = -math.inf  # retry of blocks that could not be stored
        self._looked = -math.inf  # search for blocks that have come to the node
        self._checked = -math.inf  # check for pages that the kernel has reclaimed
        self._foreseen = -math.inf  # computation of the blocks that the tiers keep
        self._followed = -math.inf  # search for only copies

    @property
    def states(self) -> PageStates:
        """The states of `pages`, without snapshots that are read through other mounts only."""
        elsewhere = self._elsewhere
        if not elsewhere:  # the common case; policies ask for each block
            return self.pages.states
        return {snapshot: states for snapshot, states in self.pages.states.items() if snapshot not in elsewhere}

    @property
    def is_busy(self) -> bool:
        """True where there are so many open orders that `next_orders` gives none."""
        return len(self._orders) >= MAX_ORDERS or self._bytes_ordered() >= MAX_BYTES

    @property
    def is_idle(self) -> bool:
        """True where no known job reads what the mount shows, and no guess or leftover waits."""
        return not (self.pages.spaces or self._guessed or self._leftovers)

    @property
    def needs_audience(self) -> bool:
        """True where `next_orders` depends on the audience: not while it gives no orders, nor while pages of an earlier
        daemon are left."""
        return not self.is_busy and not self._leftovers

    # --- what happens -------------------------------------------------------------------------------------------------

    def begin(self, budget: int, held: Iterable[FileBlocks], now: float, *, pushes: bool = True) -> None:
        """Start a pusher. Its page cache stays. Which of the last orders were executed is unknown, so all their pages
        count as present.

        budget: bytes of pages; held: blocks that the pusher knows to be present; now: seconds, as elsewhere; pushes:
        whether it stores and drops pages, and does not only check them.
        """
        self._pushes = pushes
        self._orders.clear()
        self.pages.settle()
        self.pages.budget = budget
        self._leftovers.begin(held, now + UNPLANNED_SECONDS)
        self._lookahead.rewind()

    def done(self, serial: int, failed: npt.NDArray[np.integer], now: float) -> None:
        """Record that an order was executed, except for its blocks with the indices *failed* (shape (n,), any
        integers). Orders from before `begin` are ignored."""
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
        """Queue blocks, of *size* bytes, that a reader without a publication seems to come to. Their pages count like
        pages brought by readers: the budget must have room for them, and the kernel may drop them."""
        self._guessed.append((files, size))
        while len(self._guessed) > MAX_ORDERS:
            self._guessed.popleft()  # its reader has arrived by now

    # --- what to do next ----------------------------------------------------------------------------------------------

    def next_orders(self, audience: Audience, now: float, lead: float = 0.0) -> Iterator[Order]:
        """Yield the next orders, at *now* seconds. Each is decided when it is requested: `done` may be called in
        between, and an order that is not requested any more is not lost. The audience matters where the plan
        `needs_audience`. lead: seconds before its read at which a block that is not on the node must be fetched.
        """
        waits = not self.needs_audience
        self._follow(now)
        if self.is_busy:
            return
        if waits or self._leftovers:
            # No page is stored beside leftovers, as their bytes are unknown.
            yield from self._drop_leftovers(now)
            return
        self._elsewhere = audience.elsewhere
        readers = audience.here
        for blocks in self._to_drop(readers, now) if self._pushes else ():
            # Blocks found for the first of these orders may be gone at the second.
            there = self.pages.droppable(blocks)
            if len(there.ids):
                yield self._order(Action.DROP, there, now)
        yield from self._to_check(readers, now, lead)
        while not self.is_busy:
            # Half of the free reserve is for pages that readers bring, and that are reported later.
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
        """Process changes of the plan and of the node."""
        self.pages.note_decision(now)
        planned = self.pages.spaces.keys()
        self.pages.follow_plan()
        if self.pages.spaces.keys() - planned:
            # Blocks that a job has read before it was planned may exceed the budget. None is dropped before the blocks
            # kept by the tiers are known.
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
        """Return the time to the next read within which the tiers keep blocks, in seconds, as they keep those read
        soonest; inf where they have room for all planned blocks, or the page cache has no room beyond the budget."""
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
        """Return the blocks of one order to store, at most *room* bytes: at least one block, if that fits."""
        if room <= 0:
            return None
        wanted = Room(BLOCKS, min(room, ORDER_BYTES), room)
        return self._lookahead.take(readers, self.pages.states, self._presence.states, wanted)

    def _drop_leftovers(self, now: float) -> Iterator[Order]:
        while not self.is_busy and (files := self._leftovers.take(BLOCKS, now)) is not None:
            yield self._open(Order(next(self._serials), Action.DROP, files, None, 0, now))

    def _to_drop(self, readers: Sequence[Reader], now: float) -> Iterator[Blocks]:
        """Yield tripwires, blocks read through other mounts, and blocks evicted for sooner reads."""
        pages = self.pages
        self._lookahead.barred = self._lookahead.tripwires(readers)
        for snapshot, tripwires in self._lookahead.barred.items():
            if snapshot in pages.states:
                yield pages.droppable(Blocks(snapshot, tripwires))
        for snapshot in self._elsewhere:
            yield Blocks(snapshot, pages.never_asked_for(snapshot)[:BLOCKS])
        reserve = pages.budget >> _FREE_SHIFT
        wanted = reserve - pages.free - pages.going
        if wanted <= reserve // 4:  # in large steps: to find one block costs as much as to find hundreds
            return
        overdrawn = -pages.free - pages.going
        if overdrawn > 0:
            yield from pages.victims(overdrawn, -math.inf, BLOCKS, now)
            return
        # Blocks are evicted only for sooner reads.
        due = self._lookahead.peek(readers, pages.states, self._presence.states, BLOCKS)
        if due is not None:
            yield from pages.victims(wanted, float(due.seconds[0]), BLOCKS, now)

    def _to_check(self, readers: Sequence[Reader], now: float, lead: float) -> Iterator[Order]:
        """Yield checks of blocks that are read soon and were seen long ago: the kernel may have reclaimed pages."""
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
                # Reads that come too soon for a push are fetched too, unless their pages were seen: a job that rested
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
