"""Counters of requests to origins, kept where requests are sent: each request begins once and ends once, so that the
counts add up.

A process counts its own requests in `OWN_COUNTERS`. The daemon gives a child that sends requests (a fetch process, a
listing) memory for its counts. The counts are therefore right even if the child is killed, and they remain when
datasets are removed and children end.
"""

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum
from typing import Final

from cachefs_daemon.origin.kinds import KIND_NAMES

# The purposes of requests: to read objects, or to list them.
PURPOSES: Final = ("read", "list")


class RequestOutcome(IntEnum):
    """The end of a request; the numbers index the cells of `RequestCounters`."""

    # A whole response arrived, with a status of success.
    ANSWERED = 1
    # A response with another status.
    REFUSED = 2
    # The response was cut off, malformed or stalled, or was given up as wrong.
    BROKEN = 3
    # The connection was closed before the first byte of a response. The server may not have seen the request.
    UNANSWERED = 4
    # The caller stopped waiting.
    CANCELLED = 5
    # No connection could be made, so the request was never sent.
    UNREACHABLE = 6


FAILED_OUTCOMES: Final = (
    RequestOutcome.REFUSED,
    RequestOutcome.BROKEN,
    RequestOutcome.UNANSWERED,
    RequestOutcome.UNREACHABLE,
)
_BEGUN: Final = 0
_RECEIVED: Final = 7
_DROPPED: Final = 8
_WRONG: Final = 9
_FALLBACKS: Final = 10
_CELLS: Final = 11
_BYTES: Final = 8 * _CELLS * len(KIND_NAMES) * len(PURPOSES)
_KIND_INDEX: Final = {kind: number for number, kind in enumerate(KIND_NAMES)}


class RequestCounters:
    """Counters of requests to origins of one kind, for one purpose. Used on one event loop."""

    __slots__ = ("_counter_set", "_first_cell")

    def __init__(self, book: "CounterSet", first: int) -> None:
        """first: index of its first cell."""
        self._counter_set = book
        self._first_cell = first

    def count_begin(self) -> None:
        """Count a request that is sent, or would be if there were a connection. `count_end` must follow."""
        self._counter_set.cells[self._first_cell] += 1

    def count_end(self, outcome: RequestOutcome, received: int, kept: int = 0) -> None:
        """Count the end of a request. received: bytes of the body that arrived; kept: those of them that are used
        although the request failed."""
        cells, first = self._counter_set.cells, self._first_cell
        cells[first + outcome] += 1
        cells[first + _RECEIVED] += received
        if outcome is not RequestOutcome.ANSWERED:
            cells[first + _DROPPED] += received - kept

    def count_unreachable(self) -> None:
        """Count a request that was not sent for lack of a connection."""
        self.count_begin()
        self.count_end(RequestOutcome.UNREACHABLE, 0)

    def count_wrong_response(self, received: int) -> None:
        """Count a whole response with wrong content; its bytes are dropped."""
        self._counter_set.cells[self._first_cell + _WRONG] += 1
        self.count_dropped_bytes(received)

    def count_unused_response(self, error: BaseException, received: int) -> None:
        """Count a whole response that is not used: it is wrong, or the caller stopped waiting."""
        if isinstance(error, Exception):
            self.count_wrong_response(received)
        else:
            self.count_dropped_bytes(received)

    def count_fallback(self) -> None:
        """Count a read that takes a slower path than usual."""
        self._counter_set.cells[self._first_cell + _FALLBACKS] += 1

    def count_dropped_bytes(self, received: int) -> None:
        """Count received bytes that are not used."""
        self._counter_set.cells[self._first_cell + _DROPPED] += received

    @contextmanager
    def counted_request(self, judge: Callable[[BaseException], RequestOutcome]) -> "Iterator[CountedRequest]":
        """Count one request. judge: returns the outcome for the exception that ends it."""
        exchange = CountedRequest(self)
        try:
            yield exchange
        except BaseException as error:
            exchange.count_end(judge(error))
            raise
        else:
            exchange.count_end(RequestOutcome.ANSWERED)

    # --- the counts -----------------------------------------------------------------------------------------------

    def count_of(self, outcome: RequestOutcome) -> int:
        """Return the number of requests with this outcome."""
        return self._counter_set.cells[self._first_cell + outcome]

    @property
    def failed(self) -> int:
        """Number of requests that failed, wrong responses included."""
        return sum(map(self.count_of, FAILED_OUTCOMES)) + self.wrong_responses

    @property
    def requests(self) -> int:
        """Number of requests begun so far."""
        return self._counter_set.cells[self._first_cell + _BEGUN]

    @property
    def in_flight(self) -> int:
        """Number of requests that have not ended."""
        return self.requests - sum(map(self.count_of, RequestOutcome))

    @property
    def received(self) -> int:
        """Bytes of bodies received by requests that have ended."""
        return self._counter_set.cells[self._first_cell + _RECEIVED]

    @property
    def dropped(self) -> int:
        """Received bytes that were not used."""
        return self._counter_set.cells[self._first_cell + _DROPPED]

    @property
    def fallback_reads(self) -> int:
        """Number of reads that took a slower path."""
        return self._counter_set.cells[self._first_cell + _FALLBACKS]

    @property
    def wrong_responses(self) -> int:
        """Number of whole responses with wrong content."""
        return self._counter_set.cells[self._first_cell + _WRONG]


class CountedRequest:
    """A request and its response."""

    __slots__ = ("_began", "_counters", "_received")

    def __init__(self, ledger: RequestCounters) -> None:
        self._counters = ledger
        self._began = False
        self._received = 0

    def count_begin(self) -> None:
        """Count the sending of the request. If it was sent before, the repetition is for another connection or server,
        and the first counts as unanswered."""
        if self._began:
            self._counters.count_end(RequestOutcome.UNANSWERED, 0)
        self._began = True
        self._counters.count_begin()

    def count_received(self, size: int) -> None:
        """Count *size* received bytes of the body."""
        self._received += size

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Attribute the requests that this task sends meanwhile to this exchange (see `count_current_request`)."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def count_end(self, outcome: RequestOutcome) -> None:
        if self._began:
            self._began = False
            self._counters.count_end(outcome, self._received)
        elif outcome is RequestOutcome.UNREACHABLE:
            self._counters.count_unreachable()


class CounterSet:
    """All `RequestCounters` of one process."""

    def __init__(self) -> None:
        self.cells: memoryview = memoryview(bytearray(_BYTES)).cast("q")

    def counters_of(self, kind: str, purpose: str = "read") -> RequestCounters:
        """Return the counters of one kind and purpose. kind, purpose: of KIND_NAMES, PURPOSES."""
        return RequestCounters(self, (_KIND_INDEX[kind] * len(PURPOSES) + PURPOSES.index(purpose)) * _CELLS)

    def counters_for(self, purpose: str) -> list[RequestCounters]:
        """Return the counters of all kinds for one purpose."""
        return [self.counters_of(kind, purpose) for kind in KIND_NAMES]

    def use_shared_memory(self, descriptor: int) -> None:
        """Count in the memory behind *descriptor*, which another process shares. Raises OSError."""
        self.cells = memoryview(mmap.mmap(descriptor, _BYTES)).cast("q")

    def add_counts(self, other: "CounterSet") -> None:
        for number, value in enumerate(other.cells):
            self.cells[number] += value


class ChildCounterSet(CounterSet):
    """The counters of a child process, read by its parent."""

    def __init__(self) -> None:
        """Raises OSError."""
        super().__init__()
        self.descriptor = os.memfd_create("cachefs-requests")
        os.ftruncate(self.descriptor, _BYTES)
        self.use_shared_memory(self.descriptor)
        _children.append(self)

    def close(self, used: int | None = None) -> None:
        """Add the counts of a child that has ended to the parent's. Its requests in flight count as cancelled. May be
        called again.

        used: bytes of objects that the child passed on; None: all that were of use to it.
        """
        if self not in _children:
            return
        _children.remove(self)
        os.close(self.descriptor)
        if used is not None:
            reads = self.counters_of("s3")
            reads.count_dropped_bytes(reads.received - reads.dropped - used)
        for kind in KIND_NAMES:
            for purpose in PURPOSES:
                ledger = self.counters_of(kind, purpose)
                for _ in range(ledger.in_flight):
                    ledger.count_end(RequestOutcome.CANCELLED, 0)
        OWN_COUNTERS.add_counts(self)


OWN_COUNTERS: Final = CounterSet()
_children: Final[list[ChildCounterSet]] = []
_CURRENT: ContextVar[CountedRequest | None] = ContextVar("exchange", default=None)


def total_counters() -> CounterSet:
    """Return the sums over this process and its children, ended ones included."""
    found = CounterSet()
    for book in (OWN_COUNTERS, *_children):
        found.add_counts(book)
    return found


def count_current_request(**_: object) -> None:
    """Count a request of the task's current exchange. Handler of botocore's events."""
    exchange = _CURRENT.get()
    if exchange is not None:
        exchange.count_begin()
