"""Limits concurrent origin reads, and decides which read is admitted next.

The jobs that read from one server share it by the bytes of their reads (cachefs.planning.requests.shares). Within a
job, reads on demand (a reader waits) come first, in turns between askers, so that no asker waits behind thousands of
reads of another. Reads ahead follow in the order of the time at which they are needed.

A read ahead that is not urgent, since its job has enough time left, gives way to the urgent reads of all jobs. Such
reads share nothing: the one that becomes urgent first goes first. So jobs share what they need now, and what is left
goes to whatever is needed soonest.

A read asks for a permit, waits until it is admitted, holds the permit while it runs, and gives it back.
"""

import asyncio
import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol

from cachefs.planning.requests.request_limits import MIN_BYTES
from cachefs.planning.requests.shares import FairOrder

# Stale queue entries, turns and idle servers that are kept before they are cleaned up.
_MAX_STALE: Final = 256
# While a read on demand waits or runs, reads ahead from its server may have this fraction of their usual bytes. That is
# still twice what keeps the link busy, so ReadaheadLimit notices where the link takes more.
_BESIDE_DEMAND_DIVISOR: Final = 2
# Seconds after a read on demand during which its server still counts as waited for: a worker reads its next block while
# its first one is decoded.
_RECENT_DEMAND_SECONDS: Final = 0.25
# Seconds without the end of any read after which a server hangs, so that no read on demand waits for reads ahead.
_HANGING_SECONDS: Final = 0.5

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


class _JobQueue:
    """The waiting reads of one job from one server."""

    __slots__ = ("ahead", "demand")

    def __init__(self) -> None:
        self.demand = _PermitQueue()  # ordered by turns
        self.ahead = _PermitQueue()  # ordered by the time at which the block is needed

    @property
    def is_empty(self) -> bool:
        return not (self.demand.by_key or self.ahead.by_key)

    def first(self) -> "Permit":
        """Return the read that is admitted next. The queue must not be empty."""
        return self.demand.first() if self.demand.by_key else self.ahead.first()

    def queue_of(self, request: "Permit") -> _PermitQueue:
        return self.ahead if request.is_ahead else self.demand


class _ServerQueue:
    """Queues and counts of the reads from one server."""

    __slots__ = (
        "ahead_bytes_in_use",
        "ahead_permits_in_use",
        "bytes_in_use",
        "jobs",
        "last_demand_at",
        "order",
        "permits_in_use",
        "queued_ahead",
        "queued_demand",
        "released_at",
        "server",
        "weights",
    )

    def __init__(self, server: LimitedServer, waited: float, weights: Mapping[str, float]) -> None:
        self.server = server
        self.weights = weights
        self.last_demand_at = waited  # monotonic time at which the last read on demand ended
        self.released_at = -math.inf  # monotonic time at which the last read ended
        self.jobs: dict[str, _JobQueue] = {}  # jobs with waiting reads
        self.order = FairOrder()
        self.queued_demand = self.queued_ahead = 0  # waiting reads
        self.permits_in_use = self.ahead_permits_in_use = 0  # permits taken, in all and by reads ahead
        self.bytes_in_use = self.ahead_bytes_in_use = 0  # bytes of reads with permits, in all and of reads ahead

    @property
    def is_idle(self) -> bool:
        return not (self.permits_in_use or self.bytes_in_use or self.jobs)

    # --- waiting reads ------------------------------------------------------------------------------------------------

    def add(self, request: "Permit") -> bool:
        """Add a waiting read. Returns False if it takes the place of a cancelled one with the same key."""
        queue = self.jobs.setdefault(request.job, _JobQueue()).queue_of(request)
        # A cancelled read of the same key may still be queued: it waits for its end, and not for a permit.
        is_new = request.key not in queue.by_key
        queue.add(request)
        self._count_queued(request, is_new)
        return is_new

    def remove(self, request: "Permit") -> None:
        """Remove a waiting read."""
        job = self.jobs[request.job]
        del job.queue_of(request).by_key[request.key]
        self._count_queued(request, -1)
        if job.is_empty:
            del self.jobs[request.job]
            self.order.withdraw(request.job)

    def _count_queued(self, request: "Permit", count: int) -> None:
        if request.is_ahead:
            self.queued_ahead += count
        else:
            self.queued_demand += count

    def find(self, key: bytes) -> "Permit | None":
        """Return the waiting read *key*: a read ahead, if there is one."""
        found = None
        for job in self.jobs.values():
            if (request := job.ahead.by_key.get(key)) is not None:
                return request
            found = found or job.demand.by_key.get(key)
        return found

    def is_waiting(self, request: "Permit") -> bool:
        """Return whether this very read waits."""
        job = self.jobs.get(request.job)
        return job is not None and job.queue_of(request).by_key.get(request.key) is request

    def charge(self, request: "Permit") -> None:
        """Charge the job of a read that is admitted."""
        self.order.charge(request.job, request.size, self._weight_of(request.job))

    def _claim(self, job: str) -> float:
        return self.order.claim(job, self._weight_of(job))

    def _weight_of(self, job: str) -> float:
        return self.weights.get(job, 1.0)

    def next_request(self, *, may_read_ahead: bool) -> "Permit | None":
        """Return the waiting read that is admitted next; None if the server has no room for it. may_read_ahead: whether
        reads ahead are admitted."""
        request = self._first_in_order()
        if request is None or not self.has_room:
            return None
        if not request.is_ahead or (may_read_ahead and self.has_room_ahead(request.size)):
            return request
        demand = self.first_demand()
        if demand is None or not self._is_ahead_of_share(demand, request):
            return demand
        return None

    def _is_ahead_of_share(self, demand: "Permit", ahead: "Permit") -> bool:
        """Return whether the job of a read on demand has had so much more than the job of a read ahead, which is urgent
        and waits until fewer bytes are in flight, that it must wait too. Bytes limit reads ahead only where the link is
        busy with them, so that nothing is lost. A lack of permits for reads ahead is no reason to wait: more requests
        at once may bring more. Neither is a server from which nothing comes."""
        now = time.monotonic()
        if demand.job == ahead.job or ahead.purpose.urgent_at > now or not self._has_permit_ahead:
            return False
        if now - self.released_at > _HANGING_SECONDS:
            return False
        lead = self._claim(demand.job) - self._claim(ahead.job)
        return lead > MIN_BYTES / self._weight_of(demand.job)

    def _first_in_order(self) -> "Permit | None":
        if len(self.jobs) < 2:
            return next((job.first() for job in self.jobs.values()), None)
        now = time.monotonic()
        best: Permit | None = None
        best_rank: tuple[bool, float, int] = (True, math.inf, 0)
        for name, job in self.jobs.items():
            request = job.first()
            if request.is_ahead and request.purpose.urgent_at > now:
                self.order.withdraw(name)
                rank = True, request.purpose.urgent_at, request.number
            else:
                rank = False, self._claim(name), request.number
            if best is None or rank < best_rank:
                best, best_rank = request, rank
        return best

    def first_demand(self) -> "Permit | None":
        """Return the read on demand that is admitted next, whether there is room or not."""
        if not self.queued_demand:
            return None
        waiting = [(name, job.demand.first()) for name, job in self.jobs.items() if job.demand.by_key]
        if len(waiting) > 1:
            waiting.sort(key=lambda one: (self._claim(one[0]), one[1].number))
        return waiting[0][1]

    # --- room ---------------------------------------------------------------------------------------------------------

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
        if not (self.has_room and self._has_permit_ahead):
            return False
        most = self.server.readahead_bytes
        if most > MIN_BYTES and self.has_waiting_reader:
            most = max(MIN_BYTES, most / _BESIDE_DEMAND_DIVISOR)
        return self.ahead_bytes_in_use == 0 or self.ahead_bytes_in_use + size <= most

    @property
    def _has_permit_ahead(self) -> bool:
        return self.ahead_permits_in_use < _ahead_share(self.server.width)

    @property
    def has_waiting_reader(self) -> bool:
        """Whether a reader waits for a read from this server, or did within the last _RECENT_DEMAND_SECONDS."""
        # A read whose bytes come with another read's request holds bytes but no permit.
        if (
            self.permits_in_use > self.ahead_permits_in_use
            or self.bytes_in_use > self.ahead_bytes_in_use
            or self.queued_demand
        ):
            return True
        return time.monotonic() < self.last_demand_at + _RECENT_DEMAND_SECONDS


def _ahead_share(permits: int) -> int:
    """Return how many of *permits* reads ahead may take."""
    return max(1, permits - max(1, permits // 4))


class ConcurrencyLimiter:
    """Admits a limited number of reads at once, with a limited number of bytes between them.

    A quarter of the permits (at least one, where there are several) is reserved for reads on demand, so that reads
    ahead never take all permits. The jobs that wait for one server share it by bytes. Of one job, reads on demand are
    admitted first, in turns, one read of each asker per round; then reads ahead, in the order in which they are needed.
    A read larger than the whole capacity is admitted when no other read runs.

    A server whose width is below the number of permits gets no more reads than its width, in the same order and with
    the same reserved quarter. Reads that wait for one server do not block reads from others. Reads ahead have no more
    bytes in flight than keep the server's link busy: with more, blocks needed first would arrive as late as those
    needed last.

    Reads from an origin that hangs may hold all permits until their deadline. So that reads from other origins need not
    wait as long, each server has a reserve for reads on demand: an eighth of the permits and bytes, at least one read,
    admitted on top of the limits when no permit is free.
    """

    def __init__(self, permits: int, capacity: int, weights: dict[str, float] | None = None) -> None:
        """permits: reads at once; capacity: their total bytes. weights: of jobs, 1 where missing; they may change."""
        self.weights = {} if weights is None else weights
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
        self._timer: asyncio.TimerHandle | None = None  # admits reads that wait for time to pass

    @property
    def max_planned(self) -> int:
        """Limit on planned reads ahead that are here at once: those with permits, and half as many waiting, so that no
        permit is idle until the planner runs again."""
        return self.ahead_permits + self.ahead_permits // 2

    def new_permit(
        self,
        key: bytes,
        size: int,
        server: LimitedServer,
        *,
        ahead: bool,
        purpose: "ReadPurpose | None" = None,
    ) -> "Permit":
        """Return a permit: an async context manager that waits for admission and holds the permit.

        key: identifies the read to `promote`; unique among waiting reads. size: bytes of the read. server: the server
        it reads from. ahead: no reader waits for it yet. purpose: None: for no job, and never urgent.
        """
        return Permit(self, key, size, server, ahead, purpose or UNPLANNED)

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

    def urgent_jobs(self) -> list[tuple[LimitedServer, str]]:
        """Return the jobs whose urgent reads wait for a permit, each with the server."""
        now = time.monotonic()
        return [
            (queue.server, name)
            for queue in self._queues.values()
            for name, job in queue.jobs.items()
            if not (first := job.first()).is_ahead or first.purpose.urgent_at <= now
        ]

    def waiting_and_running(self, server: LimitedServer) -> tuple[int, int]:
        """Return how many reads from the *server* wait for a permit, and how many hold one."""
        queue = self._queues.get(server)
        return (queue.queued_demand + queue.queued_ahead, queue.permits_in_use) if queue is not None else (0, 0)

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
            request = queue.find(key)
            if request is None:
                continue
            if request.is_ahead or self._is_sooner(request):
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
        request = queue.find(key) if queue is not None else None
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
            waited = self._last_demand_at.pop(request.server, -math.inf)
            queue = self._queues[request.server] = _ServerQueue(request.server, waited, self.weights)
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
        if queue is not None and queue.is_waiting(request):
            self._dequeue(request, queue)
            self._remove_if_idle(queue)

    def release(self, request: "Permit") -> None:
        """For `Permit`: return a held permit."""
        queue = self._queues[request.server]
        self._count_in_use(request, queue, -1)
        if request.is_on_demand:
            self._bytes_on_demand -= request.size
            request.is_on_demand = False
        queue.released_at = time.monotonic()
        if not request.is_ahead:
            queue.last_demand_at = queue.released_at
        if self._queued_demand or self.queued_ahead:
            self._admit()
        if not request.is_ahead and queue.queued_ahead:
            self._admit_later(_RECENT_DEMAND_SECONDS)
        self._remove_if_idle(queue)

    def _admit_later(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._admit_at_timer)

    def _admit_at_timer(self) -> None:
        self._timer = None
        self._admit()

    def _is_next(self, request: "Permit", queue: _ServerQueue) -> bool:
        """Return whether the request fits and no waiting read goes before it."""
        if self._queued_demand or not queue.has_room or not queue.jobs.keys() <= {request.job}:
            return False
        if request.is_ahead and (
            self.queued_ahead or self._ahead_in_use >= self.ahead_permits or not queue.has_room_ahead(request.size)
        ):
            return False
        return self._fits(request.size)

    def _enqueue(self, request: "Permit", queue: _ServerQueue) -> None:
        request.number = next(self._numbers)
        request.rank = request.purpose.needed_at if request.is_ahead else self._next_rank(request.requester)
        is_new = queue.add(request)
        if request.is_ahead:
            self.queued_ahead += is_new
        else:
            self._queued_demand += is_new

    def _next_rank(self, asker: int) -> float:
        if not self._queued_demand:
            self._next_ranks.clear()
        elif len(self._next_ranks) > self._max_ranks:
            jobs = itertools.chain.from_iterable(queue.jobs.values() for queue in self._queues.values())
            waiting = {one.requester for job in jobs for one in job.demand.by_key.values()}
            self._next_ranks = {one: turn for one, turn in self._next_ranks.items() if one in waiting}
            self._max_ranks = 2 * len(self._next_ranks) + _MAX_STALE
        turn = max(self._last_rank, self._next_ranks.get(asker, 0.0))
        self._next_ranks[asker] = turn + 1
        return turn

    def _is_sooner(self, request: "Permit") -> bool:
        """Return whether a waiting read on demand would be admitted sooner on behalf of the current asker."""
        return max(self._last_rank, self._next_ranks.get(REQUESTER.get(), 0.0)) < request.rank

    def _dequeue(self, request: "Permit", queue: _ServerQueue) -> None:
        queue.remove(request)
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
        while (self._queued_demand or self.queued_ahead) and (request := self._next_request()):
            queue = self._queues[request.server]
            if not self._fits(request.size):
                # A read that does not fit yet also stops those after it: small ones would otherwise starve it.
                self._admit_reserved()
                return
            if not request.is_ahead:
                self._last_rank = max(self._last_rank, request.rank)
            self._dequeue(request, queue)
            self._grant(request, queue)

    def _next_request(self) -> "Permit | None":
        """Return the read that is admitted next: of all servers' next reads, one on demand before those ahead."""
        may_read_ahead = self._ahead_in_use < self.ahead_permits
        requests = []
        for queue in self._queues.values():
            request = queue.next_request(may_read_ahead=may_read_ahead) if queue.jobs else None
            if request is not None:
                requests.append(request)
            elif queue.queued_demand and queue.has_room:
                self._admit_later(_HANGING_SECONDS)
        return min(requests, key=_rank) if len(requests) > 1 else requests[0] if requests else None

    def _admit_reserved(self) -> None:
        """Admit reads on demand of servers whose reserve is not used up."""
        for queue in self._queues.values():
            for request in self._within_reserve(queue):
                self._dequeue(request, queue)
                self._grant(request, queue)

    def _within_reserve(self, queue: _ServerQueue) -> "Iterator[Permit]":
        while queue.has_room and (request := queue.first_demand()) is not None:
            size = queue.bytes_in_use + request.size
            if queue.permits_in_use and not (
                queue.permits_in_use < max(1, self._permits // 8) and size <= self.capacity // 8
            ):
                return
            yield request

    def _grant(self, request: "Permit", queue: _ServerQueue) -> None:
        queue.charge(request)
        self._count_in_use(request, queue, 1)
        request.is_held, request.is_on_demand = True, not request.is_ahead
        if request.is_on_demand:
            self._bytes_on_demand += request.size
        admitted, request.on_admission = request.on_admission, None
        if admitted is not None:
            admitted()

    def _fits(self, size: int) -> bool:
        return self.in_use == 0 or (self.in_use < self._permits and self.bytes_in_use + size <= self.capacity)


def _rank(request: "Permit") -> tuple[bool, float, int]:
    return request.is_ahead, request.rank, request.number


@dataclass(frozen=True, slots=True)
class ReadPurpose:
    """For whom a block is read, and when its read is urgent."""

    # The job that is charged with the bytes; empty for readers that have published nothing.
    job: str = ""
    # Loop time at which a reader will wait for the block; inf: unknown.
    needed_at: float = math.inf
    # Loop time from which a read ahead is urgent: until then it gives way to the urgent reads of other jobs.
    urgent_at: float = math.inf


UNPLANNED: Final = ReadPurpose()


class Permit:
    """A permit for one read: waited for, held, or given back for a while."""

    __slots__ = (
        "_limiter",
        "count",
        "is_ahead",
        "is_held",
        "is_on_demand",
        "key",
        "number",
        "on_admission",
        "purpose",
        "rank",
        "requester",
        "server",
        "size",
    )  # fmt: skip

    def __init__(
        self,
        limiter: ConcurrencyLimiter,
        key: bytes,
        size: int,
        server: LimitedServer,
        ahead: bool,
        purpose: ReadPurpose,
    ) -> None:
        self.purpose = purpose
        self.key = key
        self.size = size
        self.server = server
        self.is_ahead = ahead  # waits, or was admitted, as a read ahead, and no reader has come to wait for it since
        self.is_held = False
        self.is_on_demand = False  # held, and admitted as a read on demand
        self.requester = REQUESTER.get()
        self.rank = 0.0  # lowest goes first among waiting reads
        self.number = 0  # sequence number among reads that had to wait
        self.count = 1  # permits it takes: 0 if its bytes come with another read
        self.on_admission: Callable[[], None] | None = None  # called upon admission, set while waiting
        self._limiter = limiter

    @property
    def job(self) -> str:
        """The job that is charged with the bytes."""
        return self.purpose.job

    def request(self, admitted: Callable[[], None]) -> bool:
        """Return True if the permit is held from now on; otherwise *admitted* is called upon admission."""
        return self._limiter.request(self, admitted)

    async def acquire(self, *, ahead: bool) -> None:
        """Wait for the permit. See ConcurrencyLimiter.new_permit."""
        self.is_ahead = ahead
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
        other = Permit(self._limiter, self.key, 0, self.server, self.is_ahead, self.purpose)
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
