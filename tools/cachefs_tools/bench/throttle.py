"""A proxy in front of a real S3 server, in a process of its own, that is as slow as it is told (see bench.link).

    with throttled(server_url, Limits(latency=0.02, bandwidth=50e6), log) as throttle:
        ...                                   # reads through throttle.endpoint
        throttle.counters().bytes

It is meant for reading: fill the real server directly. Each connection of a client has one to the server; the Host
header is passed on as the client sent it, so that request signatures stay valid. Setting up a connection costs nothing
extra. The process reads one JSON line of limits from its standard input, again whenever they shall change (an empty
line changes nothing), answers each with a line of its counters, and ends with its input.
"""

import asyncio
import json
import os
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
from cachefs_tools.bench.link import Latency, Limits, Pipe, Turnstile
from cachefs_tools.scratch_node import WITH_PARENT, wait

# Large enough to cost little, small enough that concurrent answers share the bandwidth evenly.
CHUNK: Final = 64 << 10
BUFFER: Final = 256 << 10
SLOW_DOWN: Final = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
)
REFUSAL: Final = b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n%b" % (
    len(SLOW_DOWN), SLOW_DOWN,
)  # fmt: skip
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
BODILESS: Final = (b"204", b"304")


@dataclass(slots=True)
class Counters:
    """Since the proxy started. bytes: of answers' bodies sent to clients; refused: requests answered with 503;
    cpu_seconds: of the proxy process."""

    requests: int = 0
    refused: int = 0
    bytes: int = 0
    cpu_seconds: float = 0.0


class Proxy:
    def __init__(self, host: str, port: int) -> None:
        self._upstream = (host, port)
        self.counters = Counters()
        self.limit(Limits())

    def limit(self, limits: Limits) -> None:
        """From the next request on."""
        self._limits = limits
        self._latency = Latency(limits)
        self._turnstile = Turnstile(limits.request_rate)
        self._link = Pipe(limits.bandwidth)

    async def serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """One connection of a client."""
        pair = _Pair(client, to_client)
        with closing(pair), suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._answer(pair):
                pass

    async def _answer(self, pair: "_Pair") -> bool:
        """Serve one request; whether the connection may be used again."""
        head = await pair.client.readuntil(b"\r\n\r\n")
        arrival = time.monotonic()
        if _header(head, b"expect"):
            pair.to_client.write(CONTINUE)
        body = await pair.client.readexactly(_length(head))
        self.counters.requests += 1
        if not self._turnstile.admits(arrival):
            self.counters.refused += 1
            pair.to_client.write(REFUSAL)
            await pair.to_client.drain()
            return True
        await pair.connect(self._upstream)
        pair.to_server.writelines((head, body))
        while (answer := await pair.server.readuntil(b"\r\n\r\n"))[9:12] == b"100":
            pass  # we have told the client already
        await _sleep_until(arrival + self._latency.draw())
        if head.startswith(b"HEAD ") or answer[9:12] in BODILESS:
            pair.to_client.write(answer)
        elif _header(answer, b"transfer-encoding") == b"chunked":
            await self._send_chunked(pair, answer)
        else:
            await self._send(pair, answer)
        return _header(answer, b"connection").lower() != b"close"

    async def _send(self, pair: "_Pair", head: bytes) -> None:
        """Pass the answer's body on as fast as the link lets it."""
        stream, link = Pipe(self._limits.stream_bandwidth), self._link
        left = _length(head)
        pair.to_client.write(head)
        while left:
            chunk = await pair.server.read(min(left, CHUNK))
            if not chunk:
                raise ConnectionResetError("the server closed the connection within an answer")
            left -= len(chunk)
            await _sleep_until(stream.reserve(len(chunk), time.monotonic()))
            await _sleep_until(link.reserve(len(chunk), time.monotonic()))
            pair.to_client.write(chunk)
            self.counters.bytes += len(chunk)
            await pair.to_client.drain()

    async def _send_chunked(self, pair: "_Pair", head: bytes) -> None:
        """Listings: every chunk as it comes."""
        pair.to_client.write(head)
        size = -1
        while size:
            line = await pair.server.readline()
            size = int(line.split(b";")[0], 16)
            data = await pair.server.readexactly(size + 2)
            await _sleep_until(self._link.reserve(size, time.monotonic()))
            pair.to_client.writelines((line, data))
            self.counters.bytes += size
            await pair.to_client.drain()


class _Pair:
    """A client's connection, and the one to the server that serves it."""

    server: asyncio.StreamReader
    to_server: asyncio.StreamWriter

    def __init__(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        self.client = client
        self.to_client = to_client
        self._connected = False

    async def connect(self, upstream: tuple[str, int]) -> None:
        """To the server, if that has not been done yet, or the server has closed the connection since."""
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
    """The header's value, empty where there is none. name: in lower case."""
    _, found, rest = head.lower().partition(b"\r\n" + name + b":")
    return rest[: rest.index(b"\r\n")].strip() if found else b""


def _length(head: bytes) -> int:
    return int(_header(head, b"content-length") or 0)


async def _sleep_until(when: float) -> None:
    seconds = when - time.monotonic()
    if seconds > 0:
        await asyncio.sleep(seconds)


class Throttle:
    """A running proxy, seen from the process that started it. endpoint: its URL."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.pid = process.pid
        self._commands, self._answers = process.stdin, process.stdout
        self.endpoint = self._read_line().decode().strip()

    def limit(self, limits: Limits) -> None:
        self._ask(json.dumps(asdict(limits)).encode())

    def counters(self) -> Counters:
        return self._ask(b"")

    def _ask(self, line: bytes) -> Counters:
        with suppress(BrokenPipeError):
            self._commands.write(line + b"\n")
            self._commands.flush()
        return msgspec.json.decode(self._read_line(), type=Counters)

    def _read_line(self) -> bytes:
        line = self._answers.readline()
        if not line:
            raise CachefsError("the throttling proxy has ended; see its log")
        return line


@contextmanager
def throttled(upstream: str, limits: Limits, log: Path) -> Iterator[Throttle]:
    """A proxy on a loopback port in front of the URL *upstream*."""
    command = [*WITH_PARENT, sys.executable, "-m", "cachefs_tools.bench.throttle", upstream]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
    try:
        throttle = Throttle(process)
        throttle.limit(limits)
        yield throttle
    finally:
        process.terminate()
        wait(process)


async def _run(upstream: str) -> None:
    # A network does not wait for the processors of the machine it leads to.
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    parts = urlsplit(upstream)
    proxy = Proxy(parts.hostname or "127.0.0.1", parts.port or 80)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=BUFFER, backlog=1024)
    port = server.sockets[0].getsockname()[1]
    _say(f"http://127.0.0.1:{port}")
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin.buffer)
    while line := await commands.readline():
        if line.strip():
            proxy.limit(msgspec.json.decode(line, type=Limits))
        proxy.counters.cpu_seconds = time.process_time()
        _say(json.dumps(asdict(proxy.counters)))


def _say(line: str) -> None:
    os.write(sys.stdout.fileno(), line.encode() + b"\n")


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[1]))
