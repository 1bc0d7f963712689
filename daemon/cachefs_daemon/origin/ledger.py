"""Requests to origins, counted where they are sent: each begins once and ends once, so that the counts add up.

A process counts what it sends itself, in `HERE`. The daemon gives a child that sends requests (a fetch process, a
listing) memory for its counts. So they are right even where the child is killed, and they stay when datasets are
removed and children end.
"""

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum
from typing import Final

# Kinds of origins, and what requests are for: the bytes of objects, or what objects there are.
KINDS: Final = ("file", "s3", "gs", "az", "http", "hf")
PURPOSES: Final = ("read", "list")


class Outcome(IntEnum):
    """How a request has ended; the numbers are those of the cells of a ledger."""

    # The answer came, whole, with a status that means success.
    ANSWERED = 1
    # An answer with another status.
    REFUSED = 2
    # The answer was cut off, was no HTTP, did not go on, or was given up since it was not what was asked for.
    BROKEN = 3
    # The connection was closed before the first byte of an answer. The server may never have seen the request.
    UNANSWERED = 4
    # Nobody waited for it any more.
    CANCELLED = 5
    # There was no connection, so it was never sent.
    UNREACHABLE = 6


FAILED: Final = (Outcome.REFUSED, Outcome.BROKEN, Outcome.UNANSWERED, Outcome.UNREACHABLE)
# The other cells.
_BEGUN: Final = 0
_RECEIVED: Final = 7
_DROPPED: Final = 8
_WRONG: Final = 9
_DETOURS: Final = 10
_CELLS: Final = 11
_BYTES: Final = 8 * _CELLS * len(KINDS) * len(PURPOSES)
_OF_KIND: Final = {kind: number for number, kind in enumerate(KINDS)}


class Ledger:
    """Counts of the requests to origins of one kind, for one purpose. Used on one event loop."""

    __slots__ = ("_book", "_first")

    def __init__(self, book: "Book", first: int) -> None:
        """first: of its cells."""
        self._book = book
        self._first = first

    def begin(self) -> None:
        """A request is sent, or would be if there were a connection. `end` must follow."""
        self._book.cells[self._first] += 1

    def end(self, outcome: Outcome, received: int, kept: int = 0) -> None:
        """received: bytes of the answer's body that have come; kept: those of them that are of use although the request
        has failed."""
        cells, first = self._book.cells, self._first
        cells[first + outcome] += 1
        cells[first + _RECEIVED] += received
        if outcome is not Outcome.ANSWERED:
            cells[first + _DROPPED] += received - kept

    def unreachable(self) -> None:
        """A request was not sent, as there was no connection."""
        self.begin()
        self.end(Outcome.UNREACHABLE, 0)

    def wrong(self, received: int) -> None:
        """An answer that was whole was not what was asked for; nobody gets its bytes."""
        self._book.cells[self._first + _WRONG] += 1
        self.drop(received)

    def thrown_away(self, error: BaseException, received: int) -> None:
        """An answer that was whole is of no use: it is wrong, or nobody waits any more."""
        if isinstance(error, Exception):
            self.wrong(received)
        else:
            self.drop(received)

    def detour(self) -> None:
        """A read takes a slower way than it usually does."""
        self._book.cells[self._first + _DETOURS] += 1

    def drop(self, received: int) -> None:
        """Bytes that have come are of no use."""
        self._book.cells[self._first + _DROPPED] += received

    @contextmanager
    def request(self, judge: Callable[[BaseException], Outcome]) -> "Iterator[Exchange]":
        """One request. judge: what the exception says that ends it."""
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
        """Requests that have ended so."""
        return self._book.cells[self._first + outcome]

    @property
    def failed(self) -> int:
        """Requests that have failed, and those whose answers were wrong."""
        return sum(map(self.count, FAILED)) + self.wrong_answers

    @property
    def requests(self) -> int:
        """Requests that were made so far."""
        return self._book.cells[self._first + _BEGUN]

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return self.requests - sum(map(self.count, Outcome))

    @property
    def received(self) -> int:
        """Bytes of bodies that have come, of requests that have ended."""
        return self._book.cells[self._first + _RECEIVED]

    @property
    def dropped(self) -> int:
        """Of these bytes, those that nobody got."""
        return self._book.cells[self._first + _DROPPED]

    @property
    def detours(self) -> int:
        """Reads that took a slower way."""
        return self._book.cells[self._first + _DETOURS]

    @property
    def wrong_answers(self) -> int:
        """Answers that were whole, and not what was asked for."""
        return self._book.cells[self._first + _WRONG]


class Exchange:
    """A request and its answer."""

    __slots__ = ("_began", "_ledger", "_received")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._began = False
        self._received = 0

    def begin(self) -> None:
        """It is sent. Where it was sent before, this is for another connection or server: the first was not answered as
        it should be."""
        if self._began:
            self._ledger.end(Outcome.UNANSWERED, 0)
        self._began = True
        self._ledger.begin()

    def got(self, size: int) -> None:
        """So many bytes of the answer's body have come."""
        self._received += size

    @contextmanager
    def current(self) -> Iterator[None]:
        """What this task sends meanwhile belongs to it (see `sending`)."""
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
        """kind, purpose: of KINDS, PURPOSES."""
        return Ledger(self, (_OF_KIND[kind] * len(PURPOSES) + PURPOSES.index(purpose)) * _CELLS)

    def purpose(self, purpose: str) -> list[Ledger]:
        """The ledgers of all kinds for one purpose."""
        return [self.of(kind, purpose) for kind in KINDS]

    def use(self, descriptor: int) -> None:
        """Count in the memory behind the *descriptor*, which is another process's too. Raises OSError."""
        self.cells = memoryview(mmap.mmap(descriptor, _BYTES)).cast("q")

    def add(self, other: "Book") -> None:
        for number, value in enumerate(other.cells):
            self.cells[number] += value


class ChildBook(Book):
    """The ledgers of a child, as its parent sees them."""

    def __init__(self) -> None:
        """Raises OSError."""
        super().__init__()
        self.descriptor = os.memfd_create("cachefs-requests")
        os.ftruncate(self.descriptor, _BYTES)
        self.use(self.descriptor)
        _children.append(self)

    def close(self, used: int | None = None) -> None:
        """The child has ended, and its counts are the parent's now. What it had under way is cancelled. May be called
        again.

        used: bytes of objects that it has passed on; None: all that were of use to it.
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
    """The sums over this process and its children, those that have ended included."""
    found = Book()
    for book in (HERE, *_children):
        found.add(book)
    return found


def sending(**_: object) -> None:
    """A request is being sent, in the task that has begun an exchange: for the events of botocore."""
    exchange = _CURRENT.get()
    if exchange is not None:
        exchange.begin()
