"""The pool of connections to one HTTP server."""

import asyncio
import contextlib
import errno
import socket
import ssl
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import aiohappyeyeballs
from botocore.exceptions import ConnectTimeoutError, EndpointConnectionError, SSLError

from cachefs_daemon.origin.base import OriginSettings
from cachefs_daemon.origin.http_connection import LEDGER, SUCCESS, Answer, Asked, ClosedUnanswered, HttpConnection
from cachefs_daemon.origin.http_tls import Tls, noticed

# Seconds for which resolved addresses are cached, so that many new connections resolve the name once.
_ADDRESSES_KEPT: Final = 10.0
# One spare connection for this many regular ones: for hedged requests.
_SPARE: Final = 16
# Seconds after which the next address is tried in parallel.
_NEXT_ADDRESS: Final = 0.25
# Errors that mean a lack of resources on this machine, and tell nothing of the server.
_SHORT_HERE: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL))
_Addresses = list[tuple[Any, ...]]  # as socket.getaddrinfo returns them


@dataclass(frozen=True, slots=True)
class Server:
    """The address of a server."""

    host: str
    port: int
    # Whether it speaks TLS.
    tls: bool

    @property
    def url(self) -> str:
        """URL of the server, without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls else ''}://{host}:{self.port}"


def drop(answer: Answer) -> None:
    """Count the unused body of a response."""
    if answer.head.status in SUCCESS and answer.body is not None:
        LEDGER.drop(len(answer.body))


async def _answer_to(waiter: "asyncio.Future[Answer]") -> Answer:
    try:
        return await waiter
    except asyncio.CancelledError:
        if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
            drop(waiter.result())  # the response arrived at the same moment
        raise


class HttpPool:
    """Connections to one server. Used on one event loop."""

    def __init__(self, server: Server, settings: OriginSettings, tls: Tls) -> None:
        self._server = server
        self._settings = settings
        self._tls = tls
        self._free: list[HttpConnection] = []  # the last one was used last
        self._all: set[HttpConnection] = set()
        self._coming = 0  # connections being opened
        self._waiting: deque[asyncio.Future[None]] = deque()  # requests that wait for a connection
        self._addresses: asyncio.Future[_Addresses] | None = None
        self._addresses_until = 0.0  # loop time

    @property
    def has_spare(self) -> bool:
        """Whether a hedged request can get a connection."""
        return bool(self._free) or len(self._all) + self._coming < self._most(spare=True)

    async def ask(self, request: bytes, room: int, asked: Asked | None = None, *, spare: bool = False) -> Answer:
        """Send *request* and return its response. room: least bytes to reserve for the body.

        asked: receives the connection. spare: the request is a hedge, and may use a spare connection. Raises the errors
        of HttpConnection.send, those of aiobotocore if no connection can be made, and OSError for a lack of resources
        here.
        """
        connection = self._free.pop() if self._free else await self._obtain(spare=spare)
        while True:
            try:
                answer = await _answer_to(connection.send(request, room, asked))
                break
            except ClosedUnanswered:
                if not connection.was_used:
                    raise
                # The server closed the idle connection just now, before it saw the request.
            except BaseException:
                connection.abort()
                raise
            connection = await self._obtain(new=True, spare=spare)
        if connection.open:
            self._free.append(connection)
            if self._waiting:
                self._wake()
        return answer

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._all):
            connection.abort()

    def _most(self, *, spare: bool) -> int:
        most = self._settings.max_connections
        return most + 1 + most // _SPARE if spare else most

    async def _obtain(self, *, new: bool = False, spare: bool = False) -> HttpConnection:
        """Return a connection as soon as one is available. new: a newly opened one."""
        while new or not self._free:
            if len(self._all) + self._coming < self._most(spare=spare):
                return await self._connect()
            if new and self._free:
                self._free.pop().abort()
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake()
                raise
        return self._free.pop()

    def _wake(self) -> None:
        """Let a waiting request try again to get a connection."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _made(self) -> HttpConnection:
        return HttpConnection(self._settings.read_timeout, self._gone, self._tls.remember)

    def _gone(self, connection: HttpConnection) -> None:
        self._all.discard(connection)
        with contextlib.suppress(ValueError):
            self._free.remove(connection)
        self._wake()

    async def _connect(self) -> HttpConnection:
        url = self._server.url
        self._coming += 1
        try:
            async with asyncio.timeout(self._settings.connect_timeout):
                connection = await self._open()
            if connection.open:
                self._all.add(connection)
            return connection
        except TimeoutError as error:
            LEDGER.unreachable()
            raise ConnectTimeoutError(endpoint_url=url, error=error) from None
        except ssl.SSLError as error:
            LEDGER.unreachable()
            raise SSLError(endpoint_url=url, error=error) from None
        except OSError as error:
            LEDGER.unreachable()
            if error.errno in _SHORT_HERE:
                raise
            raise EndpointConnectionError(endpoint_url=url, error=error) from None
        finally:
            self._coming -= 1
            if self._waiting:
                self._wake()

    async def _open(self) -> HttpConnection:
        tls = await self._tls.context() if self._server.tls else None
        link = await aiohappyeyeballs.start_connection(await self._resolve(), happy_eyeballs_delay=_NEXT_ADDRESS)
        name = self._server.host if tls else None
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(self._made, sock=link, ssl=tls, server_hostname=name)
        except BaseException:
            link.close()
            raise
        return connection

    async def _resolve(self) -> _Addresses:
        loop = asyncio.get_running_loop()
        known = self._addresses
        if known is None or (known.done() and (loop.time() >= self._addresses_until or known.exception())):
            asked = loop.getaddrinfo(self._server.host, self._server.port, type=socket.SOCK_STREAM)
            known = self._addresses = asyncio.ensure_future(asked)
            known.add_done_callback(noticed)
            self._addresses_until = loop.time() + _ADDRESSES_KEPT
        return await asyncio.shield(known)
