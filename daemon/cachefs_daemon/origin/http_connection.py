"""One HTTP/1.1 connection with one request at a time.

A response is received into one buffer, first its head, then its body, which is handed out in place. Anything
unexpected, and a cancelled wait, aborts the connection, so that a response is never taken for that to another request.
"""

import asyncio
import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from cachefs_daemon.origin.http_head import END, MOST_BYTES, Head, Malformed, parse_head
from cachefs_daemon.origin.ledger import HERE, Outcome

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Seconds without a request after which a connection is closed. Servers close theirs after 5 to 75 seconds.
IDLE_SECONDS: Final = 12.0
_INTERIM: Final = range(100, 200)
_SWITCHING: Final = 101
SUCCESS: Final = range(200, 300)
# This client only reads objects from S3.
LEDGER: Final = HERE.of("s3")
# Receives a byte that arrives outside of a request, and is never read.
_UNASKED: Final = memoryview(bytearray(1))


def _nothing() -> None:
    """Return None, as a dead weak reference does."""


class ClosedUnanswered(Exception):
    """The connection was closed before the first byte of the response."""


class CutOff(Exception):
    """The connection was closed within the response, or surplus bytes arrived."""


class Silent(Exception):
    """The server was silent for too long."""


class Answer(NamedTuple):
    """A response."""

    head: Head
    # None if the body was not received: it has no length, comes in chunks, or exceeds the buffer.
    body: memoryview | None
    # The connection, if it had served other requests before; None for a new one.
    used: "HttpConnection | None" = None


class Asked:
    """A request, and the connection that it is on."""

    __slots__ = ("connection", "handed", "sent", "waiter")

    # A subclass may define it as a method: it is called with the head and the body so far, whenever more bytes arrive.
    receive: "Callable[[Head, memoryview], None] | None" = None

    def __init__(self) -> None:
        self.connection: HttpConnection | None = None  # None before the request is sent
        self.waiter: asyncio.Future[Answer] | None = None  # receives the response
        self.handed = 0  # bytes of the body that were passed on
        self.sent = math.inf  # loop time


class HttpConnection(asyncio.BufferedProtocol):
    """One connection. Belongs to its event loop."""

    def __init__(
        self,
        read_timeout: float,
        gone: Callable[["HttpConnection"], None],
        proven: Callable[[asyncio.BaseTransport], None],
    ) -> None:
        """read_timeout: most seconds without a byte during a request. gone: called when the connection is closed.
        proven: called with the transport after the first response."""
        self.open = False
        self._read_timeout = read_timeout
        self._gone = gone
        self._proven: Callable[[asyncio.BaseTransport], None] | None = proven
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._last = 0.0  # loop time of the last byte sent or received
        self._waiter: asyncio.Future[Answer] | None = None  # None while no request waits for a response
        self._memory: npt.NDArray[np.uint8] | None = None  # memory of the last response
        self._handed: Callable[[], object] = _nothing  # returns the last body while it is in use
        self._view = _UNASKED  # buffer for the response
        self._filled = 0  # bytes of the response received so far
        self._head: Head | None = None
        self._begin = 0  # where the head begins in the buffer, or the body once the head is parsed
        self._end = 0  # where the body ends
        self._receive: Callable[[Head, memoryview], None] | None = None  # see Asked
        self._asked: Asked | None = None  # the current request
        self._is_counted = True  # whether the end of the last request is counted

    @property
    def was_used(self) -> bool:
        """Whether the connection has served a request."""
        return self._proven is None

    def send(self, request: bytes, room: int, asked: Asked | None = None) -> "asyncio.Future[Answer]":
        """Send *request*. A caller that does not wait for the response to the end must call `abort`.

        room: least bytes to reserve for a body. asked: receives the connection and the waiter. The future raises
        ClosedUnanswered, CutOff, Silent or Malformed if there is no response.
        """
        waiter = self._waiter = self._loop.create_future()
        # One byte more than allowed, so that surplus is noticed.
        self._view = self._room(MOST_BYTES + room + 1)
        self._filled = self._begin = 0
        self._head = None
        self._last = self._loop.time()
        if asked is not None:
            asked.connection, asked.waiter, asked.sent = self, waiter, self._last
            self._receive = asked.receive
        else:
            self._receive = None
        self._asked = asked
        if self.open and self._transport is not None:
            LEDGER.begin()
            self._is_counted = False
            self._transport.write(request)
        else:
            self._fail(ClosedUnanswered())
        return waiter

    def outdo(self, asked: Asked, answer: Answer) -> bool:
        """Answer the request *asked* with a response from elsewhere. Return False if it does not wait any more."""
        waiter = self._waiter
        if waiter is None or waiter is not asked.waiter or waiter.done():
            return False
        self._waiter = None
        waiter.set_result(answer)
        self.abort()
        return True

    def _count(self, outcome: Outcome) -> None:
        """Count the end of the request, once."""
        if self._is_counted:
            return
        self._is_counted = True
        received = max(0, self._filled - self._begin) if self._head is not None else 0
        LEDGER.end(outcome, received, self._asked.handed if self._asked is not None else 0)

    def abort(self) -> None:
        """Close the connection at once."""
        self._count(Outcome.CANCELLED)  # a request that has ended is counted already
        self.open = False
        self._receive = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.open = True
        self._last = self._loop.time()
        self._timer = self._loop.call_later(min(self._read_timeout, IDLE_SECONDS), self._look)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():
            self.abort()  # unrequested bytes
            return
        self._filled += nbytes
        self._last = self._loop.time()
        if self._head is None:
            try:
                self._look_for_head()
            except Malformed as error:
                self._fail(error)
                return
        if self._head is None:
            return
        if self._filled >= self._end:
            self._finish(self._head, waiter)
        elif self._receive is not None:
            self._receive(self._head, self._view[self._begin : self._filled])

    def eof_received(self) -> None:
        self._end_of_stream()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_of_stream()
        self._gone(self)

    def _room(self, size: int) -> memoryview:
        """Return memory for a response: that of the last one, once it is unused. The kernel would have to clear new
        memory page by page, which takes half of the time of a GET of 4 MiB."""
        memory = self._memory
        if memory is None or not size <= len(memory) <= 2 * size or self._handed() is not None:
            import numpy as np  # takes 0.04 s, and a listing process never gets here

            memory = self._memory = np.empty(size, np.uint8)
        return memory.data[:size]

    def _look_for_head(self) -> None:
        while self._head is None:
            received = bytes(self._view[self._begin : min(self._filled, MOST_BYTES)])
            end = received.find(END)
            if end < 0:
                if self._filled >= MOST_BYTES:
                    raise Malformed(f"it has more than {MOST_BYTES} bytes")
                return
            head = parse_head(received[:end])
            self._begin += end + len(END)
            if head.status not in _INTERIM or head.status == _SWITCHING:
                self._head = head
                self._end = self._begin + (head.length or 0)
                if self._end >= len(self._view):
                    self._end = 0  # the buffer is too small

    def _finish(self, head: Head, waiter: "asyncio.Future[Answer]") -> None:
        if head.length is None or not self._end:
            self._waiter = None
            waiter.set_result(Answer(head, None, self if self.was_used else None))
            self._count(Outcome.BROKEN if head.status in SUCCESS else Outcome.REFUSED)
            self.abort()
            return
        if self._filled > self._end:
            self._fail(CutOff(f"more than the {head.length} bytes promised came"))
            return
        self._waiter = None
        self._count(Outcome.ANSWERED if head.status in SUCCESS else Outcome.REFUSED)
        assert self._memory is not None
        # Everything made from this array holds it, so that the weak reference tells whether the memory is in use.
        # Reference counts differ between versions of Python.
        body = self._memory[self._begin : self._end]
        self._handed = weakref.ref(body)
        waiter.set_result(Answer(head, body.data, self if self.was_used else None))
        # The memory belongs to the holder of the response from now on.
        self._view, self._filled = _UNASKED, 0
        if self._receive is not None:
            self._receive = self._memory = None  # larger than others: the connection does not keep it
        if self._proven is not None and self._transport is not None:
            self._proven(self._transport)
            self._proven = None
        if head.is_last:
            self.abort()

    def _end_of_stream(self) -> None:
        if self._waiter is not None:
            if not self._filled:
                self._fail(ClosedUnanswered())
            elif self._head is None:
                self._fail(CutOff("the answer ended within its headers"))
            else:
                got, promised = self._filled - self._begin, self._head.length
                self._fail(CutOff(f"the body ended after {got} of {promised} bytes"))
        self.abort()

    def _fail(self, error: Exception) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)
            self._count(Outcome.UNANSWERED if isinstance(error, ClosedUnanswered) else Outcome.BROKEN)
        self.abort()

    def _look(self) -> None:
        """Check how long the connection has been silent. One timer serves all requests of the connection."""
        patience = IDLE_SECONDS if self._waiter is None else self._read_timeout
        now = self._loop.time()
        if now < self._last + patience:
            # A request may begin at any time, and must not wait for the end of an idle period.
            when = min(self._last + patience, now + min(self._read_timeout, IDLE_SECONDS))
            self._timer = self._loop.call_at(when, self._look)
        elif self._waiter is None:
            self.abort()
        else:
            self._fail(Silent(f"no byte for {patience:g} seconds"))
