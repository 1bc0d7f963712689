"""How many origin reads run at once, and which comes next: first what somebody waits for, then what is needed soonest.

A read asks for a slot, waits until it is admitted, holds the slot while it runs, and gives it back.
"""

import asyncio
import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol


class Server(Protocol):
    """What is read from."""

    @property
    def width(self) -> int:
        """Reads that it takes at once now; at least 1."""


@dataclass(slots=True, eq=False)
class _Request:
    """A read that waits for a slot, or has one."""

    key: bytes
    # Bytes of the read.
    size: int
    # Which of all reads it is, in the order in which they came.
    number: int
    # Done once the read is admitted. Its result: whether it counts as a read ahead.
    admitted: asyncio.Future[bool]
    # Slots that it takes once it is admitted.
    slots: int = 1


class _Lane:
    """The reads from one server."""

    __slots__ = ("ahead", "bytes_in_use", "demand", "in_use", "in_use_ahead", "order", "server")

    def __init__(self, server: Server) -> None:
        self.server = server
        self.demand: OrderedDict[bytes, _Request] = OrderedDict()  # waiting, first come, first served
        self.ahead: dict[bytes, _Request] = {}  # waiting, in the order of `order`
        # (needed, number, key) of reads ahead. Some of them no longer wait, or have become demand.
        self.order: list[tuple[float, int, bytes]] = []
        self.in_use = self.in_use_ahead = 0  # slots taken, and those of them that reads ahead have
        self.bytes_in_use = 0

    @property
    def is_idle(self) -> bool:
        return not (self.in_use or self.bytes_in_use or self.demand or self.ahead)

    @property
    def has_room(self) -> bool:
        """Would the server take one more read?"""
        return self.in_use < self.server.width

    @property
    def has_room_ahead(self) -> bool:
        """Would it take one more, without the room that is kept for demand?"""
        width = self.server.width
        return self.in_use < width and self.in_use_ahead < _part_ahead(width)

    def first_ahead(self) -> tuple[float, int, bytes]:
        """Of those that wait; there is one."""
        while self.order[0][2] not in self.ahead:
            heapq.heappop(self.order)
        return self.order[0]


def _part_ahead(slots: int) -> int:
    """Of so many slots, those that reads ahead may take."""
    return max(1, slots - max(1, slots // 4))


class FetchSlots:
    """Admits a limited number of reads at once, with a limited number of bytes between them.

    A quarter of the slots (at least one, where there are several) is kept from reads ahead, so that a read on demand
    never finds all of them taken by reads ahead. Reads ahead are admitted in the order in which they will be needed. A
    read larger than the whole capacity is admitted when no other one runs.

    A server that takes fewer reads at once than there are slots gets no more than it takes, in the same order and with
    the same quarter. What waits for it holds up nothing else.

    Reads of an origin that hangs may hold all slots until their deadline. So that reads of other origins need not wait
    as long, each server has an eighth of the slots and bytes, at least one read, for reads on demand alone: where no
    slot is free, they are admitted on top of the limits.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        """slots: reads at once; capacity: their bytes."""
        self._slots = slots
        self.ahead_slots = _part_ahead(slots)  # slots that reads ahead may take
        self.capacity = capacity
        self._lanes: dict[Server, _Lane] = {}  # those of which any read waits or runs
        self._numbers = itertools.count()
        self._ahead_in_use = 0  # slots taken by reads ahead
        self.ahead_queued = 0  # reads ahead that wait for a slot
        self.in_use = 0  # slots taken
        self.bytes_in_use = 0  # bytes of the reads that have them

    @asynccontextmanager
    async def slot(
        self, key: bytes, size: int, server: Server, *, ahead: bool, needed: float = math.inf
    ) -> AsyncIterator["Slot"]:
        """Wait for a slot, and hold it.

        key: names the read to `promote`, and must be unique among those that wait; size: bytes of the read; server:
        what is read from; ahead: nobody waits for it yet; needed: loop time at which somebody will.
        """
        slot = Slot(self, key, size, server)
        await slot.take(ahead=ahead, needed=needed)
        try:
            yield slot
        finally:
            slot.give_back()

    def promote(self, key: bytes) -> None:
        """Somebody waits now for what the read ahead *key* brings."""
        for lane in self._lanes.values():
            request = lane.ahead.pop(key, None)
            if request is not None:
                self.ahead_queued -= 1
                lane.demand[key] = request
                self._admit()
                return

    def free(self, server: Server) -> int:
        """Slots that reads of the *server* could have now."""
        lane = self._lanes.get(server)
        return max(0, min(self._slots - self.in_use, server.width - (lane.in_use if lane is not None else 0)))

    def take_along(self, key: bytes, server: Server) -> bool:
        """Admit the read *key* in the slot of another read of the *server*, which brings its bytes too. False where it
        does not wait, or where its bytes are too many."""
        lane = self._lanes.get(server)
        if lane is None:
            return False
        ahead = key in lane.ahead
        queue = lane.ahead if ahead else lane.demand
        request = queue.get(key)
        if request is None or request.admitted.done() or self.bytes_in_use + request.size > self.capacity:
            return False
        del queue[key]
        self.ahead_queued -= ahead
        request.slots = 0
        self._let_in(request, lane, ahead=ahead)
        return True

    async def acquire(self, request: _Request, lane: _Lane, ahead: bool, needed: float) -> bool:
        """For `Slot`. Returns whether it was admitted as a read ahead: it may have been promoted while it waited."""
        if ahead:
            if not lane.ahead:
                lane.order.clear()
            heapq.heappush(lane.order, (needed, request.number, request.key))
            lane.ahead[request.key] = request
            self.ahead_queued += 1
        else:
            lane.demand[request.key] = request
        self._admit()
        try:
            return await request.admitted
        except asyncio.CancelledError:
            if lane.demand.get(request.key) is request:
                del lane.demand[request.key]
            if lane.ahead.get(request.key) is request:
                del lane.ahead[request.key]
                self.ahead_queued -= 1
            if request.admitted.done() and not request.admitted.cancelled():
                self.release(request, lane, request.admitted.result())
            self._forget(lane)
            raise

    def release(self, request: _Request, lane: _Lane, ahead: bool) -> None:
        """For `Slot`."""
        self._count(request, lane, -1, ahead)
        self._forget(lane)
        self._admit()

    def request(self, key: bytes, size: int) -> _Request:
        """For `Slot`."""
        return _Request(key, size, next(self._numbers), asyncio.get_running_loop().create_future())

    def lane(self, server: Server) -> _Lane:
        """For `Slot`."""
        found = self._lanes.get(server)
        if found is None:
            found = self._lanes[server] = _Lane(server)
        return found

    def _forget(self, lane: _Lane) -> None:
        if lane.is_idle:
            self._lanes.pop(lane.server, None)

    def _count(self, request: _Request, lane: _Lane, one: int, ahead: bool) -> None:
        slots, size = one * request.slots, one * request.size
        self.in_use += slots
        lane.in_use += slots
        self.bytes_in_use += size
        lane.bytes_in_use += size
        if ahead:
            self._ahead_in_use += slots
            lane.in_use_ahead += slots

    def _admit(self) -> None:
        while lane := self._next_demand():
            request = next(iter(lane.demand.values()))
            if not request.admitted.done() and not self._fits(request.size):
                # Demand that does not fit yet stops reads ahead too: small ones would otherwise starve it.
                self._admit_reserved()
                return
            del lane.demand[request.key]
            self._let_in(request, lane, ahead=False)
        while self._ahead_in_use < self.ahead_slots and (lane := self._next_ahead()):
            key = lane.first_ahead()[2]
            request = lane.ahead[key]
            if not request.admitted.done() and not self._fits(request.size):
                return
            del lane.ahead[key]
            self.ahead_queued -= 1
            self._let_in(request, lane, ahead=True)

    def _next_demand(self) -> _Lane | None:
        """Where the next read on demand waits that its server would take."""
        lanes = [lane for lane in self._lanes.values() if lane.demand and lane.has_room]
        return min(lanes, key=_first_demand) if len(lanes) > 1 else lanes[0] if lanes else None

    def _next_ahead(self) -> _Lane | None:
        """Where the next read ahead waits that its server would take."""
        lanes = [lane for lane in self._lanes.values() if lane.ahead and lane.has_room_ahead]
        return min(lanes, key=_Lane.first_ahead) if len(lanes) > 1 else lanes[0] if lanes else None

    def _admit_reserved(self) -> None:
        """Admit reads on demand of the servers that have not got what is kept for each."""
        for lane in self._lanes.values():
            for request in self._within_reserve(lane):
                del lane.demand[request.key]
                self._let_in(request, lane, ahead=False)

    def _within_reserve(self, lane: _Lane) -> Iterator[_Request]:
        while lane.demand and lane.has_room:
            request = next(iter(lane.demand.values()))
            size = lane.bytes_in_use + request.size
            if lane.in_use and not (lane.in_use < max(1, self._slots // 8) and size <= self.capacity // 8):
                return
            yield request

    def _let_in(self, request: _Request, lane: _Lane, *, ahead: bool) -> None:
        if not request.admitted.done():  # else it was cancelled, and its task has not run since
            self._count(request, lane, 1, ahead)
            request.admitted.set_result(ahead)

    def _fits(self, size: int) -> bool:
        return self.in_use == 0 or (self.in_use < self._slots and self.bytes_in_use + size <= self.capacity)


def _first_demand(lane: _Lane) -> int:
    return next(iter(lane.demand.values())).number


class Slot:
    """The slot of one read, which may be given back for a while."""

    def __init__(self, slots: FetchSlots, key: bytes, size: int, server: Server) -> None:
        """See FetchSlots.slot."""
        self._slots = slots
        self._read = key, size
        self._server = server
        self._held: tuple[_Request, _Lane, bool] | None = None  # with whether it counts as a read ahead

    async def take(self, *, ahead: bool, needed: float = math.inf) -> None:
        """Wait for it. See FetchSlots.slot."""
        request, lane = self._slots.request(*self._read), self._slots.lane(self._server)
        self._held = request, lane, await self._slots.acquire(request, lane, ahead, needed)

    def hand_over(self) -> "Slot":
        """Another one that counts as a slot in place of this one, which keeps its bytes. Both are to be given back."""
        assert self._held is not None
        request, lane, ahead = self._held
        other = Slot(self._slots, request.key, 0, self._server)
        counted = self._slots.request(request.key, 0)
        counted.slots, request.slots = request.slots, 0
        other._held = counted, lane, ahead
        return other

    def give_back(self) -> None:
        """Let others have it. Does nothing where it is not held."""
        if self._held is not None:
            held, self._held = self._held, None
            self._slots.release(*held)
