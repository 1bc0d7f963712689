"""Limits concurrent origin reads, and decides which read is admitted next.

Reads on demand (a reader waits) come first, in turns between askers, so that no asker waits behind thousands of reads
of another. Reads ahead follow in the order of the time at which they are needed. A read asks for a permit, waits until
it is admitted, holds the permit while it runs, and gives it back.
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

from cachefs.planning.requests.request_limits import MIN_BYTES

# Stale queue entries, turns and idle servers that are kept before they are cleaned up.
_MAX_STALE: Final = 256
# While a read on demand waits or runs, reads ahead from its server may have this fraction of their usual bytes. That is
# still twice what keeps the link busy, so ReadaheadLimit notices where the link takes more.
_BESIDE_DEMAND_DIVISOR: Final = 2
# Seconds after a read on demand during which its server still counts as waited for: a worker reads its next block while
# its first one is decoded.
_RECENT_DEMAND_SECONDS: Final = 0.25

# Id of the asker on whose behalf the current code requests permits. Tasks inherit it, so no call has to pass it on.
REQUESTER: Final = ContextVar("ASKER", default=0)


class LimitedServer(Protocol):
    """A server that blocks are read from, with its current limits."""

    @property
    def width(self) -> int:
        """Reads that the server takes at once now; at least 1."""

    @property
    def readahead_bytes(self) -> float:
        """Bytes that reads ahead may have in flight to the server. A single read may be larger."""


class _PermitQueue:
    """Priority queue of waiting reads, by rank; first come, first served within one rank."""

    __slots__ = ("by_key", "heap")

    def __init__(self) -> None:
        self.by_key: dict[bytes, Permit] = {}
        # Heap of (rank, number, key). Entries whose read no longer waits are skipped lazily.
        self.heap: list[tuple[float, int, bytes]] = []

    def add(self, request: "Permit") -> None:
        if not self.by_key:
            self.heap.clear()
        elif len(self.heap) > 2 * len(self.by_key) + _MAX_STALE:
            # Stale entries behind live ones would otherwise stay for ever.
            self.heap = [(one.rank, one.number, key) for key, one in self.by_key.items()]
            heapq.heapify(self.heap)
        heapq.heappush(self.heap, (request.rank, request.number, request.key))
        self.by_key[request.key] = request

    def first(self) -> "Permit":
        """Return the waiting read with the lowest rank. The queue must not be empty."""
        while True:
            _, number, key = self.heap[0]
            request = self.by_key.get(key)
            if request is not None and request.number == number:
                return request
            heapq.heappop(self.heap)


class _ServerQueue:
    """Queues and counts of the reads from one server."""

    __slots__ = (
        "ahead",
        "ahead_bytes_in_use",
        "ahead_permits_in_use",
        "bytes_in_use",
        "demand",
        "last_demand_at",
        "permits_in_use",
        "server",
    )

    def __init__(self, server: LimitedServer, waited: float) -> None:
        self.server = server
        self.last_demand_at = waited  # monotonic time at which the last read on demand ended
        self.demand = _PermitQueue()  # ordered by turns
        self.ahead = _PermitQueue()  # ordered by the time at which the block is needed
        self.permits_in_use = self.ahead_permits_in_use = 0  # permits taken, in all and by reads ahead
        self.bytes_in_use = self.ahead_bytes_in_use = 0  # bytes of reads with permits, in all and of reads ahead

    @property
    def is_idle(self) -> bool:
        return not (self.permits_in_use or self.bytes_in_use or self.demand.by_key or self.ahead.by_key)

    def queue_of(self, request: "Permit") -> _PermitQueue:
        return self.ahead if request.is_ahead else self.demand

    @property
    def has_room(self) -> bool:
        """Whether the server would take one more read."""
        return self.permits_in_use < self.server.width

    def has_room_ahead(self, size: int) -> bool:
        """Return whether the server would take one more read ahead of *size* bytes, outside of the permits reserved for
        demand.

        While a read on demand waits or runs, reads ahead get fewer bytes, as they would take the link from it. They
        always get MIN_BYTES bytes, the start value for an unknown link, since the read on demand may hang.
        """
        width = self.server.width
        if self.permits_in_use >= width or self.ahead_permits_in_use >= _ahead_share(width):
            return False
        most = self.server.readahead_bytes
        if most > MIN_BYTES and self.has_waiting_reader:
            most = max(MIN_BYTES, most / _BESIDE_DEMAND_DIVISOR)
        return self.ahead_bytes_in_use == 0 or self.ahead_bytes_in_use + size <= most

    @property
    def has_waiting_reader(self) -> bool:
        """Whether a reader waits for a read from this server, or did within the last _RECENT_DEMAND_SECONDS."""
        # A read whose bytes come with another read's request holds bytes but no permit.
        if (
            self.permits_in_use > self.ahead_permits_in_use
            or self.bytes_in_use > self.ahead_bytes_in_use
            or self.demand.by_key
        ):
            return True
        return time.monotonic() < self.last_demand_at + _RECENT_DEMAND_SECONDS


def _ahead_share(permits: int) -> int:
    """Return how many of *permits* reads ahead may take."""
    return max(1, permits - max(1, permits // 4))


class ConcurrencyLimiter:
    """Admits a limited number of reads at once, with a limited number of bytes between them.

    A quarter of the permits (at least one, where there are several) is reserved for reads on demand, so that reads
    ahead never take all permits. Reads ahead are admitted in the order in which they are needed; reads on demand in
    turns, one read of each asker per round. A read larger than the whole capacity is admitted when no other read runs.

    A server whose width is below the number of permits gets no more reads than its width, in the same order and with
    the same reserved quarter. Reads that wait for one server do not block reads from others. Reads ahead have no more
    bytes in flight than keep the server's link busy: with more, blocks needed first would arrive as late as those
    needed last.

    Reads from an origin that hangs may hold all permits until their deadline. So that reads from other origins need not
    wait as long, each server has a reserve for reads on demand: an eighth of the permits and bytes, at least one read,
    admitted on top of the limits when no permit is free.
    """

    def __init__(self, permits: int, capacity: int) -> None:
        """permits: reads at once; capacity: their total bytes."""
        self._permits = permits
        self.ahead_permits = _ahead_share(permits)  # permits that reads ahead may take
        self.capacity = capacity
        self._queues: dict[LimitedServer, _ServerQueue] = {}  # servers with reads that wait or run
        self._numbers = itertools.count()
        self._queued_demand = 0  # reads on demand that wait for a permit
        self._last_rank = 0.0  # rank of the last read on demand that was admitted from the queue
        self._next_ranks: dict[int, float] = {}  # by asker: rank of its next read on demand
        self._max_ranks = _MAX_STALE  # size of _next_ranks at which askers without waiting reads are dropped
        self.queued_ahead = 0  # reads ahead that wait for a permit
        self._ahead_in_use = 0  # permits held by reads ahead
        self.in_use = 0  # permits held
        self.bytes_in_use = 0  # bytes of the reads that hold permits
        self._bytes_on_demand = 0  # bytes of the reads that were admitted as reads on demand
        # By server without a lane: monotonic time at which its last read on demand ended.
        self._last_demand_at: dict[LimitedServer, float] = {}
        self._timer: asyncio.TimerHandle | None = None  # admits reads ahead again after _RECENT_DEMAND_SECONDS

    @property
    def max_planned(self) -> int:
        """Limit on planned reads ahead that are here at once: those with permits, and half as many waiting, so that no
        permit is idle until the planner runs again."""
        return self.ahead_permits + self.ahead_permits // 2

    def new_permit(
        self, key: bytes, size: int, server: LimitedServer, *, ahead: bool, needed_at: float = math.inf
    ) -> "Permit":
        """Return a permit: an async context manager that waits for admission and holds the permit.

        key: identifies the read to `promote`; unique among waiting reads. size: bytes of the read. server: the server
        it reads from. ahead: no reader waits for it yet. needed_at: loop time at which a reader will.
        """
        return Permit(self, key, size, server, ahead, needed_at)

    @property
    def count(self) -> int:
        """Limit on concurrent reads."""
        return self._permits

    @property
    def has_waiting_reader(self) -> bool:
        """Whether a reader waits for a permit, or for a read that was admitted as a read on demand.

        A read ahead that a reader began to wait for only after its admission does not count, and does not hold back
        other reads ahead: it shows that reads ahead come too late. (Three copies of 100 small files each, on a busy
        machine: 42 reads waited; 56 when it counted.)
        """
        return self._queued_demand > 0 or self._bytes_on_demand > 0

    def waiting_and_running(self, server: LimitedServer) -> tuple[int, int]:
        """Return how many reads from the *server* wait for a permit, and how many hold one."""
        queue = self._queues.get(server)
        return (
            (len(queue.demand.by_key) + len(queue.ahead.by_key), queue.permits_in_use) if queue is not None else (0, 0)
        )

    def is_idle(self, server: LimitedServer) -> bool:
        """Return whether no read waits for the *server*, and more permits are free for its reads than they hold."""
        waiting, running = self.waiting_and_running(server)
        return not waiting and self.free_permits(server) > running

    def free_permits(self, server: LimitedServer) -> int:
        """Return how many permits reads from the *server* could take now."""
        queue = self._queues.get(server)
        return max(
            0, min(self._permits - self.in_use, server.width - (queue.permits_in_use if queue is not None else 0))
        )

    def promote(self, key: bytes) -> None:
        """Raise the priority of the waiting read *key*: the current asker now waits for it. It was queued ahead, or by
        another asker."""
        for queue in self._queues.values():
            request = queue.ahead.by_key.get(key)
            if request is None and (request := queue.demand.by_key.get(key)) and not self._is_sooner(request):
                return
            if request is not None:
                self._dequeue(request, queue)
                request.is_ahead, request.requester = False, REQUESTER.get()
                self._enqueue(request, queue)
                self._admit()
                return

    def count_as_demand(self, request: "Permit") -> None:
        """For `Permit`: count a running read ahead as a read on demand."""
        queue = self._queues[request.server]
        self._count_in_use(request, queue, -1)
        request.is_ahead = False
        self._count_in_use(request, queue, 1)
        self._admit()

    def admit_with_other(self, key: bytes, server: LimitedServer) -> bool:
        """Admit the waiting read *key* without a permit of its own: another read of the *server* brings its bytes too.
        Returns False if it does not wait, or if its bytes exceed the capacity."""
        queue = self._queues.get(server)
        request = (queue.ahead.by_key.get(key) or queue.demand.by_key.get(key)) if queue is not None else None
        if queue is None or request is None or self.bytes_in_use + request.size > self.capacity:
            return False
        self._dequeue(request, queue)
        request.count = 0
        self._grant(request, queue)
        return True

    def request(self, request: "Permit", admitted: Callable[[], None]) -> bool:
        """For `Permit`: return True if admitted at once; otherwise *admitted* is called upon admission."""
        queue = self._queues.get(request.server)
        if queue is None:
            queue = self._queues[request.server] = _ServerQueue(
                request.server, self._last_demand_at.pop(request.server, -math.inf)
            )
        request.count = 1
        if self._is_next(request, queue):
            self._grant(request, queue)
            return True
        request.on_admission = admitted
        self._enqueue(request, queue)
        self._admit()
        return False

    def leave_queue(self, request: "Permit") -> None:
        """For `Permit`: remove the read from its queue."""
        queue = self._queues.get(request.server)
        if queue is not None and queue.queue_of(request).by_key.get(request.key) is request:
            self._dequeue(request, queue)
            self._remove_if_idle(queue)

    def release(self, request: "Permit") -> None:
        """For `Permit`: return a held permit."""
        queue = self._queues[request.server]
        self._count_in_use(request, queue, -1)
        if request.is_on_demand:
            self._bytes_on_demand -= request.size
            request.is_on_demand = False
        if not request.is_ahead:
            queue.last_demand_at = time.monotonic()
        if self._queued_demand or self.queued_ahead:
            self._admit()
        if not request.is_ahead and queue.ahead.by_key and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_RECENT_DEMAND_SECONDS, self._admit_after_demand)
        self._remove_if_idle(queue)

    def _admit_after_demand(self) -> None:
        self._timer = None
        self._admit()

    def _is_next(self, request: "Permit", queue: _ServerQueue) -> bool:
        """Return whether the request fits and no waiting read goes before it."""
        if self._queued_demand or not queue.has_room:
            return False
        if request.is_ahead and (
            self.queued_ahead or self._ahead_in_use >= self.ahead_permits or not queue.has_room_ahead(request.size)
        ):
            return False
        return self._fits(request.size)

    def _enqueue(self, request: "Permit", lane: _ServerQueue) -> None:
        queue = lane.queue_of(request)
        # A cancelled read of the same key may still be queued: it waits for its end, and not for a permit.
        is_new = request.key not in queue.by_key
        request.number = next(self._numbers)
        if request.is_ahead:
            self.queued_ahead += is_new
            request.rank = request.needed_at
        else:
            request.rank = self._next_rank(request.requester)
            self._queued_demand += is_new
        queue.add(request)

    def _next_rank(self, asker: int) -> float:
        if not self._queued_demand:
            self._next_ranks.clear()
        elif len(self._next_ranks) > self._max_ranks:
            waiting = {one.requester for queue in self._queues.values() for one in queue.demand.by_key.values()}
            self._next_ranks = {one: turn for one, turn in self._next_ranks.items() if one in waiting}
            self._max_ranks = 2 * len(self._next_ranks) + _MAX_STALE
        turn = max(self._last_rank, self._next_ranks.get(asker, 0.0))
        self._next_ranks[asker] = turn + 1
        return turn

    def _is_sooner(self, request: "Permit") -> bool:
        """Return whether a waiting read on demand would be admitted sooner on behalf of the current asker."""
        return max(self._last_rank, self._next_ranks.get(REQUESTER.get(), 0.0)) < request.rank

    def _dequeue(self, request: "Permit", queue: _ServerQueue) -> None:
        del queue.queue_of(request).by_key[request.key]
        if request.is_ahead:
            self.queued_ahead -= 1
        else:
            self._queued_demand -= 1

    def _remove_if_idle(self, queue: _ServerQueue) -> None:
        if queue.is_idle and self._queues.pop(queue.server, None) is not None:
            self._last_demand_at[queue.server] = queue.last_demand_at
            if len(self._last_demand_at) > _MAX_STALE:
                del self._last_demand_at[next(iter(self._last_demand_at))]

    def _count_in_use(self, request: "Permit", queue: _ServerQueue, sign: int) -> None:
        permits, size = sign * request.count, sign * request.size
        self.in_use += permits
        queue.permits_in_use += permits
        self.bytes_in_use += size
        queue.bytes_in_use += size
        if request.is_ahead:
            self._ahead_in_use += permits
            queue.ahead_permits_in_use += permits
            queue.ahead_bytes_in_use += size

    def _admit(self) -> None:
        while self._queued_demand and (queue := self._next_demand()):
            request = queue.demand.first()
            if not self._fits(request.size):
                # Demand that does not fit yet also stops reads ahead: small ones would otherwise starve it.
                self._admit_reserved()
                return
            self._last_rank = max(self._last_rank, request.rank)
            self._dequeue(request, queue)
            self._grant(request, queue)
        while self.queued_ahead and self._ahead_in_use < self.ahead_permits and (queue := self._next_ahead()):
            request = queue.ahead.first()
            if not self._fits(request.size):
                return
            self._dequeue(request, queue)
            self._grant(request, queue)

    def _next_demand(self) -> _ServerQueue | None:
        queues = [queue for queue in self._queues.values() if queue.demand.by_key and queue.has_room]
        return min(queues, key=_first_demand_rank) if len(queues) > 1 else queues[0] if queues else None

    def _next_ahead(self) -> _ServerQueue | None:
        queues = [
            queue
            for queue in self._queues.values()
            if queue.ahead.by_key and queue.has_room_ahead(queue.ahead.first().size)
        ]
        return min(queues, key=_first_ahead_rank) if len(queues) > 1 else queues[0] if queues else None

    def _admit_reserved(self) -> None:
        """Admit reads on demand of servers whose reserve is not used up."""
        for queue in self._queues.values():
            for request in self._within_reserve(queue):
                self._dequeue(request, queue)
                self._grant(request, queue)

    def _within_reserve(self, queue: _ServerQueue) -> "Iterator[Permit]":
        while queue.demand.by_key and queue.has_room:
            request = queue.demand.first()
            size = queue.bytes_in_use + request.size
            if queue.permits_in_use and not (
                queue.permits_in_use < max(1, self._permits // 8) and size <= self.capacity // 8
            ):
                return
            yield request

    def _grant(self, request: "Permit", queue: _ServerQueue) -> None:
        self._count_in_use(request, queue, 1)
        request.is_held, request.is_on_demand = True, not request.is_ahead
        if request.is_on_demand:
            self._bytes_on_demand += request.size
        admitted, request.on_admission = request.on_admission, None
        if admitted is not None:
            admitted()

    def _fits(self, size: int) -> bool:
        return self.in_use == 0 or (self.in_use < self._permits and self.bytes_in_use + size <= self.capacity)


def _first_demand_rank(queue: _ServerQueue) -> tuple[float, int]:
    first = queue.demand.first()
    return first.rank, first.number


def _first_ahead_rank(queue: _ServerQueue) -> tuple[float, int]:
    first = queue.ahead.first()
    return first.rank, first.number


class Permit:
    """A permit for one read: waited for, held, or given back for a while."""

    __slots__ = (
        "_limiter",
        "count",
        "is_ahead",
        "is_held",
        "is_on_demand",
        "key",
        "needed_at",
        "number",
        "on_admission",
        "rank",
        "requester",
        "server",
        "size",
    )  # fmt: skip

    def __init__(
        self, limiter: ConcurrencyLimiter, key: bytes, size: int, server: LimitedServer, ahead: bool, needed_at: float
    ) -> None:
        self.key = key
        self.size = size
        self.server = server
        self.is_ahead = ahead  # waits, or was admitted, as a read ahead, and no reader has come to wait for it since
        self.needed_at = needed_at
        self.is_held = False
        self.is_on_demand = False  # held, and admitted as a read on demand
        self.requester = REQUESTER.get()
        self.rank = 0.0  # lowest goes first among waiting reads
        self.number = 0  # sequence number among reads that had to wait
        self.count = 1  # permits it takes: 0 if its bytes come with another read
        self.on_admission: Callable[[], None] | None = None  # called upon admission, set while waiting
        self._limiter = limiter

    def request(self, admitted: Callable[[], None]) -> bool:
        """Return True if the permit is held from now on; otherwise *admitted* is called upon admission."""
        return self._limiter.request(self, admitted)

    async def acquire(self, *, ahead: bool, needed_at: float = math.inf) -> None:
        """Wait for the permit. See ConcurrencyLimiter.new_permit."""
        self.is_ahead, self.needed_at = ahead, needed_at
        await self._acquire()

    async def _acquire(self) -> None:
        come: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def admitted() -> None:
            if not come.done():  # otherwise cancelled, and about to leave
                come.set_result(None)

        if self.request(admitted):
            return
        try:
            await come
        except asyncio.CancelledError:
            self.cancel_or_release()
            raise

    def promote(self) -> None:
        """Raise the priority of the waiting read: a reader waits for its block now."""
        self._limiter.promote(self.key)

    def count_as_demand(self) -> None:
        """Count a held permit as a read on demand: a reader waits for its block now."""
        if self.is_held and self.is_ahead:
            self._limiter.count_as_demand(self)

    def cancel_or_release(self) -> None:
        """Give the permit back, or stop waiting for it."""
        self._limiter.leave_queue(self)
        self.release()

    def split_off(self) -> "Permit":
        """Return a second Permit that takes over the permit, while this one keeps its bytes. Both must be given
        back."""
        other = Permit(self._limiter, self.key, 0, self.server, self.is_ahead, self.needed_at)
        other.is_held, other.requester, other.count, self.count = self.is_held, self.requester, self.count, 0
        return other

    def release(self) -> None:
        """Release the permit. Does nothing if it is not held."""
        if self.is_held:
            self.is_held = False
            self._limiter.release(self)

    async def __aenter__(self) -> "Permit":
        await self._acquire()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.release()
