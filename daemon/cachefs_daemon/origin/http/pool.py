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
from cachefs_daemon.origin.http.connection import (
    S3_COUNTERS,
    SUCCESS,
    ClosedWithoutResponse,
    HttpConnection,
    HttpResponse,
    InFlightRequest,
)
from cachefs_daemon.origin.http.tls import ClientTls, retrieve_exception

# Seconds for which resolved addresses are cached, so that many new connections resolve the name once.
_ADDRESS_SECONDS: Final = 10.0
# One spare connection for this many regular ones: for hedged requests.
_SPARE: Final = 16
# Seconds after which the next address is tried in parallel.
_NEXT_ADDRESS_SECONDS: Final = 0.25
# Errors that mean a lack of resources on this machine, and tell nothing of the server.
_LOCAL_SHORTAGES: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL))
_Addresses = list[tuple[Any, ...]]  # as socket.getaddrinfo returns them


@dataclass(frozen=True, slots=True)
class ServerAddress:
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


def count_unused_body(response: HttpResponse) -> None:
    """Count the unused body of a response."""
    if response.head.status in SUCCESS and response.body is not None:
        S3_COUNTERS.count_dropped_bytes(len(response.body))


async def _wait_for_response(waiter: "asyncio.Future[HttpResponse]") -> HttpResponse:
    try:
        return await waiter
    except asyncio.CancelledError:
        if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
            count_unused_body(waiter.result())  # the response arrived at the same moment
        raise


class HttpPool:
    """Connections to one server. Used on one event loop."""

    def __init__(self, server: ServerAddress, settings: OriginSettings, tls: ClientTls) -> None:
        self._server = server
        self._settings = settings
        self._tls = tls
        self._idle_connections: list[HttpConnection] = []  # the last one was used last
        self._connections: set[HttpConnection] = set()
        self._opening_count = 0  # connections being opened
        self._waiters: deque[asyncio.Future[None]] = deque()  # requests that wait for a connection
        self._addresses: asyncio.Future[_Addresses] | None = None
        self._addresses_until = 0.0  # loop time

    @property
    def has_spare(self) -> bool:
        """Whether a hedged request can get a connection."""
        return bool(self._idle_connections) or len(self._connections) + self._opening_count < self._connection_limit(
            spare=True
        )

    async def send_request(
        self, request: bytes, body_size: int, in_flight: InFlightRequest | None = None, *, spare: bool = False
    ) -> HttpResponse:
        """Send *request* and return its response. body_size: least bytes to reserve for the body.

        in_flight: receives the connection. spare: the request is a hedge, and may use a spare connection. Raises the
        errors of HttpConnection.send, those of aiobotocore if no connection can be made, and OSError for a lack of
        resources here.
        """
        connection = (
            self._idle_connections.pop() if self._idle_connections else await self._acquire_connection(spare=spare)
        )
        while True:
            try:
                response = await _wait_for_response(connection.send(request, body_size, in_flight))
                break
            except ClosedWithoutResponse:
                if not connection.was_used:
                    raise
                # The server closed the idle connection just now, before it saw the request.
            except BaseException:
                connection.abort()
                raise
            connection = await self._acquire_connection(new=True, spare=spare)
        if connection.is_open:
            self._idle_connections.append(connection)
            if self._waiters:
                self._wake_waiter()
        return response

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._connections):
            connection.abort()

    def _connection_limit(self, *, spare: bool) -> int:
        most = self._settings.max_connections
        return most + 1 + most // _SPARE if spare else most

    async def _acquire_connection(self, *, new: bool = False, spare: bool = False) -> HttpConnection:
        """Return a connection as soon as one is available. new: a newly opened one."""
        while new or not self._idle_connections:
            if len(self._connections) + self._opening_count < self._connection_limit(spare=spare):
                return await self._connect()
            if new and self._idle_connections:
                self._idle_connections.pop().abort()
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake_waiter()
                raise
        return self._idle_connections.pop()

    def _wake_waiter(self) -> None:
        """Let a waiting request try again to get a connection."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _make_connection(self) -> HttpConnection:
        return HttpConnection(self._settings.read_timeout, self._forget_connection, self._tls.remember_session)

    def _forget_connection(self, connection: HttpConnection) -> None:
        self._connections.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle_connections.remove(connection)
        self._wake_waiter()

    async def _connect(self) -> HttpConnection:
        url = self._server.url
        self._opening_count += 1
        try:
            async with asyncio.timeout(self._settings.connect_timeout):
                connection = await self._open_connection()
            if connection.is_open:
                self._connections.add(connection)
            return connection
        except TimeoutError as error:
            S3_COUNTERS.count_unreachable()
            raise ConnectTimeoutError(endpoint_url=url, error=error) from None
        except ssl.SSLError as error:
            S3_COUNTERS.count_unreachable()
            raise SSLError(endpoint_url=url, error=error) from None
        except OSError as error:
            S3_COUNTERS.count_unreachable()
            if error.errno in _LOCAL_SHORTAGES:
                raise
            raise EndpointConnectionError(endpoint_url=url, error=error) from None
        finally:
            self._opening_count -= 1
            if self._waiters:
                self._wake_waiter()

    async def _open_connection(self) -> HttpConnection:
        tls = await self._tls.context() if self._server.tls else None
        link = await aiohappyeyeballs.start_connection(
            await self._resolve_addresses(), happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS
        )
        name = self._server.host if tls else None
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                self._make_connection, sock=link, ssl=tls, server_hostname=name
            )
        except BaseException:
            link.close()
            raise
        return connection

    async def _resolve_addresses(self) -> _Addresses:
        loop = asyncio.get_running_loop()
        known = self._addresses
        if known is None or (known.done() and (loop.time() >= self._addresses_until or known.exception())):
            resolution = loop.getaddrinfo(self._server.host, self._server.port, type=socket.SOCK_STREAM)
            known = self._addresses = asyncio.ensure_future(resolution)
            known.add_done_callback(retrieve_exception)
            self._addresses_until = loop.time() + _ADDRESS_SECONDS
        return await asyncio.shield(known)
