"""A connection to a peer, once it is made: the event loop sends a question on it, and a thread receives the answer.

While no question is under way it belongs to the loop, else to its receiver, which also closes it: what ends it in the
loop only shuts it down.
"""

import contextlib
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachefs.block import pieces_match
from cachefs_daemon.peers.answers import PeerBlock
from cachefs_daemon.peers.connecting import Tls
from cachefs_daemon.peers.protocol import (
    AnswerParser,
    BadAnswer,
    Block,
    NoBlock,
    Refused,
    SenderCheck,
    answer_room,
    tier_of,
)  # fmt: skip

# Bytes that are received at once, and those of a TLS connection before they are decrypted.
AT_ONCE: Final = 512 << 10
ENCRYPTED_AT_ONCE: Final = 256 << 10
# Memory that a connection keeps for its next answer, at most.
_MOST_KEPT: Final = 16 << 20
# Of struct tcp_info: where the smoothed round-trip time is, in microseconds.
_RTT: Final = 68


@dataclass(frozen=True, slots=True)
class WrongBytes:
    """What came was not the block. moved: the peer has evicted it meanwhile."""

    moved: bool


Outcome = PeerBlock | WrongBytes | NoBlock


@dataclass(slots=True, eq=False)
class Exchange:
    """A question under way. The loop makes it, and the receiver then writes into it until it is done."""

    keys: Sequence[bytes]
    lengths: Sequence[int]
    # Monotonic seconds.
    sent: float
    # Of who answers; None: any node may.
    check: SenderCheck | None = None
    parser: AnswerParser = field(init=False)
    first: float = 0.0  # when the first byte of the answer came; 0 before
    last: float = 0.0  # when the last bytes came, or were sent
    sign: float = 0.0  # when the last came that show that the peer gives blocks, or brings them; 0 before
    # Where so few bytes are left to come, it is told once: the next question can be asked. 0 for never.
    tail: int = 0

    def __post_init__(self) -> None:
        self.parser = AnswerParser(self.lengths, self.check)
        self.last = self.sent


@dataclass(frozen=True, slots=True, eq=False)
class News:
    """What a receiver has to tell of a connection."""

    connection: "PeerConnection"
    exchange: Exchange | None
    # By number in the question.
    outcomes: Sequence[tuple[int, Outcome]] = ()
    refused: Refused | None = None
    # The answer is whole; or all but its tail has come.
    done: bool = False
    is_tail: bool = False
    # The connection is closed; why.
    ended: bool = False
    reason: str = ""
    # What came was no answer.
    is_bad: bool = False


class PeerConnection:
    """One connection."""

    def __init__(self, link: socket.socket, tls: Tls | None, peer: str) -> None:
        """link: does not block. peer: id of the node."""
        self.peer = peer
        self.used = 0  # answers that have come on it
        self.idle_since = 0.0  # loop time
        self.exchange: Exchange | None = None
        self.is_closing = False
        self._link = link
        self._tls = tls
        self._lock = threading.Lock()  # of what TLS remembers
        self._encrypted = memoryview(bytearray(ENCRYPTED_AT_ONCE)) if tls is not None else memoryview(b"")
        self._memory: npt.NDArray[np.uint8] | None = None
        self._handed: list[Callable[[], object]] = []  # parts of it that were given away: None once nobody has them
        self._view = memoryview(b"")
        self._filled = 0

    def fileno(self) -> int:
        return self._link.fileno()

    # --- the loop -------------------------------------------------------------------------------------------------

    def send(self, exchange: Exchange, request: bytes) -> None:
        """Ask. Raises OSError where the connection does not take it."""
        self._view = self._room(answer_room(exchange.lengths))
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
            raise ConnectionError("it takes no more questions")

    def limit(self, window: int) -> None:
        """Have the kernel take at most so many bytes that nobody has received yet."""
        with contextlib.suppress(OSError):
            self._link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)

    def abort(self) -> None:
        """Nothing that comes is wanted any more: the receiver closes it."""
        self.is_closing = True
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)

    def round_trip(self) -> float:
        """Seconds, as TCP has measured it; 0 where nobody knows."""
        try:
            info = self._link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT + 4)
        except OSError:
            return 0.0
        return int.from_bytes(info[_RTT : _RTT + 4], "little") / 1e6

    def _room(self, size: int) -> memoryview:
        """Memory for an answer: that of the last one, once nobody has any of it any more. The kernel would have to
        clear new memory page by page, which takes as long as to receive it."""
        self._handed = [handed for handed in self._handed if handed() is not None]
        if self._memory is None or self._handed or not size <= len(self._memory) <= max(size * 8, _MOST_KEPT):
            self._memory, self._handed = np.empty(size, np.uint8), []
        return self._memory.data[:size]

    # --- its receiver ---------------------------------------------------------------------------------------------

    def receive(self) -> News | None:
        """What has come. None where there is nothing to tell yet."""
        exchange = self.exchange
        if exchange is None:
            return self._receive_unasked()
        outcomes: list[tuple[int, Outcome]] = []
        refused: Refused | None = None
        parser = exchange.parser
        try:
            while not parser.is_done:
                if self._filled == len(self._view):
                    raise BadAnswer("an answer has more bytes than it may have")
                count = self._read(self._view[self._filled : self._filled + AT_ONCE])
                if count == 0:
                    reason = "the connection was closed"
                    return News(self, exchange, outcomes, refused, ended=True, reason=reason)
                exchange.last = time.monotonic()
                exchange.first = exchange.first or exchange.last
                self._filled += count
                signs = parser.signs
                for item in parser.parse(self._view[: self._filled]):
                    if isinstance(item, Refused):
                        refused = item
                    else:
                        outcomes.append((item.at, self._judged(item, exchange)))
                if parser.signs != signs or parser.wanted_to > self._filled:
                    exchange.sign = exchange.last
                self._filled = parser.rewind(self._filled)
                if self._tls is None and count < AT_ONCE:
                    break
        except BlockingIOError:
            pass
        except BadAnswer as error:
            return News(self, exchange, outcomes, refused, ended=True, reason=str(error), is_bad=True)
        except OSError as error:
            return News(self, exchange, outcomes, refused, ended=True, reason=error.strerror or str(error))
        if parser.is_done:
            self.exchange = None
            self.used += 1
            self._view = memoryview(b"")
            return News(self, exchange, outcomes, refused, done=True, ended=parser.is_last)
        is_tail = exchange.tail > 0 and len(self._view) - self._filled <= exchange.tail
        if is_tail:
            exchange.tail = 0
        return News(self, exchange, outcomes, is_tail=is_tail) if outcomes or is_tail else None

    def close(self) -> None:
        self._link.close()

    def _judged(self, item: Block | NoBlock, exchange: Exchange) -> Outcome:
        if isinstance(item, NoBlock):
            return item
        if not pieces_match(exchange.keys[item.at], item.checksums, 0, item.data):
            return WrongBytes(moved=not item.stayed)
        # An array of its own, as it lives for as long as anybody has any view of it.
        part = np.frombuffer(item.data, np.uint8)
        self._handed.append(weakref.ref(part))
        return PeerBlock(part.data, item.checksums, tier_of(item.tier))

    def _receive_unasked(self) -> News | None:
        """While no question is under way only its end may come."""
        try:
            reason = "" if not self._link.recv(1) else "bytes came that nobody has asked for"
        except BlockingIOError:
            return None
        except OSError as error:
            reason = error.strerror or str(error)
        return News(self, None, ended=True, reason=reason)

    def _read(self, view: memoryview) -> int:
        """0 where nothing will come any more. Raises BlockingIOError, OSError."""
        if self._tls is None:
            return self._link.recv_into(view)
        with self._lock:
            return self._decrypt(self._tls, view)

    def _decrypt(self, tls: Tls, view: memoryview) -> int:
        session: Any = tls.session  # typeshed does not know that it reads into memory
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
