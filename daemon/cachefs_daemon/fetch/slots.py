"""How many origin reads run at once, and which comes next: first what somebody waits for, then what is needed soonest.

A read asks for a slot, waits until it is admitted, holds the slot while it runs, and gives it back.
"""

import asyncio
import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType


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
        self._demand: OrderedDict[bytes, Slot] = OrderedDict()  # waiting, first come, first served
        self._demand_of: dict[str, OrderedDict[bytes, Slot]] = {}  # the same, by origin
        self._ahead: dict[bytes, Slot] = {}  # waiting, in the order of `_order`
        # (needed, sequence number, key) of reads ahead. Some of them no longer wait, or have become demand.
        self._order: list[tuple[float, int, bytes]] = []
        self._numbers = itertools.count()
        self._ahead_in_use = 0  # slots taken by reads ahead
        self._used: dict[str, tuple[int, int]] = {}  # by origin: slots taken, and bytes
        self.in_use = 0  # slots taken
        self.bytes_in_use = 0  # bytes of the reads that have them

    @property
    def most_planned(self) -> int:
        """Reads ahead of which it is known when they are needed, and that are to be here at once: those that have slots
        and half as many that wait, so that no slot is free until somebody looks again for what comes next."""
        return self.ahead_slots + self.ahead_slots // 2

    @property
    def ahead_queued(self) -> int:
        """Reads ahead that wait for a slot."""
        return len(self._ahead)

    def slot(self, key: bytes, size: int, *, ahead: bool, needed: float = math.inf, origin: str = "") -> "Slot":
        """As a context manager it waits for a slot, and holds it.

        key: names the read to `promote`, and must be unique among those that wait; size: bytes of the read; ahead:
        nobody waits for it yet; needed: loop time at which somebody will; origin: names what is read from.
        """
        return Slot(self, key, size, origin, ahead, needed)

    def promote(self, key: bytes) -> None:
        """Somebody waits now for what the read ahead *key* brings."""
        request = self._ahead.pop(key, None)
        if request is not None:
            request.ahead = False
            self._want(request)
            self._admit()

    def ask(self, request: "Slot", admitted: Callable[[], None]) -> bool:
        """For `Slot`. True where it has it at once; else *admitted* is called when it has."""
        if self._is_next(request):
            self._let_in(request)
            return True
        request.admitted = admitted
        if request.ahead:
            if not self._ahead:
                self._order.clear()
            heapq.heappush(self._order, (request.needed, next(self._numbers), request.key))
            self._ahead[request.key] = request
        else:
            self._want(request)
        self._admit()
        return False

    def leave(self, request: "Slot") -> None:
        """For `Slot`: it waits no longer."""
        if self._demand.get(request.key) is request:
            self._drop_demand(request)
        if self._ahead.get(request.key) is request:
            del self._ahead[request.key]

    def release(self, request: "Slot") -> None:
        """For `Slot`."""
        self._count(request, -1)
        if self._demand or self._ahead:
            self._admit()

    def _is_next(self, request: "Slot") -> bool:
        """Nobody goes before it, and it fits."""
        if self._demand or (request.ahead and (self._ahead or self._ahead_in_use >= self.ahead_slots)):
            return False
        return self._fits(request.size)

    def _want(self, request: "Slot") -> None:
        self._demand[request.key] = request
        self._demand_of.setdefault(request.origin, OrderedDict())[request.key] = request

    def _drop_demand(self, request: "Slot") -> None:
        del self._demand[request.key]
        same_origin = self._demand_of[request.origin]
        del same_origin[request.key]
        if not same_origin:
            del self._demand_of[request.origin]

    def _count(self, request: "Slot", one: int) -> None:
        self.in_use += one
        self.bytes_in_use += one * request.size
        self._ahead_in_use += one * request.ahead
        slots, size = self._used.get(request.origin, (0, 0))
        self._used[request.origin] = slots + one, size + one * request.size
        if not slots + one:
            del self._used[request.origin]

    def _admit(self) -> None:
        # Demand that does not fit yet stops reads ahead too: small ones would otherwise starve it.
        while queue := self._demand or (self._ahead if self._ahead_in_use < self.ahead_slots else None):
            ahead = queue is self._ahead
            request = queue[self._first_ahead() if ahead else next(iter(queue))]
            if not self._fits(request.size):
                self._admit_reserved()
                return
            if ahead:
                del self._ahead[request.key]
            else:
                self._drop_demand(request)
            self._let_in(request)

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
                self._let_in(request)

    def _let_in(self, request: "Slot") -> None:
        self._count(request, 1)
        request.held = True
        admitted, request.admitted = request.admitted, None
        if admitted is not None:
            admitted()

    def _first_ahead(self) -> bytes:
        while (key := self._order[0][2]) not in self._ahead:
            heapq.heappop(self._order)
        return key

    def _fits(self, size: int) -> bool:
        return self.in_use == 0 or (self.in_use < self._slots and self.bytes_in_use + size <= self.capacity)


class Slot:
    """The slot of one read: waited for, held, or given back for a while."""

    __slots__ = ("_slots", "admitted", "ahead", "held", "key", "needed", "origin", "size")

    def __init__(self, slots: FetchSlots, key: bytes, size: int, origin: str, ahead: bool, needed: float) -> None:
        """See FetchSlots.slot."""
        self.key = key
        self.size = size
        self.origin = origin
        self.ahead = ahead  # it waits, or was admitted, as a read ahead
        self.needed = needed
        self.held = False
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

    def leave(self) -> None:
        """Hold it no longer, nor wait for it."""
        self._slots.leave(self)
        self.give_back()

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
