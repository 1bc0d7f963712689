"""A throttling proxy in front of a real S3 server (see lab.slow_link).

    with throttled(server_url, Limits(latency=0.02, bandwidth=50e6), log) as throttle:
        ...                                   # reads through throttle.endpoint
        throttle.counters().bytes

The proxy is meant for reading; fill the real server directly. Each connection of a client has a connection of its own
to the server. The Host header is forwarded unchanged, so signatures of requests stay valid. Setting up a connection
costs nothing extra.

The proxy is a process of its own. It reads JSON lines of new limits from its standard input; an empty line changes
nothing. It answers each line with a line of its counters, and ends when its input ends.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from cachefs.errors import CachefsError
from cachefs_bench.lab.slow_link import LatencyModel, LinkLimits, SharedLink, TokenBucket
from cachefs_tools.child_programs import KILL_WITH_PARENT, wait_or_kill

# Large enough to cost little, and small enough for concurrent responses to share the bandwidth evenly.
CHUNK: Final = 64 << 10
BUFFER: Final = 256 << 10
SLOW_DOWN: Final = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
)
REFUSAL: Final = b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n%b" % (
    len(SLOW_DOWN), SLOW_DOWN,
)  # fmt: skip
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
# Statuses of responses without a body.
BODILESS: Final = (b"204", b"304")


@dataclass(slots=True)
class ProxyCounters:
    """Counters of the proxy since its start."""

    requests: int = 0
    refused: int = 0  # requests that were answered with 503
    bytes: int = 0  # of response bodies sent to clients
    cpu_seconds: float = 0.0  # processor time of the proxy


class Proxy:
    """Serves connections of clients, within limits."""

    def __init__(self, host: str, port: int) -> None:
        self._upstream = (host, port)
        self.counters = ProxyCounters()
        self.set_limits(LinkLimits())

    def set_limits(self, limits: LinkLimits) -> None:
        """Replace the limits from the next request on."""
        self._limits = limits
        self._latency = LatencyModel(limits)
        self._admission = TokenBucket(limits.request_rate)
        self._link = SharedLink(limits.bandwidth)

    async def serve_client(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """Serve one connection of a client until it ends."""
        pair = _ConnectionPair(client, to_client)
        with closing(pair), suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._serve_request(pair):
                pass

    async def _serve_request(self, pair: "_ConnectionPair") -> bool:
        """Serve one request. Returns whether the connection may be reused."""
        head = await pair.client.readuntil(b"\r\n\r\n")
        arrival = time.monotonic()
        if _header(head, b"expect"):
            pair.to_client.write(CONTINUE)
        body = await pair.client.readexactly(_length(head))
        self.counters.requests += 1
        if not self._admission.try_admit(arrival):
            self.counters.refused += 1
            pair.to_client.write(REFUSAL)
            await pair.to_client.drain()
            return True
        await pair.connect(self._upstream)
        pair.to_server.writelines((head, body))
        while (response_head := await pair.server.readuntil(b"\r\n\r\n"))[9:12] == b"100":
            pass  # the client has its 100 Continue already
        await _sleep_until(arrival + self._latency.draw_latency())
        if head.startswith(b"HEAD ") or response_head[9:12] in BODILESS:
            pair.to_client.write(response_head)
        elif _header(response_head, b"transfer-encoding") == b"chunked":
            await self._send_chunked(pair, response_head)
        else:
            await self._send(pair, response_head)
        return _header(response_head, b"connection").lower() != b"close"

    async def _send(self, pair: "_ConnectionPair", head: bytes) -> None:
        """Forward the body of a response as fast as the limits allow."""
        stream, link = SharedLink(self._limits.stream_bandwidth), self._link
        left = _length(head)
        pair.to_client.write(head)
        while left:
            chunk = await pair.server.read(min(left, CHUNK))
            if not chunk:
                raise ConnectionResetError("the server closed the connection within an answer")
            left -= len(chunk)
            await _sleep_until(stream.reserve_time(len(chunk), time.monotonic()))
            await _sleep_until(link.reserve_time(len(chunk), time.monotonic()))
            pair.to_client.write(chunk)
            self.counters.bytes += len(chunk)
            await pair.to_client.drain()

    async def _send_chunked(self, pair: "_ConnectionPair", head: bytes) -> None:
        """Forward a chunked body chunk by chunk. Listings have such bodies."""
        pair.to_client.write(head)
        size = -1
        while size:
            line = await pair.server.readline()
            size = int(line.split(b";")[0], 16)
            data = await pair.server.readexactly(size + 2)
            await _sleep_until(self._link.reserve_time(size, time.monotonic()))
            pair.to_client.writelines((line, data))
            self.counters.bytes += size
            await pair.to_client.drain()


class _ConnectionPair:
    """A connection of a client, and its connection to the server."""

    server: asyncio.StreamReader
    to_server: asyncio.StreamWriter

    def __init__(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        self.client = client
        self.to_client = to_client
        self._connected = False

    async def connect(self, upstream: tuple[str, int]) -> None:
        """Connect to the server, unless there is an open connection."""
        if self._connected and not self.server.at_eof():
            return
        if self._connected:
            self.to_server.close()
        self.server, self.to_server = await asyncio.open_connection(*upstream, limit=BUFFER)
        self._connected = True

    def close(self) -> None:
        self.to_client.close()
        if self._connected:
            self.to_server.close()


def _header(head: bytes, name: bytes) -> bytes:
    """Return the value of a header in lower case; empty if it is absent. The name is in lower case."""
    _, found, remainder = head.lower().partition(b"\r\n" + name + b":")
    return remainder[: remainder.index(b"\r\n")].strip() if found else b""


def _length(head: bytes) -> int:
    return int(_header(head, b"content-length") or 0)


async def _sleep_until(when: float) -> None:
    seconds = when - time.monotonic()
    if seconds > 0:
        await asyncio.sleep(seconds)


class Throttle:
    """A running proxy, in the process that started it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.pid = process.pid
        self._commands, self._responses = process.stdin, process.stdout
        self.endpoint = self._read_line().decode().strip()  # the URL of the proxy

    def set_limits(self, limits: LinkLimits) -> None:
        """Replace the limits. Raises CachefsError if the proxy has ended."""
        self._send_line(json.dumps(asdict(limits)).encode())

    def read_counters(self) -> ProxyCounters:
        """Return the present counters. Raises CachefsError if the proxy has ended."""
        return self._send_line(b"")

    def _send_line(self, line: bytes) -> ProxyCounters:
        with suppress(BrokenPipeError):
            self._commands.write(line + b"\n")
            self._commands.flush()
        return msgspec.json.decode(self._read_line(), type=ProxyCounters)

    def _read_line(self) -> bytes:
        line = self._responses.readline()
        if not line:
            raise CachefsError("the throttling proxy has ended; see its log")
        return line


@contextmanager
def run_throttle(
    upstream: str, limits: LinkLimits, log: Path, listener: socket.socket | None = None
) -> Iterator[Throttle]:
    """Run a proxy in front of the URL *upstream*. It accepts from *listener*, which may be of another network
    namespace; None: on a loopback port."""
    descriptors = () if listener is None else (listener.fileno(),)
    command = [*KILL_WITH_PARENT, sys.executable, "-m", "cachefs_bench.lab.throttle", upstream, *map(str, descriptors)]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
            pass_fds=descriptors,
        )  # fmt: skip
    try:
        throttle = Throttle(process)
        throttle.set_limits(limits)
        yield throttle
    finally:
        process.terminate()
        wait_or_kill(process)


async def _run(upstream: str, listener: socket.socket | None) -> None:
    # A real network does not wait for this machine's processors, so the proxy has priority over other processes.
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    parts = urlsplit(upstream)
    proxy = Proxy(parts.hostname or "127.0.0.1", parts.port or 80)
    listener = listener or socket.create_server(("127.0.0.1", 0))
    server = await asyncio.start_server(proxy.serve_client, sock=listener, limit=BUFFER, backlog=1024)
    host, port = server.sockets[0].getsockname()
    _write_line(f"http://{host}:{port}")
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin.buffer)
    while line := await commands.readline():
        if line.strip():
            proxy.set_limits(msgspec.json.decode(line, type=LinkLimits))
        proxy.counters.cpu_seconds = time.process_time()
        _write_line(json.dumps(asdict(proxy.counters)))


def _write_line(line: str) -> None:
    os.write(sys.stdout.fileno(), line.encode() + b"\n")


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[1], socket.socket(fileno=int(sys.argv[2])) if len(sys.argv) > 2 else None))
