"""The least that a Python client can do for a GET: the limit for the daemon's own client.

It neither signs nor checks, expects a status line, a length and as many bytes, and fails on anything else.
"""

import asyncio
from typing import Final
from urllib.parse import urlsplit

from cachefs.errors import CachefsError

_END: Final = b"\r\n\r\n"
_LENGTH: Final = b"content-length:"
_HEAD_ROOM: Final = 8 << 10


class RawConnection(asyncio.BufferedProtocol):
    """A connection that makes one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[int] | None = None
        self._view = memoryview(b"")
        self._filled = 0
        self._end = 0  # end of the response in the buffer; 0: not known yet

    async def send_request(self, request: bytes, room: int) -> int:
        """Send a request, and return the number of body bytes. room: largest body."""
        assert self._transport is not None
        self._view = memoryview(bytearray(_HEAD_ROOM + room))
        self._filled = self._end = 0
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._waiter

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if not self._end:
            head, end, _ = bytes(self._view[: min(self._filled, _HEAD_ROOM)]).partition(_END)
            if not end:
                return
            status, _, lines = head.partition(b"\r\n")
            if status[9:11] != b"20":
                self._fail(f"the server answers {status.decode()}")
                return
            length = int(lines.lower().partition(_LENGTH)[2].partition(b"\r\n")[0])
            self._end = len(head) + len(end) + length
        if self._filled == self._end and self._waiter is not None:
            self._waiter.set_result(self._filled)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("the server closed a connection")

    def _fail(self, reason: str) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(CachefsError(f"the raw client is no limit for this server: {reason}"))


class RawClient:
    """Gets URLs of one server, on as many connections as there are concurrent requests."""

    def __init__(self) -> None:
        self._free: list[RawConnection] = []

    async def get_url(self, url: str, room: int, span: str = "") -> int:
        """Return the number of body bytes. span: byte range of the object, as in the Range header; empty: all."""
        parts = urlsplit(url)
        if self._free:
            connection = self._free.pop()
        else:
            loop = asyncio.get_running_loop()
            tls = parts.scheme == "https"
            port = parts.port or (443 if tls else 80)
            _, connection = await loop.create_connection(RawConnection, parts.hostname or "", port, ssl=tls or None)
        part = f"Range: bytes={span}\r\n" if span else ""
        request = f"GET {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\n{part}\r\n"
        got = await connection.send_request(request.encode(), room)
        self._free.append(connection)
        return got
