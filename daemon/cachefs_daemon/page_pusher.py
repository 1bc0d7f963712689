"""Orders for one mount's pusher: which pages to store ahead of readers, and which to drop behind them.

Soonest first into room that is free. Once the budget is full, what is read last gives way to what is read sooner. What
is dropped makes room only when the pusher says that it is gone, so that the pages never exceed the budget; a little is
kept free for orders not to wait for that.
"""

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.push_messages import HeldPages, PushDone, PushOrder, PushSubscribe
from cachefs_daemon.block_space import Ids
from cachefs_daemon.page_cache import HELD, Blocks, PageCache
from cachefs_daemon.push_lookahead import PushLookahead, Reader
from cachefs_daemon.store import BlockStore

# What a pusher is given at once: enough to be busy while a report travels, little enough to change one's mind.
MAX_ORDERS: Final = 4
MAX_BYTES: Final = 32 << 20
# Of one order: of 110 KB each, the pusher works on the next while the last is reported.
BLOCKS: Final = 96
# Of the budget, what is kept free.
_FREE_SHIFT: Final = 4
STEP_SECONDS: Final = 0.05
LOOK_AGAIN: Final = 0.2
ALIVE_SECONDS: Final = 10.0
# Blocks that could not be pushed are not tried again at once.
REFUSED_SECONDS: Final = 2.0
# How fast the time that an order takes is learnt.
_LEARN: Final = 0.2

Readers = Callable[[float], Sequence[Reader]]
Shows = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class _Order:
    blocks: Blocks
    size: int
    drop: bool
    given: float


class PagePusher:
    """mount: id in its reports; pages: the model of its page cache; counters: the pusher's own, cumulative."""

    def __init__(self, request: PushSubscribe, store: BlockStore, readers: Readers, shows: Shows) -> None:
        """readers: those there are on the node, told how many seconds an order takes; shows: does the mount show that
        snapshot?"""
        self.mount = request.mount
        self.pages = PageCache(store.plan, request.budget, shows)
        self.counters: dict[str, int] = {}
        self._store = store
        self._plan = store.plan
        self._readers = readers
        self._shows = shows
        self._lookahead = PushLookahead(store.plan)
        self._held = {held.snapshot: held for held in request.held}
        self._orders: dict[int, _Order] = {}
        self._serials = itertools.count(1)
        self._retried = self._looked = -math.inf
        self._latency = 0.0
        self._news = asyncio.Event()

    async def orders(self) -> AsyncGenerator[PushOrder, None]:
        """As long as the pusher listens."""
        now = asyncio.get_running_loop().time
        said = now()
        while True:
            self._news.clear()
            for order in self._next_orders(now()):
                said = now()
                yield order
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
        self.counters = report.counters
        now = asyncio.get_running_loop().time()
        for done in report.done:
            order = self._orders.pop(done.serial, None)
            if order is None:
                continue
            if order.drop:
                self.pages.went(order.blocks)
                continue
            self._latency += _LEARN * (now - order.given - self._latency)
            self.pages.came(order.blocks, failed=order.blocks.ids[np.frombuffer(done.failed, "<u4")])
        self._news.set()

    # --- what to do next ----------------------------------------------------------------------------------------------

    def _next_orders(self, now: float) -> Iterator[PushOrder]:
        self._look(now)
        if self._is_busy():
            return
        readers = [reader for reader in self._readers(self._latency) if self._shows(reader.snapshot)]
        for blocks in self._to_drop(readers, now):
            yield self._order(blocks, now, drop=True)
        while not self._is_busy():
            # Half of what is kept free is for pages that readers bring, and that are reported later.
            free = self.pages.free - (self.pages.budget >> (_FREE_SHIFT + 1))
            room = min(free, MAX_BYTES - self._bytes_ordered())
            states, residents = self.pages.states, self._store.residents
            due = self._lookahead.take(readers, states, residents, BLOCKS, room) if room > 0 else None
            if due is None:
                return
            yield self._order(Blocks(due.snapshot, due.ids), now, drop=False)

    def _look(self, now: float) -> None:
        """Follow the plan, and what has changed on the node."""
        for space in self.pages.follow_plan():
            held = self._held.pop(space.snapshot, None)
            if held is not None:
                starts, ids = space.blocks_of(np.frombuffer(held.entries, "<u8").astype(np.int64))
                self.pages.there(Blocks(space.snapshot, _numbered(held, starts, ids)))
        if now - self._retried > REFUSED_SECONDS:
            self._retried = now
            self.pages.retry()
        if now - self._looked > LOOK_AGAIN:
            self._looked = now
            self._lookahead.rewind()

    def _to_drop(self, readers: Sequence[Reader], now: float) -> Iterator[Blocks]:
        states = self.pages.states
        self._lookahead.barred = self._lookahead.wires(readers)
        for snapshot, wires in self._lookahead.barred.items():
            held = wires[states[snapshot][wires] == HELD] if snapshot in states else wires[:0]
            if len(held):
                yield Blocks(snapshot, held)
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
        due = self._lookahead.peek(readers, states, self._store.residents, BLOCKS)
        if due is not None:
            yield from pages.victims(wanted, float(due.seconds[0]), BLOCKS, now)

    def _is_busy(self) -> bool:
        return len(self._orders) >= MAX_ORDERS or self._bytes_ordered() >= MAX_BYTES

    def _bytes_ordered(self) -> int:
        return sum(order.size for order in self._orders.values() if not order.drop)

    def _order(self, blocks: Blocks, now: float, *, drop: bool) -> PushOrder:
        if drop:
            self.pages.going_now(blocks)
        else:
            self.pages.coming(blocks)
        space = self.pages.spaces[blocks.snapshot]
        entries, numbers = space.refs(blocks.ids)
        serial = next(self._serials)
        size = int(space.sizes[blocks.ids].sum(dtype=np.int64))
        self._orders[serial] = _Order(blocks, size, drop, now)
        packed = entries.astype("<u8").tobytes(), numbers.astype("<u4").tobytes()
        return PushOrder(serial=serial, snapshot=blocks.snapshot, entries=packed[0], numbers=packed[1], drop=drop)


def _numbered(held: HeldPages, starts: npt.NDArray[np.int64], ids: Ids) -> Ids:
    """Of the blocks of all its files, those that are held."""
    wanted = starts[:-1] + np.frombuffer(held.numbers, "<u4")
    return np.unique(ids[wanted[wanted < starts[1:]]])
