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
    """A read that waits for a slot, or has one."""

    key: bytes
    # Bytes of the read.
    size: int
    # Name of the origin that is read.
    origin: str
    # Done once the read is admitted. Its result: whether it counts as a read ahead.
    admitted: asyncio.Future[bool]


class FetchSlots:
    """Admits a limited number of reads at once, with a limited number of bytes between them.

    A quarter of the slots (at least one, where there are several) is kept from reads ahead, so that a read on demand
    never finds all of them taken by reads ahead. Reads ahead are admitted in the order in which they will be needed. A
    read larger than the whole capacity is admitted when no other one runs.

    Reads of an origin that hangs may hold all slots until their deadline. So that reads of other origins need not wait
    as long, each origin has an eighth of the slots and bytes, at least one read, for reads on demand alone: where no
    slot is free, they are admitted on top of the limits.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        """slots: reads at once; capacity: their bytes."""
        self._slots = slots
        self.ahead_slots = max(1, slots - max(1, slots // 4))  # slots that reads ahead may take
        self.capacity = capacity
        self._demand: OrderedDict[bytes, _Request] = OrderedDict()  # waiting, first come, first served
        self._demand_of: dict[str, OrderedDict[bytes, _Request]] = {}  # the same, by origin
        self._ahead: dict[bytes, _Request] = {}  # waiting, in the order of `_order`
        # (needed, sequence number, key) of reads ahead. Some of them no longer wait, or have become demand.
        self._order: list[tuple[float, int, bytes]] = []
        self._numbers = itertools.count()
        self._ahead_in_use = 0  # slots taken by reads ahead
        self._used: dict[str, tuple[int, int]] = {}  # by origin: slots taken, and bytes
        self.in_use = 0  # slots taken
        self.bytes_in_use = 0  # bytes of the reads that have them

    @property
    def ahead_queued(self) -> int:
        """Reads ahead that wait for a slot."""
        return len(self._ahead)

    @asynccontextmanager
    async def slot(
        self, key: bytes, size: int, *, ahead: bool, needed: float = math.inf, origin: str = ""
    ) -> AsyncIterator["Slot"]:
        """Wait for a slot, and hold it.

        key: names the read to `promote`, and must be unique among those that wait; size: bytes of the read; ahead:
        nobody waits for it yet; needed: loop time at which somebody will; origin: names what is read from.
        """
        slot = Slot(self, key, size, origin)
        await slot.take(ahead=ahead, needed=needed)
        try:
            yield slot
        finally:
            slot.give_back()

    def promote(self, key: bytes) -> None:
        """Somebody waits now for what the read ahead *key* brings."""
        request = self._ahead.pop(key, None)
        if request is not None:
            self._want(request)
            self._admit()

    async def acquire(self, request: _Request, ahead: bool, needed: float) -> bool:
        """For `Slot`. Returns whether it was admitted as a read ahead: it may have been promoted while it waited."""
        if ahead:
            if not self._ahead:
                self._order.clear()
            heapq.heappush(self._order, (needed, next(self._numbers), request.key))
            self._ahead[request.key] = request
        else:
            self._want(request)
        self._admit()
        try:
            await request.admitted
        except asyncio.CancelledError:
            if self._demand.get(request.key) is request:
                self._drop_demand(request)
            if self._ahead.get(request.key) is request:
                del self._ahead[request.key]
            if request.admitted.done() and not request.admitted.cancelled():
                self.release(request, request.admitted.result())
            raise
        return request.admitted.result()

    def release(self, request: _Request, ahead: bool) -> None:
        """For `Slot`."""
        self._count(request, -1, ahead)
        self._admit()

    def _want(self, request: _Request) -> None:
        self._demand[request.key] = request
        self._demand_of.setdefault(request.origin, OrderedDict())[request.key] = request

    def _drop_demand(self, request: _Request) -> None:
        del self._demand[request.key]
        same_origin = self._demand_of[request.origin]
        del same_origin[request.key]
        if not same_origin:
            del self._demand_of[request.origin]

    def _count(self, request: _Request, one: int, ahead: bool) -> None:
        self.in_use += one
        self.bytes_in_use += one * request.size
        self._ahead_in_use += one * ahead
        slots, size = self._used.get(request.origin, (0, 0))
        self._used[request.origin] = slots + one, size + one * request.size
        if not slots + one:
            del self._used[request.origin]

    def _admit(self) -> None:
        # Demand that does not fit yet stops reads ahead too: small ones would otherwise starve it.
        while queue := self._demand or (self._ahead if self._ahead_in_use < self.ahead_slots else None):
            ahead = queue is self._ahead
            request = queue[self._first_ahead() if ahead else next(iter(queue))]
            if not request.admitted.done() and not self._fits(request.size):
                self._admit_reserved()
                return
            if ahead:
                del self._ahead[request.key]
            else:
                self._drop_demand(request)
            self._let_in(request, ahead)

    def _admit_reserved(self) -> None:
        """Admit reads on demand of the origins that have not got what is kept for each."""
        for origin, waiting in list(self._demand_of.items()):
            while waiting:
                request = next(iter(waiting.values()))
                slots, size = self._used.get(origin, (0, 0))
                kept = slots < max(1, self._slots // 8) and size + request.size <= self.capacity // 8
                if slots and not kept:
                    break
                self._drop_demand(request)
                self._let_in(request, ahead=False)

    def _let_in(self, request: _Request, ahead: bool) -> None:
        if not request.admitted.done():  # else it was cancelled, and its task has not run since
            self._count(request, 1, ahead)
            request.admitted.set_result(ahead)

    def _first_ahead(self) -> bytes:
        while (key := self._order[0][2]) not in self._ahead:
            heapq.heappop(self._order)
        return key

    def _fits(self, size: int) -> bool:
        return self.in_use == 0 or (self.in_use < self._slots and self.bytes_in_use + size <= self.capacity)


class Slot:
    """The slot of one read, which may be given back for a while."""

    def __init__(self, slots: FetchSlots, key: bytes, size: int, origin: str) -> None:
        """See FetchSlots.slot."""
        self._slots = slots
        self._read = key, size, origin
        self._held: tuple[_Request, bool] | None = None  # with whether it counts as a read ahead

    async def take(self, *, ahead: bool, needed: float = math.inf) -> None:
        """Wait for it. See FetchSlots.slot."""
        request = _Request(*self._read, asyncio.get_running_loop().create_future())
        self._held = request, await self._slots.acquire(request, ahead, needed)

    def give_back(self) -> None:
        """Let others have it. Does nothing where it is not held."""
        if self._held is not None:
            held, self._held = self._held, None
            self._slots.release(*held)
