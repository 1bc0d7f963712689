"""How many origin reads run at once, and which comes next: first what somebody waits for, then what is needed soonest.

A read asks for a slot, waits until it is admitted, holds the slot while it runs, and gives it back.
"""

import asyncio
import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Request:
    """A read that waits for a slot."""

    size: int
    # Done once the read is admitted. Its result: whether it counts as a read ahead.
    admitted: asyncio.Future[bool]


class FetchSlots:
    """Admits a limited number of reads at once, with a limited number of bytes between them.

    A quarter of the slots (at least one, where there are several) is kept from reads ahead, so that a read on demand
    never finds all of them taken by reads ahead. Reads ahead are admitted in the order in which they will be needed. A
    read larger than the whole capacity is admitted when no other one runs.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        """slots: reads at once; capacity: their bytes."""
        self._slots = slots
        self.ahead_slots = max(1, slots - max(1, slots // 4))  # slots that reads ahead may take
        self.capacity = capacity
        self._demand: OrderedDict[bytes, _Request] = OrderedDict()  # waiting, first come, first served
        self._ahead: dict[bytes, _Request] = {}  # waiting, in the order of `_order`
        # (needed, sequence number, key) of reads ahead. Some of them no longer wait, or have become demand.
        self._order: list[tuple[float, int, bytes]] = []
        self._numbers = itertools.count()
        self._ahead_in_use = 0  # slots taken by reads ahead
        self.in_use = 0  # slots taken
        self.bytes_in_use = 0  # bytes of the reads that have them

    @property
    def ahead_queued(self) -> int:
        """Reads ahead that wait for a slot."""
        return len(self._ahead)

    @asynccontextmanager
    async def slot(self, key: bytes, size: int, *, ahead: bool, needed: float = math.inf) -> AsyncIterator[None]:
        """Wait for a slot, and hold it.

        key: names the read to `promote`, and must be unique among those that wait; size: bytes of the read; ahead:
        nobody waits for it yet; needed: loop time at which somebody will.
        """
        request = _Request(size, asyncio.get_running_loop().create_future())
        if ahead:
            if not self._ahead:
                self._order.clear()
            heapq.heappush(self._order, (needed, next(self._numbers), key))
        ahead = await self._acquire(key, request, ahead)
        try:
            yield
        finally:
            self._release(size, ahead)

    def promote(self, key: bytes) -> None:
        """Somebody waits now for what the read ahead *key* brings."""
        request = self._ahead.pop(key, None)
        if request is not None:
            self._demand[key] = request
            self._admit()

    async def _acquire(self, key: bytes, request: _Request, ahead: bool) -> bool:
        """Returns whether it was admitted as a read ahead: it may have been promoted while it waited."""
        queue = self._ahead if ahead else self._demand
        queue[key] = request
        self._admit()
        try:
            await request.admitted
        except asyncio.CancelledError:
            self._demand.pop(key, None)
            self._ahead.pop(key, None)
            if request.admitted.done() and not request.admitted.cancelled():
                self._release(request.size, request.admitted.result())
            raise
        return request.admitted.result()

    def _release(self, size: int, ahead: bool) -> None:
        self.in_use -= 1
        self.bytes_in_use -= size
        self._ahead_in_use -= ahead
        self._admit()

    def _admit(self) -> None:
        # Demand that does not fit yet stops reads ahead too: small ones would otherwise starve it.
        while queue := self._demand or (self._ahead if self._ahead_in_use < self.ahead_slots else None):
            key = next(iter(queue)) if queue is self._demand else self._first_ahead()
            request = queue[key]
            if not request.admitted.done() and not self._fits(request.size):
                return
            del queue[key]
            if request.admitted.done():
                continue  # cancelled, and its task has not run since
            ahead = queue is self._ahead
            self.in_use += 1
            self.bytes_in_use += request.size
            self._ahead_in_use += ahead
            request.admitted.set_result(ahead)

    def _first_ahead(self) -> bytes:
        while (key := self._order[0][2]) not in self._ahead:
            heapq.heappop(self._order)
        return key

    def _fits(self, size: int) -> bool:
        return self.in_use == 0 or (self.in_use < self._slots and self.bytes_in_use + size <= self.capacity)
