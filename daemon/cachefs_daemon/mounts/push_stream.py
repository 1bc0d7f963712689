"""Orders for one mount's pusher: which pages to store ahead of readers, and which to drop behind them.

Soonest first into room that is free. Once the budget is full, what is read last gives way to what is read sooner. What
is dropped makes room only when the pusher says that it is gone, so that the pages never exceed the budget; a little is
kept free for orders not to wait for that.
"""

import asyncio
import contextlib
import functools
import itertools
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.presence import Presence
from cachefs.planning.blocks.space import Ids
from cachefs.planning.pagecache.lookahead import Due, PushLookahead, Reader
from cachefs.planning.pagecache.model import PageCacheModel
from cachefs.planning.pagecache.states import Blocks, States
from cachefs.planning.sequences.plan import Plan
from cachefs.push_messages import HeldPages, PushDone, PushOrder, PushSubscribe

# What a pusher is given at once: enough to be busy while a report travels, little enough to change one's mind. Twice
# as much as on an idle machine, where 4 do: beside two readers at full speed a report and its answer take 30 ms.
MAX_ORDERS: Final = 8
MAX_BYTES: Final = 96 << 20
# Of one order: the pusher works on the next while the last is reported.
BLOCKS: Final = 96
ORDER_BYTES: Final = MAX_BYTES // 4
# Of the budget, what is kept free.
_FREE_SHIFT: Final = 4
STEP_SECONDS: Final = 0.05
LOOK_AGAIN: Final = 0.2
ALIVE_SECONDS: Final = 10.0
# Blocks that could not be pushed are not tried again at once.
REFUSED_SECONDS: Final = 2.0
# What an earlier daemon has had pushed, and no job of this one is going to read by then, is dropped.
UNPLANNED_SECONDS: Final = 10.0
# So often it is looked for what was pushed long ago and is read within so many seconds; at most so many blocks.
CHECK_SECONDS: Final = 0.2
AHEAD_SECONDS: Final = 1.0
MOST_CHECKED: Final = 1024
# How fast the time that an order takes is learnt.
_LEARN: Final = 0.2

Readers = Callable[[float], Sequence[Reader]]
Shows = Callable[[str], bool]
MountsOf = Callable[[str], frozenset[str]]


@dataclass(frozen=True, slots=True)
class _Order:
    """blocks: None where they are in no plan; check: see PushOrder."""

    blocks: Blocks | None
    size: int
    drop: bool
    given: float
    check: bool = False


class PushStream:
    """Of one mount, whichever process pushes for it: pages outlive that. pages: the model of its page cache; listening:
    somebody takes orders."""

    def __init__(self, plan: Plan, presence: Presence, readers: Readers, shows: Shows, mounts_of: MountsOf) -> None:
        """readers: those there are on the node, told how many seconds an order takes; shows: does the mount show that
        snapshot? mounts_of: through which mounts does the consumer with that key read (none: nobody knows)?"""
        self.pages = PageCacheModel(plan, 0, shows)
        self.listening = False
        self._mount = ""
        self._elsewhere: frozenset[str] = frozenset()
        self._subscription = 0
        self._counters: Counter[str] = Counter()
        self._past: Counter[str] = Counter()
        self._plan = plan
        self._presence = presence
        self._readers = readers
        self._shows = shows
        self._mounts_of = mounts_of
        self._lookahead = PushLookahead(plan)
        # Not in any plan so far; and until when they may get into one.
        self._held: dict[str, HeldPages] = {}
        self._until = math.inf
        self._orders: dict[int, _Order] = {}
        # A report of what an earlier daemon ordered must not be taken for one of ours.
        self._serials = itertools.count(time.time_ns())
        self._retried = self._looked = self._checked = -math.inf
        self._latency = 0.0
        self._news = asyncio.Event()

    @property
    def states(self) -> States:
        """Of `pages`, but for snapshots that are read through other mounts only."""
        elsewhere = self._elsewhere
        return {snapshot: states for snapshot, states in self.pages.states.items() if snapshot not in elsewhere}

    @property
    def counters(self) -> dict[str, int]:
        """The pushers' own, cumulative."""
        return {name: self._past[name] + value for name, value in self._counters.items()}

    async def orders(self, request: PushSubscribe) -> AsyncGenerator[PushOrder, None]:
        """As long as the pusher listens, and no other takes its place."""
        now = asyncio.get_running_loop().time
        subscription = self._begin(request, now())
        try:
            async for order in self._orders_of(subscription):
                yield order
        finally:
            if subscription == self._subscription:
                self.listening = False

    def _begin(self, request: PushSubscribe, now: float) -> int:
        """What was there stays; what of the last orders was carried out is not known."""
        self.listening = True
        self._mount = request.mount
        self._subscription += 1
        self._orders.clear()
        self.pages.settle()
        self.pages.budget = request.budget
        self._held = {held.snapshot: held for held in request.held}
        self._until = now + UNPLANNED_SECONDS
        self._lookahead.rewind()
        return self._subscription

    async def _orders_of(self, subscription: int) -> AsyncGenerator[PushOrder, None]:
        now = asyncio.get_running_loop().time
        said = now()
        while subscription == self._subscription:
            self._news.clear()
            for order in self._next_orders(now()):
                said = now()
                yield order
                if subscription != self._subscription:
                    return
            if now() - said > ALIVE_SECONDS:
                said = now()
                yield PushOrder(serial=0, snapshot="", entries=b"", numbers=b"")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STEP_SECONDS):
                    await self._news.wait()

    def wake(self) -> None:
        """Somebody has read on."""
        self._news.set()

    def report(self, report: PushDone) -> None:
        """What came of orders; those of an earlier subscription are unknown here."""
        self.pages.budget = report.budget
        if any(report.counters.get(name, 0) < value for name, value in self._counters.items()):
            self._past.update(self._counters)  # another process
        self._counters = Counter(report.counters)
        now = asyncio.get_running_loop().time()
        for done in report.done:
            order = self._orders.pop(done.serial, None)
            if order is None or order.blocks is None:
                continue
            if order.drop:
                self.pages.went(order.blocks)
                continue
            failed = order.blocks.ids[np.frombuffer(done.failed, "<u4")]
            if order.check:
                self.pages.lost(order.blocks, failed)
                continue
            self._latency += _LEARN * (now - order.given - self._latency)
            self.pages.came(order.blocks, now, failed=failed)
        self._news.set()

    # --- what to do next ----------------------------------------------------------------------------------------------

    def _next_orders(self, now: float) -> Iterator[PushOrder]:
        self._look(now)
        if self._is_busy():
            return
        if self._held:
            # How much that is nobody knows: nothing is added to it.
            yield from self._drop_unplanned(now)
            return
        readers = self._readers_here()
        for blocks in self._to_drop(readers, now):
            # What was found for the first of these orders may have gone by the second.
            there = self.pages.droppable(blocks)
            if len(there.ids):
                yield self._order(there, now, drop=True)
        yield from self._to_check(readers, now)
        while not self._is_busy():
            # Half of what is kept free is for pages that readers bring, and that are reported later.
            free = self.pages.free - (self.pages.budget >> (_FREE_SHIFT + 1))
            due = self._due(readers, min(free, MAX_BYTES - self._bytes_ordered()))
            if due is None:
                return
            yield self._order(Blocks(due.snapshot, due.ids), now, drop=False)

    def _due(self, readers: Sequence[Reader], room: int) -> Due | None:
        """For one order, of at most *room* bytes: one block at least, if that has room."""
        take = functools.partial(self._lookahead.take, readers, self.pages.states, self._presence.states)
        return (take(BLOCKS, min(room, ORDER_BYTES)) or take(1, room)) if room > 0 else None

    def _readers_here(self) -> list[Reader]:
        """Those whom pages of this mount are of use to."""
        readers = [reader for reader in self._readers(self._latency) if self._shows(reader.snapshot)]
        here = [reader for reader in readers if not (known := self._mounts_of(reader.key)) or self._mount in known]
        self._elsewhere = frozenset(one.snapshot for one in readers) - {one.snapshot for one in here}
        return here

    def _look(self, now: float) -> None:
        """Follow the plan, and what has changed on the node."""
        self.pages.follow_plan()
        for snapshot in self._held.keys() & self.pages.spaces.keys():
            held, space = self._held.pop(snapshot), self.pages.spaces[snapshot]
            starts, ids = space.blocks_of(np.frombuffer(held.entries, "<u8").astype(np.int64))
            self.pages.there(Blocks(snapshot, _numbered(held, starts, ids)))
        if now - self._retried > REFUSED_SECONDS:
            self._retried = now
            self.pages.retry()
        if now - self._looked > LOOK_AGAIN:
            self._looked = now
            self._lookahead.rewind()

    def _drop_unplanned(self, now: float) -> Iterator[PushOrder]:
        """What an earlier daemon had pushed for whom nobody knows here."""
        while self._held and now > self._until and not self._is_busy():
            snapshot, held = self._held.popitem()
            rest = HeldPages(snapshot, held.entries[8 * BLOCKS :], held.numbers[4 * BLOCKS :])
            if rest.entries:
                self._held[snapshot] = rest
            serial = next(self._serials)
            self._orders[serial] = _Order(None, 0, drop=True, given=now)
            entries, numbers = held.entries[: 8 * BLOCKS], held.numbers[: 4 * BLOCKS]
            yield PushOrder(serial=serial, snapshot=snapshot, entries=entries, numbers=numbers, drop=True)

    def _to_drop(self, readers: Sequence[Reader], now: float) -> Iterator[Blocks]:
        states = self.pages.states
        self._lookahead.barred = self._lookahead.tripwires(readers)
        for snapshot, wires in self._lookahead.barred.items():
            if snapshot in states:
                yield self.pages.droppable(Blocks(snapshot, wires))
        for snapshot in self._elsewhere:
            needless = self.pages.never_asked_for(snapshot)[:BLOCKS]
            yield Blocks(snapshot, needless)
        pages = self.pages
        reserve = pages.budget >> _FREE_SHIFT
        wanted = reserve - pages.free - pages.going
        if wanted <= reserve // 4:  # many at a time: to find one costs as much as to find hundreds
            return
        overdrawn = -pages.free - pages.going
        if overdrawn > 0:
            yield from pages.victims(overdrawn, -math.inf, BLOCKS, now)
            return
        # Nobody leaves for what is read later.
        due = self._lookahead.peek(readers, states, self._presence.states, BLOCKS)
        if due is not None:
            yield from pages.victims(wanted, float(due.seconds[0]), BLOCKS, now)

    def _to_check(self, readers: Sequence[Reader], now: float) -> Iterator[PushOrder]:
        """What is read soon and was pushed long ago: the kernel may have taken pages back."""
        if now - self._checked < CHECK_SECONDS:
            return
        self._checked = now
        for reader in readers:
            ids = self.pages.stale(reader.snapshot, self._lookahead.soon(reader, AHEAD_SECONDS), now)
            if len(ids):
                yield self._order(Blocks(reader.snapshot, ids[:MOST_CHECKED]), now, check=True)

    def _is_busy(self) -> bool:
        return len(self._orders) >= MAX_ORDERS or self._bytes_ordered() >= MAX_BYTES

    def _bytes_ordered(self) -> int:
        return sum(order.size for order in self._orders.values() if not order.drop)

    def _order(self, blocks: Blocks, now: float, *, drop: bool = False, check: bool = False) -> PushOrder:
        if drop:
            self.pages.going_now(blocks)
        elif check:
            self.pages.looked_for(blocks, now)
        else:
            self.pages.coming(blocks)
        space = self.pages.spaces[blocks.snapshot]
        entries, numbers = space.refs(blocks.ids)
        serial = next(self._serials)
        size = 0 if check else int(space.sizes[blocks.ids].sum(dtype=np.int64))
        self._orders[serial] = _Order(blocks, size, drop, now, check)
        packed = entries.astype("<u8").tobytes(), numbers.astype("<u4").tobytes()
        return PushOrder(
            serial=serial, snapshot=blocks.snapshot, entries=packed[0], numbers=packed[1], drop=drop, check=check
        )


def _numbered(held: HeldPages, starts: npt.NDArray[np.int64], ids: Ids) -> Ids:
    """Of the blocks of all its files, those that are held."""
    wanted = starts[:-1] + np.frombuffer(held.numbers, "<u4")
    return np.unique(ids[wanted[wanted < starts[1:]]])
