"""Limits concurrent origin reads, and decides which read is admitted next.

Reads on demand (a reader waits) come first, in turns between askers, so that no asker waits behind thousands of reads
of another. Reads ahead follow in the order of the time at which they are needed. A read asks for a slot, waits until it
is admitted, holds the slot while it runs, and gives it back.
"""

import asyncio
import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import TracebackType
from typing import Final, Protocol

from cachefs.planning.requests.ahead_bytes import LEAST

# Stale queue entries, turns and idle servers that are kept before they are cleaned up.
_FEW: Final = 256
# While a read on demand waits or runs, reads ahead from its server may have this fraction of their usual bytes. That is
# still twice what keeps the link busy, so AheadBytes notices where the link takes more.
_BESIDE_DEMAND: Final = 2
# Seconds after a read on demand during which its server still counts as waited for: a worker reads its next block while
# its first one is decoded.
_MOMENT: Final = 0.25

# Id of the asker on whose behalf the current code requests slots. Tasks inherit it, so no call has to pass it on.
ASKER: Final = ContextVar("ASKER", default=0)


class Server(Protocol):
    """A server that blocks are read from, with its current limits."""

    @property
    def width(self) -> int:
        """Reads that the server takes at once now; at least 1."""

    @property
    def ahead_bytes(self) -> float:
        """Bytes that reads ahead may have in flight to the server. A single read may be larger."""


class _Queue:
    """Priority queue of waiting reads, by rank; first come, first served within one rank."""

    __slots__ = ("by_key", "order")

    def __init__(self) -> None:
        self.by_key: dict[bytes, Slot] = {}
        # Heap of (rank, number, key). Entries whose read no longer waits are skipped lazily.
        self.order: list[tuple[float, int, bytes]] = []

    def add(self, request: "Slot") -> None:
        if not self.by_key:
            self.order.clear()
        elif len(self.order) > 2 * len(self.by_key) + _FEW:
            # Stale entries behind live ones would otherwise stay for ever.
            self.order = [(one.rank, one.number, key) for key, one in self.by_key.items()]
            heapq.heapify(self.order)
        heapq.heappush(self.order, (request.rank, request.number, request.key))
        self.by_key[request.key] = request

    def first(self) -> "Slot":
        """Return the waiting read with the lowest rank. The queue must not be empty."""
        while True:
            _, number, key = self.order[0]
            request = self.by_key.get(key)
            if request is not None and request.number == number:
                return request
            heapq.heappop(self.order)


class _Lane:
    """Queues and counts of the reads from one server."""

    __slots__ = ("ahead", "bytes_ahead", "bytes_in_use", "demand", "in_use", "in_use_ahead", "server", "waited")

    def __init__(self, server: Server, waited: float) -> None:
        self.server = server
        self.waited = waited  # monotonic time at which the last read on demand ended
        self.demand = _Queue()  # ordered by turns
        self.ahead = _Queue()  # ordered by the time at which the block is needed
        self.in_use = self.in_use_ahead = 0  # slots taken, in all and by reads ahead
        self.bytes_in_use = self.bytes_ahead = 0  # bytes of reads with slots, in all and of reads ahead

    @property
    def is_idle(self) -> bool:
        return not (self.in_use or self.bytes_in_use or self.demand.by_key or self.ahead.by_key)

    def queue_of(self, request: "Slot") -> _Queue:
        return self.ahead if request.ahead else self.demand

    @property
    def has_room(self) -> bool:
        """Whether the server would take one more read."""
        return self.in_use < self.server.width

    def has_room_ahead(self, size: int) -> bool:
        """Return whether the server would take one more read ahead of *size* bytes, outside of the slots reserved for
        demand.

        While a read on demand waits or runs, reads ahead get fewer bytes, as they would take the link from it. They
        always get LEAST bytes, the start value for an unknown link, since the read on demand may hang.
        """
        width = self.server.width
        if self.in_use >= width or self.in_use_ahead >= _part_ahead(width):
            return False
        most = self.server.ahead_bytes
        if most > LEAST and self.is_waited_for:
            most = max(LEAST, most / _BESIDE_DEMAND)
        return self.bytes_ahead == 0 or self.bytes_ahead + size <= most

    @property
    def is_waited_for(self) -> bool:
        """Whether a reader waits for a read from this server, or did within the last _MOMENT."""
        # A read whose bytes come with another read's request holds bytes but no slot.
        if self.in_use > self.in_use_ahead or self.bytes_in_use > self.bytes_ahead or self.demand.by_key:
            return True
        return time.monotonic() < self.waited + _MOMENT


def _part_ahead(slots: int) -> int:
    """Return how many of *slots* reads ahead may take."""
    return max(1, slots - max(1, slots // 4))


class FetchSlots:
    """Admits a limited number of reads at once, with a limited number of bytes between them.

    A quarter of the slots (at least one, where there are several) is reserved for reads on demand, so that reads ahead
    never take all slots. Reads ahead are admitted in the order in which they are needed; reads on demand in turns, one
    read of each asker per round. A read larger than the whole capacity is admitted when no other read runs.

    A server whose width is below the number of slots gets no more reads than its width, in the same order and with the
    same reserved quarter. Reads that wait for one server do not block reads from others. Reads ahead have no more bytes
    in flight than keep the server's link busy: with more, blocks needed first would arrive as late as those needed
    last.

    Reads from an origin that hangs may hold all slots until their deadline. So that reads from other origins need not
    wait as long, each server has a reserve for reads on demand: an eighth of the slots and bytes, at least one read,
    admitted on top of the limits when no slot is free.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        """slots: reads at once; capacity: their total bytes."""
        self._slots = slots
        self.ahead_slots = _part_ahead(slots)  # slots that reads ahead may take
        self.capacity = capacity
        self._lanes: dict[Server, _Lane] = {}  # servers with reads that wait or run
        self._numbers = itertools.count()
        self._demand_queued = 0  # reads on demand that wait for a slot
        self._turn = 0.0  # rank of the last read on demand that was admitted from the queue
        self._turns: dict[int, float] = {}  # by asker: rank of its next read on demand
        self._most_turns = _FEW  # size of _turns at which askers without waiting reads are dropped
        self.ahead_queued = 0  # reads ahead that wait for a slot
        self._ahead_in_use = 0  # slots held by reads ahead
        self.in_use = 0  # slots held
        self.bytes_in_use = 0  # bytes of the reads that hold slots
        self._bytes_on_demand = 0  # bytes of the reads that were admitted as reads on demand
        # By server without a lane: monotonic time at which its last read on demand ended.
        self._waited: dict[Server, float] = {}
        self._timer: asyncio.TimerHandle | None = None  # admits reads ahead again after _MOMENT

    @property
    def most_planned(self) -> int:
        """Limit on planned reads ahead that are here at once: those with slots, and half as many waiting, so that no
        slot is idle until the planner runs again."""
        return self.ahead_slots + self.ahead_slots // 2

    def slot(self, key: bytes, size: int, server: Server, *, ahead: bool, needed: float = math.inf) -> "Slot":
        """Return a slot: an async context manager that waits for admission and holds the slot.

        key: identifies the read to `promote`; unique among waiting reads. size: bytes of the read. server: the server
        it reads from. ahead: no reader waits for it yet. needed: loop time at which a reader will.
        """
        return Slot(self, key, size, server, ahead, needed)

    @property
    def count(self) -> int:
        """Limit on concurrent reads."""
        return self._slots

    @property
    def is_waited_for(self) -> bool:
        """Whether a reader waits for a slot, or for a read that was admitted as a read on demand.

        A read ahead that a reader began to wait for only after its admission does not count, and does not hold back
        other reads ahead: it shows that reads ahead come too late. (Three copies of 100 small files each, on a busy
        machine: 42 reads waited; 56 when it counted.)
        """
        return self._demand_queued > 0 or self._bytes_on_demand > 0

    def waiting(self, server: Server) -> tuple[int, int]:
        """Return how many reads from the *server* wait for a slot, and how many hold one."""
        lane = self._lanes.get(server)
        return (len(lane.demand.by_key) + len(lane.ahead.by_key), lane.in_use) if lane is not None else (0, 0)

    def is_idle(self, server: Server) -> bool:
        """Return whether no read waits for the *server*, and more slots are free for its reads than they hold."""
        waiting, running = self.waiting(server)
        return not waiting and self.free(server) > running

    def free(self, server: Server) -> int:
        """Return how many slots reads from the *server* could take now."""
        lane = self._lanes.get(server)
        return max(0, min(self._slots - self.in_use, server.width - (lane.in_use if lane is not None else 0)))

    def promote(self, key: bytes) -> None:
        """Raise the priority of the waiting read *key*: the current asker now waits for it. It was queued ahead, or by
        another asker."""
        for lane in self._lanes.values():
            request = lane.ahead.by_key.get(key)
            if request is None and (request := lane.demand.by_key.get(key)) and not self._is_sooner(request):
                return
            if request is not None:
                self._drop(request, lane)
                request.ahead, request.asker = False, ASKER.get()
                self._queue(request, lane)
                self._admit()
                return

    def want(self, request: "Slot") -> None:
        """For `Slot`: count a running read ahead as a read on demand."""
        lane = self._lanes[request.server]
        self._count(request, lane, -1)
        request.ahead = False
        self._count(request, lane, 1)
        self._admit()

    def take_along(self, key: bytes, server: Server) -> bool:
        """Admit the waiting read *key* without a slot of its own: another read of the *server* brings its bytes too.
        Returns False if it does not wait, or if its bytes exceed the capacity."""
        lane = self._lanes.get(server)
        request = (lane.ahead.by_key.get(key) or lane.demand.by_key.get(key)) if lane is not None else None
        if lane is None or request is None or self.bytes_in_use + request.size > self.capacity:
            return False
        self._drop(request, lane)
        request.slots = 0
        self._let_in(request, lane)
        return True

    def ask(self, request: "Slot", admitted: Callable[[], None]) -> bool:
        """For `Slot`: return True if admitted at once; otherwise *admitted* is called upon admission."""
        lane = self._lanes.get(request.server)
        if lane is None:
            lane = self._lanes[request.server] = _Lane(request.server, self._waited.pop(request.server, -math.inf))
        request.slots = 1
        if self._is_next(request, lane):
            self._let_in(request, lane)
            return True
        request.admitted = admitted
        self._queue(request, lane)
        self._admit()
        return False

    def leave(self, request: "Slot") -> None:
        """For `Slot`: remove the read from its queue."""
        lane = self._lanes.get(request.server)
        if lane is not None and lane.queue_of(request).by_key.get(request.key) is request:
            self._drop(request, lane)
            self._forget(lane)

    def release(self, request: "Slot") -> None:
        """For `Slot`: return a held slot."""
        lane = self._lanes[request.server]
        self._count(request, lane, -1)
        if request.on_demand:
            self._bytes_on_demand -= request.size
            request.on_demand = False
        if not request.ahead:
            lane.waited = time.monotonic()
        if self._demand_queued or self.ahead_queued:
            self._admit()
        if not request.ahead and lane.ahead.by_key and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_MOMENT, self._after_moment)
        self._forget(lane)

    def _after_moment(self) -> None:
        self._timer = None
        self._admit()

    def _is_next(self, request: "Slot", lane: _Lane) -> bool:
        """Return whether the request fits and no waiting read goes before it."""
        if self._demand_queued or not lane.has_room:
            return False
        if request.ahead and (
            self.ahead_queued or self._ahead_in_use >= self.ahead_slots or not lane.has_room_ahead(request.size)
        ):
            return False
        return self._fits(request.size)

    def _queue(self, request: "Slot", lane: _Lane) -> None:
        queue = lane.queue_of(request)
        # A cancelled read of the same key may still be queued: it waits for its end, and not for a slot.
        is_new = request.key not in queue.by_key
        request.number = next(self._numbers)
        if request.ahead:
            self.ahead_queued += is_new
            request.rank = request.needed
        else:
            request.rank = self._next_turn(request.asker)
            self._demand_queued += is_new
        queue.add(request)

    def _next_turn(self, asker: int) -> float:
        if not self._demand_queued:
            self._turns.clear()
        elif len(self._turns) > self._most_turns:
            waiting = {one.asker for lane in self._lanes.values() for one in lane.demand.by_key.values()}
            self._turns = {one: turn for one, turn in self._turns.items() if one in waiting}
            self._most_turns = 2 * len(self._turns) + _FEW
        turn = max(self._turn, self._turns.get(asker, 0.0))
        self._turns[asker] = turn + 1
        return turn

    def _is_sooner(self, request: "Slot") -> bool:
        """Return whether a waiting read on demand would be admitted sooner on behalf of the current asker."""
        return max(self._turn, self._turns.get(ASKER.get(), 0.0)) < request.rank

    def _drop(self, request: "Slot", lane: _Lane) -> None:
        del lane.queue_of(request).by_key[request.key]
        if request.ahead:
            self.ahead_queued -= 1
        else:
            self._demand_queued -= 1

    def _forget(self, lane: _Lane) -> None:
        if lane.is_idle and self._lanes.pop(lane.server, None) is not None:
            self._waited[lane.server] = lane.waited
            if len(self._waited) > _FEW:
                del self._waited[next(iter(self._waited))]

    def _count(self, request: "Slot", lane: _Lane, one: int) -> None:
        slots, size = one * request.slots, one * request.size
        self.in_use += slots
        lane.in_use += slots
        self.bytes_in_use += size
        lane.bytes_in_use += size
        if request.ahead:
            self._ahead_in_use += slots
            lane.in_use_ahead += slots
            lane.bytes_ahead += size

    def _admit(self) -> None:
        while self._demand_queued and (lane := self._next_demand()):
            request = lane.demand.first()
            if not self._fits(request.size):
                # Demand that does not fit yet also stops reads ahead: small ones would otherwise starve it.
                self._admit_reserved()
                return
            self._turn = max(self._turn, request.rank)
            self._drop(request, lane)
            self._let_in(request, lane)
        while self.ahead_queued and self._ahead_in_use < self.ahead_slots and (lane := self._next_ahead()):
            request = lane.ahead.first()
            if not self._fits(request.size):
                return
            self._drop(request, lane)
            self._let_in(request, lane)

    def _next_demand(self) -> _Lane | None:
        lanes = [lane for lane in self._lanes.values() if lane.demand.by_key and lane.has_room]
        return min(lanes, key=_first_demand) if len(lanes) > 1 else lanes[0] if lanes else None

    def _next_ahead(self) -> _Lane | None:
        lanes = [
            lane for lane in self._lanes.values() if lane.ahead.by_key and lane.has_room_ahead(lane.ahead.first().size)
        ]
        return min(lanes, key=_first_ahead) if len(lanes) > 1 else lanes[0] if lanes else None

    def _admit_reserved(self) -> None:
        """Admit reads on demand of servers whose reserve is not used up."""
        for lane in self._lanes.values():
            for request in self._within_reserve(lane):
                self._drop(request, lane)
                self._let_in(request, lane)

    def _within_reserve(self, lane: _Lane) -> "Iterator[Slot]":
        while lane.demand.by_key and lane.has_room:
            request = lane.demand.first()
            size = lane.bytes_in_use + request.size
            if lane.in_use and not (lane.in_use < max(1, self._slots // 8) and size <= self.capacity // 8):
                return
            yield request

    def _let_in(self, request: "Slot", lane: _Lane) -> None:
        self._count(request, lane, 1)
        request.held, request.on_demand = True, not request.ahead
        if request.on_demand:
            self._bytes_on_demand += request.size
        admitted, request.admitted = request.admitted, None
        if admitted is not None:
            admitted()

    def _fits(self, size: int) -> bool:
        return self.in_use == 0 or (self.in_use < self._slots and self.bytes_in_use + size <= self.capacity)


def _first_demand(lane: _Lane) -> tuple[float, int]:
    first = lane.demand.first()
    return first.rank, first.number


def _first_ahead(lane: _Lane) -> tuple[float, int]:
    first = lane.ahead.first()
    return first.rank, first.number


class Slot:
    """A permit for one read: waited for, held, or given back for a while."""

    __slots__ = (
        "_slots", "admitted", "ahead", "asker", "held", "key", "needed", "number", "on_demand", "rank", "server",
        "size", "slots",
    )  # fmt: skip

    def __init__(self, slots: FetchSlots, key: bytes, size: int, server: Server, ahead: bool, needed: float) -> None:
        self.key = key
        self.size = size
        self.server = server
        self.ahead = ahead  # waits, or was admitted, as a read ahead, and no reader has come to wait for it since
        self.needed = needed
        self.held = False
        self.on_demand = False  # held, and admitted as a read on demand
        self.asker = ASKER.get()
        self.rank = 0.0  # lowest goes first among waiting reads
        self.number = 0  # sequence number among reads that had to wait
        self.slots = 1  # slots it takes: 0 if its bytes come with another read
        self.admitted: Callable[[], None] | None = None  # called upon admission, set while waiting
        self._slots = slots

    def ask(self, admitted: Callable[[], None]) -> bool:
        """Return True if the slot is held from now on; otherwise *admitted* is called upon admission."""
        return self._slots.ask(self, admitted)

    async def take(self, *, ahead: bool, needed: float = math.inf) -> None:
        """Wait for the slot. See FetchSlots.slot."""
        self.ahead, self.needed = ahead, needed
        await self._wait()

    async def _wait(self) -> None:
        come: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def admitted() -> None:
            if not come.done():  # otherwise cancelled, and about to leave
                come.set_result(None)

        if self.ask(admitted):
            return
        try:
            await come
        except asyncio.CancelledError:
            self.leave()
            raise

    def promote(self) -> None:
        """Raise the priority of the waiting read: a reader waits for its block now."""
        self._slots.promote(self.key)

    def want(self) -> None:
        """Count a held slot as a read on demand: a reader waits for its block now."""
        if self.held and self.ahead:
            self._slots.want(self)

    def leave(self) -> None:
        """Give the slot back, or stop waiting for it."""
        self._slots.leave(self)
        self.give_back()

    def hand_over(self) -> "Slot":
        """Return a second Slot that takes over the slot, while this one keeps its bytes. Both must be given back."""
        other = Slot(self._slots, self.key, 0, self.server, self.ahead, self.needed)
        other.held, other.asker, other.slots, self.slots = self.held, self.asker, self.slots, 0
        return other

    def give_back(self) -> None:
        """Release the slot. Does nothing if it is not held."""
        if self.held:
            self.held = False
            self._slots.release(self)

    async def __aenter__(self) -> "Slot":
        await self._wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.give_back()
