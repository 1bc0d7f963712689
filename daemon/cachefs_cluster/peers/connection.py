"""An open connection to a peer: the event loop sends requests, and the receiver thread reads the responses.

The connection belongs to the loop while no request is in progress, else to its receiver. Only the receiver closes it:
to end a connection, the loop shuts it down.
"""

import asyncio
import contextlib
import logging
import os
import select
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachefs.block import pieces_match
from cachefs_cluster.peers.connecting import PeerTls
from cachefs_cluster.peers.network_cards import NetworkCard
from cachefs_cluster.peers.peer_requests import PeerBlock
from cachefs_cluster.peers.protocol import (
    BlockStatus,
    InvalidResponse,
    PeerRefusal,
    ReceivedBlock,
    ResponseParser,
    SenderCheck,
    max_response_bytes,
    tier_of,
)  # fmt: skip

# Bytes per receive call; and the same for encrypted bytes of a TLS connection.
RECEIVE_BYTES: Final = 512 << 10
ENCRYPTED_BYTES: Final = 256 << 10
# Bytes of memory that a connection may keep for its next response.
_MAX_KEPT_BUFFER: Final = 16 << 20
# Offset of the smoothed round-trip time, in microseconds, in struct tcp_info.
_RTT: Final = 68
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WrongBytes:
    """The peer sent other bytes than those of the block. moved: it moved or evicted the block meanwhile."""

    moved: bool


BlockOutcome = PeerBlock | WrongBytes | BlockStatus


@dataclass(slots=True, eq=False)
class PeerExchange:
    """A request in progress. The loop makes it; the receiver then writes to it until it is done."""

    keys: Sequence[bytes]
    lengths: Sequence[int]
    # Monotonic seconds.
    sent_at: float
    # The check of the responding node; None accepts any node.
    sender_check: SenderCheck | None = None
    parser: ResponseParser = field(init=False)
    first_byte_at: float = 0.0  # when the first byte of the response arrived; 0 before
    last_byte_at: float = 0.0  # when the last bytes arrived, or were sent
    last_heartbeat: float = 0.0  # when the last proof arrived that the peer serves or fetches blocks; 0 before
    # Once at most this many bytes are missing, the receiver reports it, so that the next request can go out. 0: never.
    tail_bytes: int = 0

    def __post_init__(self) -> None:
        self.parser = ResponseParser(self.lengths, self.sender_check)
        self.last_byte_at = self.sent_at


@dataclass(frozen=True, slots=True, eq=False)
class ReceiverReport:
    """A report of the receiver about one connection."""

    connection: "PeerConnection"
    exchange: PeerExchange | None
    # By number in the request.
    outcomes: Sequence[tuple[int, BlockOutcome]] = ()
    refused: PeerRefusal | None = None
    # The response is complete; or all but its tail has arrived.
    is_complete: bool = False
    has_only_tail_left: bool = False
    # The connection is closed, and the reason.
    has_ended: bool = False
    reason: str = ""
    # The peer sent an invalid response.
    is_invalid: bool = False


class PeerConnection:
    """One connection to a peer, without or with TLS."""

    def __init__(self, link: socket.socket, tls: PeerTls | None, peer: str, card: NetworkCard) -> None:
        """link: a non-blocking socket. peer: id of the node. card: the one of this node that the connection goes
        through."""
        self.peer = peer
        self.card = card
        self.response_count = 0  # responses received on this connection
        self.idle_since = 0.0  # loop time
        self.exchange: PeerExchange | None = None
        self.is_closing = False
        self._link = link
        self._tls = tls
        self._lock = threading.Lock()  # guards the TLS state
        self._encrypted = memoryview(bytearray(ENCRYPTED_BYTES)) if tls is not None else memoryview(b"")
        self._memory: npt.NDArray[np.uint8] | None = None
        self._lent_views: list[Callable[[], object]] = []  # weak references to views of `_memory` that were given away
        self._view = memoryview(b"")
        self._filled = 0

    def fileno(self) -> int:
        return self._link.fileno()

    # --- used by the event loop -----------------------------------------------------------------------------------

    def send(self, exchange: PeerExchange, request: bytes) -> None:
        """Send a request. Raises OSError if the connection does not take it whole."""
        self._view = self._allocate_buffer(max_response_bytes(exchange.lengths))
        self._filled = 0
        self.exchange = exchange
        if self._tls is not None:
            with self._lock:
                try:
                    self._tls.session.write(request)
                except ssl.SSLError as error:
                    raise ConnectionError(str(error)) from None
                request = self._tls.outgoing.read()
        if self._link.send(request) < len(request):
            raise ConnectionError("the connection takes no more requests")

    def limit_receive_buffer(self, window: int) -> None:
        """Limit the kernel's receive buffer to *window* bytes."""
        with contextlib.suppress(OSError):
            self._link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)

    def abort(self) -> None:
        """Shut the connection down: the receiver then closes it."""
        self.is_closing = True
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)

    def round_trip(self) -> float:
        """Return TCP's smoothed round-trip time in seconds; 0 if it is unknown."""
        try:
            info = self._link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT + 4)
        except OSError:
            return 0.0
        return int.from_bytes(info[_RTT : _RTT + 4], "little") / 1e6

    def _allocate_buffer(self, size: int) -> memoryview:
        """Return memory for a response: that of the last one, if no view of it is left. The kernel would have to clear
        new memory page by page, which takes as long as receiving into it."""
        self._lent_views = [handed for handed in self._lent_views if handed() is not None]
        if self._memory is None or self._lent_views or not size <= len(self._memory) <= max(size * 8, _MAX_KEPT_BUFFER):
            self._memory, self._lent_views = np.empty(size, np.uint8), []
        return self._memory.data[:size]

    # --- used by the receiver -------------------------------------------------------------------------------------

    def receive(self) -> ReceiverReport | None:
        """Read what has arrived. Return None if there is nothing to report yet."""
        exchange = self.exchange
        if exchange is None:
            return self._receive_idle()
        outcomes: list[tuple[int, BlockOutcome]] = []
        refused: PeerRefusal | None = None
        parser = exchange.parser
        try:
            while not parser.is_done:
                if self._filled == len(self._view):
                    raise InvalidResponse("a response has more bytes than its limit")
                count = self._read(self._view[self._filled : self._filled + RECEIVE_BYTES])
                if count == 0:
                    reason = "the connection was closed"
                    return ReceiverReport(self, exchange, outcomes, refused, has_ended=True, reason=reason)
                exchange.last_byte_at = time.monotonic()
                exchange.first_byte_at = exchange.first_byte_at or exchange.last_byte_at
                self._filled += count
                signs = parser.heartbeats
                for item in parser.parse(self._view[: self._filled]):
                    if isinstance(item, PeerRefusal):
                        refused = item
                    else:
                        outcomes.append((item.at, self._verify_block(item, exchange)))
                if parser.heartbeats != signs or parser.needed_until > self._filled:
                    exchange.last_heartbeat = exchange.last_byte_at
                self._filled = parser.rewind(self._filled)
                if self._tls is None and count < RECEIVE_BYTES:
                    break
        except BlockingIOError:
            pass
        except InvalidResponse as error:
            return ReceiverReport(self, exchange, outcomes, refused, has_ended=True, reason=str(error), is_invalid=True)
        except OSError as error:
            return ReceiverReport(
                self, exchange, outcomes, refused, has_ended=True, reason=error.strerror or str(error)
            )
        if parser.is_done:
            self.exchange = None
            self.response_count += 1
            self._view = memoryview(b"")
            return ReceiverReport(self, exchange, outcomes, refused, is_complete=True, has_ended=parser.is_last)
        is_tail = exchange.tail_bytes > 0 and len(self._view) - self._filled <= exchange.tail_bytes
        if is_tail:
            exchange.tail_bytes = 0
        return ReceiverReport(self, exchange, outcomes, has_only_tail_left=is_tail) if outcomes or is_tail else None

    def close(self) -> None:
        self._link.close()

    def _verify_block(self, item: ReceivedBlock | BlockStatus, exchange: PeerExchange) -> BlockOutcome:
        if isinstance(item, BlockStatus):
            return item
        if not pieces_match(exchange.keys[item.at], item.checksums, 0, item.data):
            return WrongBytes(moved=not item.stayed)
        # An array of its own: it lives as long as any view of it.
        part = np.frombuffer(item.data, np.uint8)
        self._lent_views.append(weakref.ref(part))
        return PeerBlock(part.data, item.checksums, tier_of(item.tier))

    def _receive_idle(self) -> ReceiverReport | None:
        """Read while no request is in progress: only the end of the connection is valid then."""
        try:
            reason = "" if not self._link.recv(1) else "unrequested bytes arrived"
        except BlockingIOError:
            return None
        except OSError as error:
            reason = error.strerror or str(error)
        return ReceiverReport(self, None, has_ended=True, reason=reason)

    def _read(self, view: memoryview) -> int:
        """Read into *view*. Return 0 at the end of the connection. Raises BlockingIOError, OSError."""
        if self._tls is None:
            return self._link.recv_into(view)
        with self._lock:
            return self._decrypt(self._tls, view)

    def _decrypt(self, tls: PeerTls, view: memoryview) -> int:
        session: Any = tls.session  # typeshed does not know that read() takes a buffer
        got = 0
        while got < len(view):
            try:
                count: int = session.read(len(view) - got, view[got:])  # a record of 16 KiB at most
            except ssl.SSLWantReadError:
                if got:
                    break
                count = self._link.recv_into(self._encrypted)
                if count == 0:
                    break
                tls.incoming.write(self._encrypted[:count])
                continue
            except ssl.SSLZeroReturnError:
                break
            if count == 0:
                break
            got += count
        return got


class PeerReceiver:
    """Receives on all connections given to it. Made on the event loop.

    One thread receives 1.4 GB/s; more threads would contend for the interpreter lock with each other and with the loop.
    """

    def __init__(self, on_report: Callable[[ReceiverReport], None]) -> None:
        """on_report: called on the loop with all news, in order."""
        self._on_report = on_report
        self._loop = asyncio.get_running_loop()
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._wake, select.EPOLLIN)
        self._connections: dict[int, PeerConnection] = {}  # by descriptor
        self._reports: deque[ReceiverReport] = deque()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self._thread.start()

    def add(self, connection: PeerConnection) -> None:
        """Receive on the connection from now on."""
        self._connections[connection.fileno()] = connection
        self._poll.register(connection, select.EPOLLIN | select.EPOLLRDHUP)

    def close(self) -> None:
        """Close all connections. No news is reported any more."""
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for connection in self._connections.values():
            connection.close()
        self._poll.close()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._is_closing:
            for descriptor, _ in self._poll.poll():
                connection = self._connections.get(descriptor)
                if connection is not None:
                    self._receive(descriptor, connection)

    def _receive(self, descriptor: int, connection: PeerConnection) -> None:
        try:
            report = connection.receive()
        except Exception as error:  # a bug costs this connection only
            report = ReceiverReport(
                connection, connection.exchange, has_ended=True, reason=f"internal error ({error!r})", is_invalid=True
            )
        if report is None:
            return
        if report.has_ended:
            del self._connections[descriptor]
            self._poll.unregister(descriptor)
            connection.close()
        self._reports.append(report)
        if len(self._reports) == 1:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._deliver_reports)

    def _deliver_reports(self) -> None:
        while self._reports:
            # An item leaves the deque after it was handled, so that items that arrive meanwhile need no call.
            try:
                self._on_report(self._reports[0])
            except Exception:  # a bug costs this item only: no other call would handle the items behind it
                log.exception("internal error with a response of node %s", self._reports[0].connection.peer)
            finally:
                self._reports.popleft()
