"""How many origin reads run at once, and which comes next: first what somebody waits for, then what is needed soonest.
Those who wait take turns, so that nobody waits until thousands of reads of another one are done.

A read asks for a slot, waits until it is admitted, holds the slot while it runs, and gives it back.
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

# Reads that no longer wait, and are remembered all the same; and those who have waited.
_FEW: Final = 256
# While somebody waits, reads ahead of one server have this part of the bytes that they may otherwise have. It is still
# twice what keeps the link busy, so that it is noticed where the link takes more (see AheadBytes).
_BESIDE_DEMAND: Final = 2
# Who has just waited waits again: a worker reads its next block while its first one is decoded.
_MOMENT: Final = 0.25

# On whose behalf the code runs that asks for slots. Tasks inherit it, so nobody on the way to here need pass it on.
ASKER: Final = ContextVar("ASKER", default=0)


class Server(Protocol):
    """What is read from."""

    @property
    def width(self) -> int:
        """Reads that it takes at once now; at least 1."""

    @property
    def ahead_bytes(self) -> float:
        """Bytes that reads ahead may have under way there; one read may be larger where there is no other."""


class _Queue:
    """Reads that wait, in the order of their ranks; those of one rank as they came."""

    __slots__ = ("by_key", "order")

    def __init__(self) -> None:
        self.by_key: dict[bytes, Slot] = {}
        # (rank, number, key). Some of them no longer wait here.
        self.order: list[tuple[float, int, bytes]] = []

    def add(self, request: "Slot") -> None:
        if not self.by_key:
            self.order.clear()
        elif len(self.order) > 2 * len(self.by_key) + _FEW:
            # Of those that no longer wait, the ones behind others that do would stay for ever.
            self.order = [(one.rank, one.number, key) for key, one in self.by_key.items()]
            heapq.heapify(self.order)
        heapq.heappush(self.order, (request.rank, request.number, request.key))
        self.by_key[request.key] = request

    def first(self) -> "Slot":
        """Of those that wait; there is one."""
        while True:
            _, number, key = self.order[0]
            request = self.by_key.get(key)
            if request is not None and request.number == number:
                return request
            heapq.heappop(self.order)


class _Lane:
    """The reads from one server."""

    __slots__ = ("ahead", "bytes_ahead", "bytes_in_use", "demand", "in_use", "in_use_ahead", "server", "waited")

    def __init__(self, server: Server, waited: float) -> None:
        self.server = server
        self.waited = waited  # when a read on demand ended last, in monotonic seconds
        self.demand = _Queue()  # by turns
        self.ahead = _Queue()  # what is needed soonest first
        self.in_use = self.in_use_ahead = 0  # slots taken, and those of them that reads ahead have
        self.bytes_in_use = self.bytes_ahead = 0  # of those that have slots, and of those of them that are reads ahead

    @property
    def is_idle(self) -> bool:
        return not (self.in_use or self.bytes_in_use or self.demand.by_key or self.ahead.by_key)

    def queue_of(self, request: "Slot") -> _Queue:
        """Where it waits, or would."""
        return self.ahead if request.ahead else self.demand

    @property
    def has_room(self) -> bool:
        """Would the server take one more read?"""
        return self.in_use < self.server.width

    def has_room_ahead(self, size: int) -> bool:
        """Would it take one more of *size* bytes, without the room that is kept for demand?

        While somebody waits there are fewer, as they would take the link from that read. But never fewer than on a link
        of which nothing is known, and whatever is waited for: that may hang.
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
        """Does somebody wait for one of these reads, or did a moment ago?"""
        # A read whose bytes come along with those of another one has no slot.
        if self.in_use > self.in_use_ahead or self.bytes_in_use > self.bytes_ahead or self.demand.by_key:
            return True
        return time.monotonic() < self.waited + _MOMENT


def _part_ahead(slots: int) -> int:
    """Of so many slots, those that reads ahead may take."""
    return max(1, slots - max(1, slots // 4))


class FetchSlots:
    """Admits a limited number of reads at once, with a limited number of bytes between them.

    A quarter of the slots (at least one, where there are several) is kept from reads ahead, so that a read on demand
    never finds all of them taken by reads ahead. Reads ahead are admitted in the order in which they will be needed,
    reads on demand in turns: one of each asker, and then the next one of each. A read larger than the whole capacity is
    admitted when no other one runs.

    A server that takes fewer reads at once than there are slots gets no more than it takes, in the same order and with
    the same quarter. What waits for it holds up nothing else. Reads ahead have no more bytes under way than keep its
    link busy: all of them share the link, so with more what is needed first would come as late as what is needed last.

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
        self._demand_queued = 0  # reads on demand that wait for a slot
        self._turn = 0.0  # of the last read on demand that has waited and was admitted
        self._turns: dict[int, float] = {}  # of those who wait, and have waited: whose next turn it is when
        self._most_turns = _FEW  # of so many; then those are forgotten who do not wait any more
        self.ahead_queued = 0  # reads ahead that wait for a slot
        self._ahead_in_use = 0  # slots taken by reads ahead
        self.in_use = 0  # slots taken
        self.bytes_in_use = 0  # bytes of the reads that have them
        self._bytes_on_demand = 0  # bytes of those of them that were admitted as reads on demand
        self._waited: dict[Server, float] = {}  # when a read on demand of a server ended last, which has no lane now
        self._timer: asyncio.TimerHandle | None = None  # after the moment in which it has just been waited for

    @property
    def most_planned(self) -> int:
        """Reads ahead of which it is known when they are needed, and that are to be here at once: those that have slots
        and half as many that wait, so that no slot is free until somebody looks again for what comes next."""
        return self.ahead_slots + self.ahead_slots // 2

    def slot(self, key: bytes, size: int, server: Server, *, ahead: bool, needed: float = math.inf) -> "Slot":
        """As a context manager it waits for a slot, and holds it.

        key: names the read to `promote`, and must be unique among those that wait; size: bytes of the read; server:
        what is read from; ahead: nobody waits for it yet; needed: loop time at which somebody will.
        """
        return Slot(self, key, size, server, ahead, needed)

    @property
    def count(self) -> int:
        """Reads at once."""
        return self._slots

    @property
    def is_waited_for(self) -> bool:
        """Does somebody wait for a slot, or for a read that had its slot on demand?

        A read ahead that somebody has come to wait for since it began is no reason to hold back others that nobody
        waits for: it shows that they come too late. (Three copies of 100 small files each, on a busy machine: 42 reads
        waited, and 56 where it was.)
        """
        return self._demand_queued > 0 or self._bytes_on_demand > 0

    def waiting(self, server: Server) -> tuple[int, int]:
        """Reads of the *server* that wait for a slot, and those that have one."""
        lane = self._lanes.get(server)
        return (len(lane.demand.by_key) + len(lane.ahead.by_key), lane.in_use) if lane is not None else (0, 0)

    def is_idle(self, server: Server) -> bool:
        """Has the *server* more free slots than others, and does nobody wait for it?"""
        waiting, running = self.waiting(server)
        return not waiting and self.free(server) > running

    def free(self, server: Server) -> int:
        """Slots that reads of the *server* could have now."""
        lane = self._lanes.get(server)
        return max(0, min(self._slots - self.in_use, server.width - (lane.in_use if lane is not None else 0)))

    def promote(self, key: bytes) -> None:
        """Somebody waits now for what the read *key* brings, which was asked for ahead, or by somebody else."""
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
        """For `Slot`."""
        lane = self._lanes[request.server]
        self._count(request, lane, -1)
        request.ahead = False
        self._count(request, lane, 1)
        self._admit()

    def take_along(self, key: bytes, server: Server) -> bool:
        """Admit the read *key* in the slot of another read of the *server*, which brings its bytes too. False where it
        does not wait, or where its bytes are too many."""
        lane = self._lanes.get(server)
        request = (lane.ahead.by_key.get(key) or lane.demand.by_key.get(key)) if lane is not None else None
        if lane is None or request is None or self.bytes_in_use + request.size > self.capacity:
            return False
        self._drop(request, lane)
        request.slots = 0
        self._let_in(request, lane)
        return True

    def ask(self, request: "Slot", admitted: Callable[[], None]) -> bool:
        """For `Slot`. True where it has it at once; else *admitted* is called when it has."""
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
        """For `Slot`: it waits no longer."""
        lane = self._lanes.get(request.server)
        if lane is not None and lane.queue_of(request).by_key.get(request.key) is request:
            self._drop(request, lane)
            self._forget(lane)

    def release(self, request: "Slot") -> None:
        """For `Slot`."""
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
        """Nobody goes before it, and it fits."""
        if self._demand_queued or not lane.has_room:
            return False
        if request.ahead and (
            self.ahead_queued or self._ahead_in_use >= self.ahead_slots or not lane.has_room_ahead(request.size)
        ):
            return False
        return self._fits(request.size)

    def _queue(self, request: "Slot", lane: _Lane) -> None:
        queue = lane.queue_of(request)
        # One of the same key may be left that has just been given up: it waits for its end, and for no slot.
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
        """When it is the turn of one more read of *asker*."""
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
        """Would a read on demand that waits have its turn sooner if the one asked for it who asks now?"""
        return max(self._turn, self._turns.get(ASKER.get(), 0.0)) < request.rank

    def _drop(self, request: "Slot", lane: _Lane) -> None:
        """It does not wait any more."""
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
                # Demand that does not fit yet stops reads ahead too: small ones would otherwise starve it.
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
        """Where the next read on demand waits that its server would take."""
        lanes = [lane for lane in self._lanes.values() if lane.demand.by_key and lane.has_room]
        return min(lanes, key=_first_demand) if len(lanes) > 1 else lanes[0] if lanes else None

    def _next_ahead(self) -> _Lane | None:
        """Where the next read ahead waits that its server would take."""
        lanes = [
            lane for lane in self._lanes.values() if lane.ahead.by_key and lane.has_room_ahead(lane.ahead.first().size)
        ]
        return min(lanes, key=_first_ahead) if len(lanes) > 1 else lanes[0] if lanes else None

    def _admit_reserved(self) -> None:
        """Admit reads on demand of the servers that have not got what is kept for each."""
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
    """The slot of one read: waited for, held, or given back for a while."""

    __slots__ = (
        "_slots", "admitted", "ahead", "asker", "held", "key", "needed", "number", "on_demand", "rank", "server",
        "size", "slots",
    )  # fmt: skip

    def __init__(self, slots: FetchSlots, key: bytes, size: int, server: Server, ahead: bool, needed: float) -> None:
        """See FetchSlots.slot."""
        self.key = key
        self.size = size
        self.server = server
        self.ahead = ahead  # it waits, or was admitted, as a read ahead, and nobody has come to wait for it since
        self.needed = needed
        self.held = False
        self.on_demand = False  # it is held, and was admitted as a read on demand
        self.asker = ASKER.get()
        self.rank = 0.0  # among those that wait: the lowest goes first
        self.number = 0  # of those that had to wait, in the order in which they came
        self.slots = 1  # that it takes: none where it has come along with another read
        self.admitted: Callable[[], None] | None = None  # while it waits: is called once it is admitted
        self._slots = slots

    def ask(self, admitted: Callable[[], None]) -> bool:
        """True where it is held from now on; else *admitted* is called when it is."""
        return self._slots.ask(self, admitted)

    async def take(self, *, ahead: bool, needed: float = math.inf) -> None:
        """Wait for it. See FetchSlots.slot."""
        self.ahead, self.needed = ahead, needed
        await self._wait()

    async def _wait(self) -> None:
        come: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def admitted() -> None:
            if not come.done():  # else it is about to leave
                come.set_result(None)

        if self.ask(admitted):
            return
        try:
            await come
        except asyncio.CancelledError:
            self.leave()
            raise

    def promote(self) -> None:
        """Somebody waits now for what it is for."""
        self._slots.promote(self.key)

    def want(self) -> None:
        """Somebody waits now for what it is held for: it counts as a read on demand."""
        if self.held and self.ahead:
            self._slots.want(self)

    def leave(self) -> None:
        """Hold it no longer, nor wait for it."""
        self._slots.leave(self)
        self.give_back()

    def hand_over(self) -> "Slot":
        """Another one that counts as a slot in place of this one, which keeps its bytes. Both are to be given back."""
        other = Slot(self._slots, self.key, 0, self.server, self.ahead, self.needed)
        other.held, other.asker, other.slots, self.slots = self.held, self.asker, self.slots, 0
        return other

    def give_back(self) -> None:
        """Let others have it. Does nothing where it is not held."""
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
