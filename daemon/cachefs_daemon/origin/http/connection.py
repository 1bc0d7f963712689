"""One HTTP/1.1 connection with one request at a time.

A response is received into one buffer, first its head, then its body, which is handed out in place. Anything
unexpected, and a cancelled wait, aborts the connection, so that a response is never taken for that to another request.
"""

import asyncio
import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from cachefs_daemon.origin.http.head import HEAD_END, MAX_HEAD_BYTES, Head, MalformedHead, parse_head
from cachefs_daemon.origin.request_counters import OWN_COUNTERS, RequestOutcome

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Seconds without a request after which a connection is closed. Servers close theirs after 5 to 75 seconds.
IDLE_SECONDS: Final = 12.0
_INTERIM: Final = range(100, 200)
_SWITCHING: Final = 101
SUCCESS: Final = range(200, 300)
# This client only reads objects from S3.
S3_COUNTERS: Final = OWN_COUNTERS.counters_of("s3")
# Receives a byte that arrives outside of a request, and is never read.
_NO_REQUEST_BUFFER: Final = memoryview(bytearray(1))


def _dead_reference() -> None:
    """Return None, as a dead weak reference does."""


class ClosedWithoutResponse(Exception):
    """The connection was closed before the first byte of the response."""


class IncompleteResponse(Exception):
    """The connection was closed within the response, or surplus bytes arrived."""


class ReadTimeout(Exception):
    """The server was silent for too long."""


class HttpResponse(NamedTuple):
    """A response."""

    head: Head
    # None if the body was not received: it has no length, comes in chunks, or exceeds the buffer.
    body: memoryview | None
    # The connection, if it had served other requests before; None for a new one.
    reused_connection: "HttpConnection | None" = None


class InFlightRequest:
    """A request, and the connection that it is on."""

    __slots__ = ("connection", "passed_bytes", "sent_at", "waiter")

    # A subclass may define it as a method: it is called with the head and the body so far, whenever more bytes arrive.
    on_received: "Callable[[Head, memoryview], None] | None" = None

    def __init__(self) -> None:
        self.connection: HttpConnection | None = None  # None before the request is sent
        self.waiter: asyncio.Future[HttpResponse] | None = None  # receives the response
        self.passed_bytes = 0  # bytes of the body that were passed on
        self.sent_at = math.inf  # loop time


class HttpConnection(asyncio.BufferedProtocol):
    """One connection. Belongs to its event loop."""

    def __init__(
        self,
        read_timeout: float,
        on_closed: Callable[["HttpConnection"], None],
        on_first_response: Callable[[asyncio.BaseTransport], None],
    ) -> None:
        """read_timeout: most seconds without a byte during a request. on_closed: called when the connection is closed.
        on_first_response: called with the transport after the first response."""
        self.is_open = False
        self._read_timeout = read_timeout
        self._on_closed = on_closed
        self._on_first_response: Callable[[asyncio.BaseTransport], None] | None = on_first_response
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._last_byte_at = 0.0  # loop time of the last byte sent or received
        self._waiter: asyncio.Future[HttpResponse] | None = None  # None while no request waits for a response
        self._memory: npt.NDArray[np.uint8] | None = None  # memory of the last response
        self._last_body: Callable[[], object] = _dead_reference  # returns the last body while it is in use
        self._view = _NO_REQUEST_BUFFER  # buffer for the response
        self._filled = 0  # bytes of the response received so far
        self._head: Head | None = None
        self._begin = 0  # where the head begins in the buffer, or the body once the head is parsed
        self._end = 0  # where the body ends
        self._on_received: Callable[[Head, memoryview], None] | None = None  # see InFlightRequest
        self._in_flight: InFlightRequest | None = None  # the current request
        self._is_counted = True  # whether the end of the last request is counted

    @property
    def was_used(self) -> bool:
        """Whether the connection has served a request."""
        return self._on_first_response is None

    def send(
        self, request: bytes, body_size: int, in_flight: InFlightRequest | None = None
    ) -> "asyncio.Future[HttpResponse]":
        """Send *request*. A caller that does not wait for the response to the end must call `abort`.

        body_size: least bytes to reserve for a body. in_flight: receives the connection and the waiter. The future
        raises ClosedWithoutResponse, IncompleteResponse, ReadTimeout or MalformedHead if there is no response.
        """
        waiter = self._waiter = self._loop.create_future()
        # One byte more than allowed, so that surplus is noticed.
        self._view = self._allocate_buffer(MAX_HEAD_BYTES + body_size + 1)
        self._filled = self._begin = 0
        self._head = None
        self._last_byte_at = self._loop.time()
        if in_flight is not None:
            in_flight.connection, in_flight.waiter, in_flight.sent_at = self, waiter, self._last_byte_at
            self._on_received = in_flight.on_received
        else:
            self._on_received = None
        self._in_flight = in_flight
        if self.is_open and self._transport is not None:
            S3_COUNTERS.count_begin()
            self._is_counted = False
            self._transport.write(request)
        else:
            self._fail(ClosedWithoutResponse())
        return waiter

    def complete_early(self, in_flight: InFlightRequest, response: HttpResponse) -> bool:
        """Answer the request *in_flight* with a response from elsewhere. Return False if it does not wait any more."""
        waiter = self._waiter
        if waiter is None or waiter is not in_flight.waiter or waiter.done():
            return False
        self._waiter = None
        waiter.set_result(response)
        self.abort()
        return True

    def _count_end(self, outcome: RequestOutcome) -> None:
        """Count the end of the request, once."""
        if self._is_counted:
            return
        self._is_counted = True
        received = max(0, self._filled - self._begin) if self._head is not None else 0
        S3_COUNTERS.count_end(outcome, received, self._in_flight.passed_bytes if self._in_flight is not None else 0)

    def abort(self) -> None:
        """Close the connection at once."""
        self._count_end(RequestOutcome.CANCELLED)  # a request that has ended is counted already
        self.is_open = False
        self._on_received = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True
        self._last_byte_at = self._loop.time()
        self._timer = self._loop.call_later(min(self._read_timeout, IDLE_SECONDS), self._check_silence)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():
            self.abort()  # unrequested bytes
            return
        self._filled += nbytes
        self._last_byte_at = self._loop.time()
        if self._head is None:
            try:
                self._find_head()
            except MalformedHead as error:
                self._fail(error)
                return
        if self._head is None:
            return
        if self._filled >= self._end:
            self._finish_response(self._head, waiter)
        elif self._on_received is not None:
            self._on_received(self._head, self._view[self._begin : self._filled])

    def eof_received(self) -> None:
        self._end_of_stream()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_of_stream()
        self._on_closed(self)

    def _allocate_buffer(self, size: int) -> memoryview:
        """Return memory for a response: that of the last one, once it is unused. The kernel would have to clear new
        memory page by page, which takes half of the time of a GET of 4 MiB."""
        memory = self._memory
        if memory is None or not size <= len(memory) <= 2 * size or self._last_body() is not None:
            import numpy as np  # takes 0.04 s, and a listing process never gets here

            memory = self._memory = np.empty(size, np.uint8)
        return memory.data[:size]

    def _find_head(self) -> None:
        while self._head is None:
            received = bytes(self._view[self._begin : min(self._filled, MAX_HEAD_BYTES)])
            end = received.find(HEAD_END)
            if end < 0:
                if self._filled >= MAX_HEAD_BYTES:
                    raise MalformedHead(f"it has more than {MAX_HEAD_BYTES} bytes")
                return
            head = parse_head(received[:end])
            self._begin += end + len(HEAD_END)
            if head.status not in _INTERIM or head.status == _SWITCHING:
                self._head = head
                self._end = self._begin + (head.length or 0)
                if self._end >= len(self._view):
                    self._end = 0  # the buffer is too small

    def _finish_response(self, head: Head, waiter: "asyncio.Future[HttpResponse]") -> None:
        if head.length is None or not self._end:
            self._waiter = None
            waiter.set_result(HttpResponse(head, None, self if self.was_used else None))
            self._count_end(RequestOutcome.BROKEN if head.status in SUCCESS else RequestOutcome.REFUSED)
            self.abort()
            return
        if self._filled > self._end:
            self._fail(IncompleteResponse(f"more than the promised {head.length} bytes arrived"))
            return
        self._waiter = None
        self._count_end(RequestOutcome.ANSWERED if head.status in SUCCESS else RequestOutcome.REFUSED)
        assert self._memory is not None
        # Everything made from this array holds it, so that the weak reference tells whether the memory is in use.
        # Reference counts differ between versions of Python.
        body = self._memory[self._begin : self._end]
        self._last_body = weakref.ref(body)
        waiter.set_result(HttpResponse(head, body.data, self if self.was_used else None))
        # The memory belongs to the holder of the response from now on.
        self._view, self._filled = _NO_REQUEST_BUFFER, 0
        if self._on_received is not None:
            self._on_received = self._memory = None  # larger than others: the connection does not keep it
        if self._on_first_response is not None and self._transport is not None:
            self._on_first_response(self._transport)
            self._on_first_response = None
        if head.is_last:
            self.abort()

    def _end_of_stream(self) -> None:
        if self._waiter is not None:
            if not self._filled:
                self._fail(ClosedWithoutResponse())
            elif self._head is None:
                self._fail(IncompleteResponse("the answer ended within its headers"))
            else:
                got, promised = self._filled - self._begin, self._head.length
                self._fail(IncompleteResponse(f"the body ended after {got} of {promised} bytes"))
        self.abort()

    def _fail(self, error: Exception) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)
            self._count_end(
                RequestOutcome.UNANSWERED if isinstance(error, ClosedWithoutResponse) else RequestOutcome.BROKEN
            )
        self.abort()

    def _check_silence(self) -> None:
        """Check how long the connection has been silent. One timer serves all requests of the connection."""
        patience = IDLE_SECONDS if self._waiter is None else self._read_timeout
        now = self._loop.time()
        if now < self._last_byte_at + patience:
            # A request may begin at any time, and must not wait for the end of an idle period.
            when = min(self._last_byte_at + patience, now + min(self._read_timeout, IDLE_SECONDS))
            self._timer = self._loop.call_at(when, self._check_silence)
        elif self._waiter is None:
            self.abort()
        else:
            self._fail(ReadTimeout(f"no byte for {patience:g} seconds"))
