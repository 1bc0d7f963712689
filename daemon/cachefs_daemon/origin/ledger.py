"""Counters of requests to origins, kept where requests are sent: each request begins once and ends once, so that the
counts add up.

A process counts its own requests in `HERE`. The daemon gives a child that sends requests (a fetch process, a listing)
memory for its counts. The counts are therefore right even if the child is killed, and they remain when datasets are
removed and children end.
"""

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum
from typing import Final

# Kinds of origins; and the purposes of requests: to read objects, or to list them.
KINDS: Final = ("file", "s3", "gs", "az", "http", "hf")
PURPOSES: Final = ("read", "list")


class Outcome(IntEnum):
    """The end of a request; the numbers index the cells of a ledger."""

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


FAILED: Final = (Outcome.REFUSED, Outcome.BROKEN, Outcome.UNANSWERED, Outcome.UNREACHABLE)
_BEGUN: Final = 0
_RECEIVED: Final = 7
_DROPPED: Final = 8
_WRONG: Final = 9
_DETOURS: Final = 10
_CELLS: Final = 11
_BYTES: Final = 8 * _CELLS * len(KINDS) * len(PURPOSES)
_OF_KIND: Final = {kind: number for number, kind in enumerate(KINDS)}


class Ledger:
    """Counters of requests to origins of one kind, for one purpose. Used on one event loop."""

    __slots__ = ("_book", "_first")

    def __init__(self, book: "Book", first: int) -> None:
        """first: index of its first cell."""
        self._book = book
        self._first = first

    def begin(self) -> None:
        """Count a request that is sent, or would be if there were a connection. `end` must follow."""
        self._book.cells[self._first] += 1

    def end(self, outcome: Outcome, received: int, kept: int = 0) -> None:
        """Count the end of a request. received: bytes of the body that arrived; kept: those of them that are used
        although the request failed."""
        cells, first = self._book.cells, self._first
        cells[first + outcome] += 1
        cells[first + _RECEIVED] += received
        if outcome is not Outcome.ANSWERED:
            cells[first + _DROPPED] += received - kept

    def unreachable(self) -> None:
        """Count a request that was not sent for lack of a connection."""
        self.begin()
        self.end(Outcome.UNREACHABLE, 0)

    def wrong(self, received: int) -> None:
        """Count a whole response with wrong content; its bytes are dropped."""
        self._book.cells[self._first + _WRONG] += 1
        self.drop(received)

    def thrown_away(self, error: BaseException, received: int) -> None:
        """Count a whole response that is not used: it is wrong, or the caller stopped waiting."""
        if isinstance(error, Exception):
            self.wrong(received)
        else:
            self.drop(received)

    def detour(self) -> None:
        """Count a read that takes a slower path than usual."""
        self._book.cells[self._first + _DETOURS] += 1

    def drop(self, received: int) -> None:
        """Count received bytes that are not used."""
        self._book.cells[self._first + _DROPPED] += received

    @contextmanager
    def request(self, judge: Callable[[BaseException], Outcome]) -> "Iterator[Exchange]":
        """Count one request. judge: returns the outcome for the exception that ends it."""
        exchange = Exchange(self)
        try:
            yield exchange
        except BaseException as error:
            exchange.end(judge(error))
            raise
        else:
            exchange.end(Outcome.ANSWERED)

    # --- the counts -----------------------------------------------------------------------------------------------

    def count(self, outcome: Outcome) -> int:
        """Return the number of requests with this outcome."""
        return self._book.cells[self._first + outcome]

    @property
    def failed(self) -> int:
        """Number of requests that failed, wrong responses included."""
        return sum(map(self.count, FAILED)) + self.wrong_answers

    @property
    def requests(self) -> int:
        """Number of requests begun so far."""
        return self._book.cells[self._first + _BEGUN]

    @property
    def in_flight(self) -> int:
        """Number of requests that have not ended."""
        return self.requests - sum(map(self.count, Outcome))

    @property
    def received(self) -> int:
        """Bytes of bodies received by requests that have ended."""
        return self._book.cells[self._first + _RECEIVED]

    @property
    def dropped(self) -> int:
        """Received bytes that were not used."""
        return self._book.cells[self._first + _DROPPED]

    @property
    def detours(self) -> int:
        """Number of reads that took a slower path."""
        return self._book.cells[self._first + _DETOURS]

    @property
    def wrong_answers(self) -> int:
        """Number of whole responses with wrong content."""
        return self._book.cells[self._first + _WRONG]


class Exchange:
    """A request and its response."""

    __slots__ = ("_began", "_ledger", "_received")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._began = False
        self._received = 0

    def begin(self) -> None:
        """Count the sending of the request. If it was sent before, the repetition is for another connection or server,
        and the first counts as unanswered."""
        if self._began:
            self._ledger.end(Outcome.UNANSWERED, 0)
        self._began = True
        self._ledger.begin()

    def got(self, size: int) -> None:
        """Count *size* received bytes of the body."""
        self._received += size

    @contextmanager
    def current(self) -> Iterator[None]:
        """Attribute the requests that this task sends meanwhile to this exchange (see `sending`)."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def end(self, outcome: Outcome) -> None:
        if self._began:
            self._began = False
            self._ledger.end(outcome, self._received)
        elif outcome is Outcome.UNREACHABLE:
            self._ledger.unreachable()


class Book:
    """All ledgers of one process."""

    def __init__(self) -> None:
        self.cells: memoryview = memoryview(bytearray(_BYTES)).cast("q")

    def of(self, kind: str, purpose: str = "read") -> Ledger:
        """Return one ledger. kind, purpose: of KINDS, PURPOSES."""
        return Ledger(self, (_OF_KIND[kind] * len(PURPOSES) + PURPOSES.index(purpose)) * _CELLS)

    def purpose(self, purpose: str) -> list[Ledger]:
        """Return the ledgers of all kinds for one purpose."""
        return [self.of(kind, purpose) for kind in KINDS]

    def use(self, descriptor: int) -> None:
        """Count in the memory behind *descriptor*, which another process shares. Raises OSError."""
        self.cells = memoryview(mmap.mmap(descriptor, _BYTES)).cast("q")

    def add(self, other: "Book") -> None:
        for number, value in enumerate(other.cells):
            self.cells[number] += value


class ChildBook(Book):
    """The ledgers of a child, seen by its parent."""

    def __init__(self) -> None:
        """Raises OSError."""
        super().__init__()
        self.descriptor = os.memfd_create("cachefs-requests")
        os.ftruncate(self.descriptor, _BYTES)
        self.use(self.descriptor)
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
            reads = self.of("s3")
            reads.drop(reads.received - reads.dropped - used)
        for kind in KINDS:
            for purpose in PURPOSES:
                ledger = self.of(kind, purpose)
                for _ in range(ledger.in_flight):
                    ledger.end(Outcome.CANCELLED, 0)
        HERE.add(self)


HERE: Final = Book()
_children: Final[list[ChildBook]] = []
_CURRENT: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


def total() -> Book:
    """Return the sums over this process and its children, ended ones included."""
    found = Book()
    for book in (HERE, *_children):
        found.add(book)
    return found


def sending(**_: object) -> None:
    """Count a request of the task's current exchange. Handler of botocore's events."""
    exchange = _CURRENT.get()
    if exchange is not None:
        exchange.begin()
