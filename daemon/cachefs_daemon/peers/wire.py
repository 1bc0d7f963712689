"""A connection as a peer server has it: with deadlines for each step, and with bytes of files sent to it."""

import os
import select
import socket
import ssl
import struct
import time
from typing import Final, Protocol

# Seconds without any progress after which a connection is given up, and after which the kernel gives it up while bytes
# wait to be acknowledged (facts of TCP_USER_TIMEOUT: a peer that was stopped or cut off is noticed after so long).
STALLED_SECONDS: Final = 10.0
USER_TIMEOUT_MS: Final = 5_000
# Bytes that are encrypted and sent at once.
_AT_ONCE: Final = 256 << 10
# Of struct tcp_info: where the count of retransmitted packets is (tcpi_total_retrans), and how much is asked for.
_RETRANSMITTED: Final = 100
_TCP_INFO_SIZE: Final = 104


class Gone(Exception):
    """The other side has closed the connection, or does not go on, or may not."""

    def __init__(self, text: str = "", kind: str = "connections") -> None:
        super().__init__(text)
        self.kind = kind  # of what happened: for the log


class Wire(Protocol):
    """One connection. Used by one thread."""

    def wait(self, seconds: float) -> bool:
        """Has it anything to be read, or becomes so within that time?"""

    def receive(self, most: int, seconds: float) -> bytes:
        """What has come, at least a byte. Raises Gone."""

    def send(self, data: bytes | bytearray | memoryview, *, more: bool = False) -> None:
        """more: something follows at once. Raises Gone."""

    def send_file(self, descriptor: int, offset: int, count: int, until: float) -> None:
        """Bytes of a file, by *until* (monotonic seconds). Raises Gone; OSError where the file cannot be read."""

    def retransmitted(self) -> int:
        """Packets that were sent again so far."""

    def close(self) -> None:
        """At once."""


def prepare(connection: socket.socket) -> None:
    """Set what all connections between nodes have."""
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
    """Without encryption: the kernel sends files by itself."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setblocking(True)
        stalled = struct.pack("ll", int(STALLED_SECONDS), 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, stalled)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN | select.POLLRDHUP)

    def wait(self, seconds: float) -> bool:
        return bool(self._poll.poll(max(0, seconds * 1000)))

    def receive(self, most: int, seconds: float) -> bytes:
        if not self.wait(seconds):
            raise Gone(f"nothing has come for {seconds:.0f} s")
        try:
            data = self._connection.recv(most, socket.MSG_DONTWAIT)
        except OSError as error:
            raise Gone(str(error)) from None
        if not data:
            raise Gone
        return data

    def send(self, data: bytes | bytearray | memoryview, *, more: bool = False) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[self._connection.send(view, socket.MSG_MORE if more else 0) :]
        except OSError as error:
            raise Gone(str(error)) from None

    def send_file(self, descriptor: int, offset: int, count: int, until: float) -> None:
        target, end = self._connection.fileno(), offset + count
        while offset < end:
            try:
                sent = os.sendfile(target, descriptor, offset, end - offset)
            except (BlockingIOError, ConnectionError, TimeoutError) as error:
                raise Gone(str(error)) from None
            if sent == 0:
                raise OSError("the segment is shorter than the index says")
            offset += sent
            if offset < end and time.monotonic() > until:
                raise Gone("it reads too slowly")

    def retransmitted(self) -> int:
        return _retransmitted(self._connection)

    def close(self) -> None:
        self._connection.close()


class TlsWire:
    """With encryption: what is sent is read into memory first."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        """connection: after its handshake."""
        self.connection = connection
        connection.settimeout(STALLED_SECONDS)
        self._room = memoryview(bytearray(_AT_ONCE))
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN | select.POLLRDHUP)
        self._kept = bytearray()  # what goes before the next bytes: a record is not made for so little

    def wait(self, seconds: float) -> bool:
        return bool(self.connection.pending() or self._poll.poll(max(0, seconds * 1000)))

    def receive(self, most: int, seconds: float) -> bytes:
        if not self.wait(seconds):
            raise Gone(f"nothing has come for {seconds:.0f} s")
        try:
            data = self.connection.recv(most)
        except OSError as error:
            raise Gone(str(error)) from None
        if not data:
            raise Gone
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
                raise OSError("the segment is shorter than the index says")
            self._send(self._room[: kept + step])
            offset += step
            if offset < end and time.monotonic() > until:
                raise Gone("it reads too slowly")

    def _flush(self) -> None:
        data, self._kept = self._kept, bytearray()
        if data:
            self._send(memoryview(data))

    def _send(self, data: memoryview) -> None:
        try:
            self.connection.sendall(data)
        except OSError as error:
            raise Gone(str(error)) from None

    def retransmitted(self) -> int:
        return _retransmitted(self.connection)

    def close(self) -> None:
        self.connection.close()


def _retransmitted(connection: socket.socket) -> int:
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
    except OSError:
        return 0
    return int.from_bytes(info[_RETRANSMITTED:_TCP_INFO_SIZE], "little") if len(info) >= _TCP_INFO_SIZE else 0
