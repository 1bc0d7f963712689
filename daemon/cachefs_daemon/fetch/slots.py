"""How many origin reads run at once, and who goes next: those somebody waits for, then those needed soonest."""

import asyncio
import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Waiter:
    size: int
    turn: asyncio.Future[bool]  # result: it goes in as a read ahead


class FetchSlots:
    """Lets in at most *slots* reads with at most *capacity* bytes between them.

    A quarter of the slots (at least one, of several) is kept from reads ahead, so that a demand never waits for a full
    house of them. Reads ahead go in by the time at which they will be needed. A read larger than the whole capacity
    goes in alone.

    ahead_slots: how many reads ahead go in at most.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        self._slots = slots
        self.ahead_slots = max(1, slots - max(1, slots // 4))
        self._capacity = capacity
        self._demand: OrderedDict[bytes, _Waiter] = OrderedDict()
        self._ahead: dict[bytes, _Waiter] = {}
        # (needed, sequence number, key) of those ahead; some have left by another way.
        self._order: list[tuple[float, int, bytes]] = []
        self._numbers = itertools.count()
        self._ahead_inside = 0
        self.inside = 0
        self.bytes_inside = 0

    @property
    def ahead_waiting(self) -> int:
        return len(self._ahead)

    @asynccontextmanager
    async def passage(self, key: bytes, size: int, *, ahead: bool, needed: float = math.inf) -> AsyncIterator[None]:
        """Wait for a turn and hold it. *key* names the waiter to `promote`, and must be unique among waiters; needed:
        loop time at which what is read ahead will be wanted."""
        waiter = _Waiter(size, asyncio.get_running_loop().create_future())
        if ahead:
            if not self._ahead:
                self._order.clear()
            heapq.heappush(self._order, (needed, next(self._numbers), key))
        ahead = await self._enter(key, waiter, ahead)
        try:
            yield
        finally:
            self._leave(size, ahead)

    def promote(self, key: bytes) -> None:
        """Somebody waits for this one now."""
        waiter = self._ahead.pop(key, None)
        if waiter is not None:
            self._demand[key] = waiter
            self._admit()

    async def _enter(self, key: bytes, waiter: _Waiter, ahead: bool) -> bool:
        """Returns whether it went in as a read ahead (it may have been promoted while it waited)."""
        queue = self._ahead if ahead else self._demand
        queue[key] = waiter
        self._admit()
        try:
            await waiter.turn
        except asyncio.CancelledError:
            self._demand.pop(key, None)
            self._ahead.pop(key, None)
            if waiter.turn.done() and not waiter.turn.cancelled():
                self._leave(waiter.size, waiter.turn.result())
            raise
        return waiter.turn.result()

    def _leave(self, size: int, ahead: bool) -> None:
        self.inside -= 1
        self.bytes_inside -= size
        self._ahead_inside -= ahead
        self._admit()

    def _admit(self) -> None:
        # Demand that does not fit yet blocks reads ahead too: small ones would otherwise starve it.
        while queue := self._demand or (self._ahead if self._ahead_inside < self.ahead_slots else None):
            key = next(iter(queue)) if queue is self._demand else self._first_ahead()
            waiter = queue[key]
            if not waiter.turn.done() and not self._fits(waiter.size):
                return
            del queue[key]
            if waiter.turn.done():
                continue  # cancelled, and its task has not run since
            ahead = queue is self._ahead
            self.inside += 1
            self.bytes_inside += waiter.size
            self._ahead_inside += ahead
            waiter.turn.set_result(ahead)

    def _first_ahead(self) -> bytes:
        while (key := self._order[0][2]) not in self._ahead:
            heapq.heappop(self._order)
        return key

    def _fits(self, size: int) -> bool:
        return self.inside == 0 or (self.inside < self._slots and self.bytes_inside + size <= self._capacity)
