"""An HTTP server that answers with the very bytes that a test gives it. It runs in the test's event loop."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from ssl import SSLContext
from typing import Final

from tests.waiting import until_async

# Pieces that are not sent: the connection is reset after those before (of TLS, ended without a word), or the server
# sends no more on it and goes on to read.
RESET: Final = b"<reset>"
HALF_CLOSE: Final = b"<half close>"
# Says what is sent for the head of a request, in pieces. An empty piece closes the connection.
Script = Callable[[str], Iterable[bytes]]


class ScriptedServer:
    """The server, seen from the test."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[str] = []  # heads of all requests so far
        self.connections = 0  # so far
        self.resumed = 0  # connections so far that went on with an earlier TLS session
        self.open = 0
        self.port = 0
        self.pause = 0.0  # seconds between two pieces
        self._writers: set[asyncio.StreamWriter] = set()

    def drop_all(self) -> None:
        """Close all connections."""
        for writer in self._writers:
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        link = writer.get_extra_info("ssl_object")
        self.resumed += link is not None and link.session_reused
        self._writers.add(writer)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._answer((await reader.readuntil(b"\r\n\r\n")).decode(), writer):
                    pass
        finally:
            self.open -= 1
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, request: str, writer: asyncio.StreamWriter) -> bool:
        self.requests.append(request)
        for piece in self.script(request):
            if not piece:
                return False
            if piece == RESET:
                await _reset(writer)
                return False
            if piece == HALF_CLOSE:
                writer.write_eof()
                continue
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(self.pause)
        return True


async def _reset(writer: asyncio.StreamWriter) -> None:
    await until_async(lambda: not writer.transport.get_write_buffer_size())
    link = writer.get_extra_info("socket")
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@asynccontextmanager
async def scripted(
    script: Script, tls: SSLContext | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[ScriptedServer]:
    """A server on a loopback port."""
    server = ScriptedServer(script)
    listening = await asyncio.start_server(server.serve, host, 0, ssl=tls)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        server.drop_all()
        await until_async(lambda: not server.open)


@contextmanager
def silent_server() -> Iterator[str]:
    """Yield the URL of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/set"
