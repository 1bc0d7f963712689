"""A connection of a peer server: with timeouts for each step, and with files as a source of bytes."""

import os
import select
import socket
import ssl
import struct
import time
from typing import Final, Protocol

# Seconds without progress after which a connection is given up; and the kernel's limit for unacknowledged bytes
# (TCP_USER_TIMEOUT), after which a stopped or cut-off peer is noticed.
STALLED_SECONDS: Final = 10.0
USER_TIMEOUT_MS: Final = 5_000
# Bytes that are encrypted and sent at once.
_SEND_BYTES: Final = 256 << 10
# Offset of the number of retransmitted packets (tcpi_total_retrans) in struct tcp_info; and the bytes to read.
_RETRANSMITTED: Final = 100
_TCP_INFO_SIZE: Final = 104


class ConnectionLost(Exception):
    """The other side closed the connection, stalls, or is refused."""

    def __init__(self, text: str = "", kind: str = "connections") -> None:
        super().__init__(text)
        self.kind = kind  # kind of fault, for the log


class Wire(Protocol):
    """One connection, plain or encrypted. Used by one thread."""

    def wait_readable(self, seconds: float) -> bool:
        """Return whether there is, or arrives within *seconds*, anything to read."""

    def receive(self, most: int, seconds: float) -> bytes:
        """Return what has arrived, at least one byte. Raises ConnectionLost."""

    def send(self, data: bytes | bytearray | memoryview, *, more: bool = False) -> None:
        """Send *data*. more: other bytes follow at once. Raises ConnectionLost."""

    def send_file(self, descriptor: int, offset: int, count: int, until: float) -> None:
        """Send bytes of a file by *until* (monotonic seconds). Raises ConnectionLost; OSError if the file cannot be
        read."""

    def retransmitted_packets(self) -> int:
        """Return the number of packets retransmitted so far."""

    def close(self) -> None:
        """Close the connection at once."""


def set_socket_options(connection: socket.socket) -> None:
    """Set the socket options that all connections between nodes share."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
    for option, value in (
        (socket.TCP_KEEPIDLE, 5),
        (socket.TCP_KEEPINTVL, 2),
        (socket.TCP_KEEPCNT, 3),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class PlainWire:
    """A connection without encryption: the kernel sends files itself."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setblocking(True)
        stalled = struct.pack("ll", int(STALLED_SECONDS), 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, stalled)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN | select.POLLRDHUP)

    def wait_readable(self, seconds: float) -> bool:
        return bool(self._poll.poll(max(0, seconds * 1000)))

    def receive(self, most: int, seconds: float) -> bytes:
        if not self.wait_readable(seconds):
            raise ConnectionLost(f"nothing was received for {seconds:.0f} s")
        try:
            data = self._connection.recv(most, socket.MSG_DONTWAIT)
        except OSError as error:
            raise ConnectionLost(str(error)) from None
        if not data:
            raise ConnectionLost
        return data

    def send(self, data: bytes | bytearray | memoryview, *, more: bool = False) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[self._connection.send(view, socket.MSG_MORE if more else 0) :]
        except OSError as error:
            raise ConnectionLost(str(error)) from None

    def send_file(self, descriptor: int, offset: int, count: int, until: float) -> None:
        target, end = self._connection.fileno(), offset + count
        while offset < end:
            try:
                sent = os.sendfile(target, descriptor, offset, end - offset)
            except (BlockingIOError, ConnectionError, TimeoutError) as error:
                raise ConnectionLost(str(error)) from None
            if sent == 0:
                raise OSError("the segment is shorter than its entry in the index")
            offset += sent
            if offset < end and time.monotonic() > until:
                raise ConnectionLost("the client reads too slowly")

    def retransmitted_packets(self) -> int:
        return _retransmitted(self._connection)

    def close(self) -> None:
        self._connection.close()


class TlsWire:
    """A connection with TLS: file bytes are read into memory first."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        """connection: after its handshake."""
        self.connection = connection
        connection.settimeout(STALLED_SECONDS)
        self._room = memoryview(bytearray(_SEND_BYTES))
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN | select.POLLRDHUP)
        self._kept = bytearray()  # small bytes that precede the next ones: they get no TLS record of their own

    def wait_readable(self, seconds: float) -> bool:
        return bool(self.connection.pending() or self._poll.poll(max(0, seconds * 1000)))

    def receive(self, most: int, seconds: float) -> bytes:
        if not self.wait_readable(seconds):
            raise ConnectionLost(f"nothing was received for {seconds:.0f} s")
        try:
            data = self.connection.recv(most)
        except OSError as error:
            raise ConnectionLost(str(error)) from None
        if not data:
            raise ConnectionLost
        return data

    def send(self, data: bytes | bytearray | memoryview, *, more: bool = False) -> None:
        self._kept += data
        if not more:
            self._flush()

    def send_file(self, descriptor: int, offset: int, count: int, until: float) -> None:
        end = offset + count
        while offset < end:
            kept = len(self._kept)
            step = min(end - offset, len(self._room) - kept)
            self._room[:kept] = self._kept
            self._kept.clear()
            if os.preadv(descriptor, [self._room[kept : kept + step]], offset) < step:
                raise OSError("the segment is shorter than its entry in the index")
            self._send(self._room[: kept + step])
            offset += step
            if offset < end and time.monotonic() > until:
                raise ConnectionLost("the client reads too slowly")

    def _flush(self) -> None:
        data, self._kept = self._kept, bytearray()
        if data:
            self._send(memoryview(data))

    def _send(self, data: memoryview) -> None:
        try:
            self.connection.sendall(data)
        except OSError as error:
            raise ConnectionLost(str(error)) from None

    def retransmitted_packets(self) -> int:
        return _retransmitted(self.connection)

    def close(self) -> None:
        self.connection.close()


def _retransmitted(connection: socket.socket) -> int:
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
    except OSError:
        return 0
    return int.from_bytes(info[_RETRANSMITTED:_TCP_INFO_SIZE], "little") if len(info) >= _TCP_INFO_SIZE else 0
