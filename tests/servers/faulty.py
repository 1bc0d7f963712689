"""A proxy in front of a real HTTP server that counts requests and breaks chosen answers in chosen ways.

    with faulty.running(server.endpoint) as proxy:
        proxy.add(Fault(path="/images/7.jpg", truncate=1000, times=2))
        ...                                   # reads through proxy.endpoint
        assert proxy.count(path="/images/7.jpg") == 3

The proxy is meant for reading; fill the real server directly. It runs in a thread of its own, and makes a new
connection to the server for each request. The Host header is passed on as the client sent it, so signatures of requests
stay valid.
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class Fault:
    """Which requests go wrong, and how. Whatever goes wrong may be combined."""

    path: str = ""  # any part of the request's path and query, percent-encoded
    head: str = ""  # any part of the request's head
    method: str = "GET"
    times: int | None = 1  # how many requests go wrong; None: all
    delay: float = 0  # seconds before anything is done
    drop: bool = False  # close the connection without an answer
    status: int | None = None  # answer with this status, and do not ask the server
    body: bytes = b""  # of such an answer
    headers: Mapping[str, str] = field(default_factory=dict)  # set in the answer
    truncate: int | None = None  # close the connection after so many bytes of the body
    cut: int | None = None  # close the connection after so many bytes of the answer
    extra: bytes = b""  # added to the body; Content-Length counts it
    replace: bytes | None = None  # answer with status 200 and this body, without Content-Range
    before: bytes = b""  # sent before the answer, such as an interim one
    chunked: bool = False  # the body comes in chunks, and without a length
    astray: bool = False  # send what was sent last on this connection, which answers another request
    reset: bool = False  # where the connection is closed, it is reset
    pace: float = 0  # seconds between two parts of 16 KiB

    def hits(self, method: str, path: str, head: str) -> bool:
        """Whether such a request goes wrong."""
        return self.times != 0 and method == self.method and self.path in path and self.head in head


class FaultyProxy:
    """The proxy, seen from the test."""

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname, parts.port)
        self._faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []  # (method, path) of all requests so far, in the order of arrival
        self.endpoint = ""  # the URL of the proxy, once it runs

    def add(self, *faults: Fault) -> None:
        """Add faults. Where several fit a request, the one that was added first happens."""
        self._faults += faults

    def clear(self) -> None:
        """Remove all faults."""
        self._faults.clear()

    def count(self, method: str = "GET", path: str = "") -> int:
        """The number of requests so far with this method, and with *path* in their path or query."""
        return sum(method == made and path in asked for made, asked in self.requests)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection of a client until it ends."""
        last = [b""]  # the answer that was sent last
        with closing(writer), suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._answer(reader, writer, last):
                pass

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, last: list[bytes]) -> bool:
        """Serve one request. Returns whether the connection may be used again."""
        head = await reader.readuntil(b"\r\n\r\n")
        start, headers = _parse_head(head)
        method, path, _ = start.split(" ", 2)
        goes_on = headers.get("connection", "").lower() != "close"
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        self.requests.append((method, path))
        fault = self._fault_for(method, path, head.decode())
        await asyncio.sleep(fault.delay)
        if fault.reset:
            link = writer.get_extra_info("socket")
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if fault.drop:
            return False
        if fault.astray and last[0]:
            writer.write(last[0])
            await writer.drain()
            return True
        if fault.status is not None:
            headers = "".join(f"{name}: {value}\r\n" for name, value in fault.headers.items())
            start = f"HTTP/1.1 {fault.status} Fault\r\nContent-Length: {len(fault.body)}\r\n{headers}\r\n"
            writer.write(start.encode() + fault.body)
            await writer.drain()
            return True
        last[0], whole = await self._ask(head, body, fault, has_body=method != "HEAD")
        if fault.cut is not None:
            last[0], whole = last[0][: fault.cut], whole and fault.cut >= len(last[0])
        parts = range(0, len(last[0]), 16 << 10) if fault.pace else range(0, 1, 1)
        for start in parts:
            writer.write(last[0][start : start + (16 << 10) if fault.pace else None])
            await writer.drain()
            await asyncio.sleep(fault.pace)
        return whole and goes_on

    async def _ask(self, head: bytes, body: bytes, fault: Fault, has_body: bool) -> tuple[bytes, bool]:
        """What the server answers, with what the fault makes of it; and whether that is a whole answer."""
        reader, writer = await asyncio.open_connection(*self._upstream)
        with closing(writer):
            writer.write(head[:-2] + b"Connection: close\r\n\r\n" + body)
            start, headers = _parse_head(await reader.readuntil(b"\r\n\r\n"))
            answer = await reader.read() if has_body else b""
        if headers.pop("transfer-encoding", "") == "chunked":
            answer = _dechunked(answer)
        if fault.replace is not None:
            start, answer = "HTTP/1.1 200 OK", fault.replace
            headers.pop("content-range", None)
        if has_body:
            answer += fault.extra
            headers["content-length"] = str(len(answer))
        headers.pop("connection", None)
        headers |= {name.lower(): value for name, value in fault.headers.items()}
        whole = fault.truncate is None and int(headers.get("content-length", "0")) == len(answer)
        if fault.chunked:
            del headers["content-length"]
            headers["transfer-encoding"] = "chunked"
            answer = (b"%x\r\n%b\r\n" % (len(answer), answer) if answer else b"") + b"0\r\n\r\n"
        lines = start + "".join(f"\r\n{name}: {value}" for name, value in headers.items()) + "\r\n\r\n"
        return fault.before + lines.encode() + (answer if fault.truncate is None else answer[: fault.truncate]), whole

    def _fault_for(self, method: str, path: str, head: str) -> Fault:
        for fault in self._faults:
            if fault.hits(method, path, head):
                if fault.times is not None:
                    fault.times -= 1
                return fault
        return Fault()


@contextmanager
def running(upstream: str) -> Iterator[FaultyProxy]:
    """A proxy on a loopback port in front of the URL *upstream*."""
    proxy = FaultyProxy(upstream)
    with serving(proxy):
        yield proxy


@contextmanager
def serving(proxy: FaultyProxy) -> Iterator[None]:
    """The proxy runs, on a loopback port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="faulty-proxy", daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(asyncio.start_server(proxy.serve, "127.0.0.1", 0), loop).result(10)
    proxy.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(_shut_down(server), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


async def _shut_down(server: asyncio.Server) -> None:
    server.close()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _parse_head(head: bytes) -> tuple[str, dict[str, str]]:
    """The first line and the headers of a request or an answer. Names of headers are in lower case."""
    start, *lines = head.decode("latin-1").split("\r\n")[:-2]
    return start, {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _dechunked(body: bytes) -> bytes:
    data = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        data += body[:length]
        body = body[length + 2 :]
    return data
