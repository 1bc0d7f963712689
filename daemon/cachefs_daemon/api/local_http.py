"""An HTTP server for programs and browsers of this machine: a port on loopback, or a unix socket.

It is read-only: only GET and HEAD are answered, without authentication. The Host header must be a name of this machine:
else a web page of another site could have a browser on it read this (DNS rebinding). HEADERS forbid such a page any
other use of a response.
"""

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, cast

from aiohttp import web

from cachefs.errors import ConfigError
from cachefs_daemon.api.socket_path import SocketPath
from cachefs_daemon.local_listen import UNIX, split_listen
from cachefs_daemon.metrics.scrape import ScrapeHandler
from cachefs_daemon.node import Node
from cachefs_daemon.web.page import WebPage

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# Most connections at once, of which the oldest is closed for one more; and the most seconds of each: a scrape is one
# connection.
MAX_CONNECTIONS: Final = 32
CONNECTION_SECONDS: Final = 30.0
# Seconds for responses in progress when the daemon ends.
STOP_SECONDS: Final = 1.0

# Headers of each response. Our own page has neither inline scripts nor inline styles, so a name that reached the page
# as markup could do nothing.
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class LocalHttpServer:
    """An HTTP server on one local address. Used on the event loop."""

    def __init__(self, listen: str, key: str) -> None:
        """listen: HOST:PORT of loopback, or unix:/PATH. key: the setting with this address."""
        self._listen = listen
        self._key = key
        self._app = web.Application(middlewares=[self._check])
        self._runner = web.AppRunner(
            self._app, access_log=None, shutdown_timeout=STOP_SECONDS, handle_signals=False, logger=_silent_logger()
        )
        self._socket_path = SocketPath(Path(listen.removeprefix(UNIX))) if listen.startswith(UNIX) else None
        self._server: asyncio.Server | None = None
        self._connections: dict[_Connection, None] = {}  # oldest first

    def add_route(self, path: str, handler: Handler) -> None:
        """Answer requests for *path*, in aiohttp's notation, with *handler*. Call before `start`."""
        self._app.router.add_get(path, handler)

    @property
    def port(self) -> int:
        """The port, after `start`."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Listen. Raises CachefsError where that fails."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        if self._socket_path is not None:
            self._server = await loop.create_unix_server(self._make_connection, sock=self._socket_path.listen())
            return
        try:
            self._server = await loop.create_server(self._make_connection, *split_listen(self._listen))
        except OSError as error:
            why = error.strerror or "no such address"
            raise ConfigError(f"cannot listen on {self._listen}: {why}; see `{self._key}`") from None

    async def stop(self) -> None:
        if self._server is not None:
            if self._socket_path is not None:
                self._socket_path.remove()
            self._server.close()
        await self._runner.cleanup()

    def _make_connection(self) -> asyncio.Protocol:
        if len(self._connections) >= MAX_CONNECTIONS:
            next(iter(self._connections)).close_now()
        server = self._runner.server
        assert server is not None
        connection = _Connection(cast(asyncio.Protocol, server()), self._connections)
        self._connections[connection] = None
        return connection

    @web.middleware
    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._socket_path is None and not _is_own_name(request.host):
            response: web.StreamResponse = web.Response(status=403, text="ask for this machine by a name of loopback\n")
        else:
            response = await self._handle(request, handler)
        response.headers.update(HEADERS)
        response.force_close()
        return response

    async def _handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as refusal:
            allow = {"Allow": refusal.headers["Allow"]} if "Allow" in refusal.headers else None
            return web.Response(status=refusal.status, text=f"{refusal.reason}\n", headers=allow)
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return web.Response(status=500, text="internal error; see the daemon's log\n")


class _Connection(asyncio.Protocol):
    """A connection that is closed after CONNECTION_SECONDS."""

    def __init__(self, inside: asyncio.Protocol, others: "dict[_Connection, None]") -> None:
        """inside: the protocol that serves the connection."""
        self._protocol = inside
        self._others = others
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def close_now(self) -> None:
        """Close the connection at once."""
        self._others.pop(self, None)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._timer = asyncio.get_running_loop().call_later(CONNECTION_SECONDS, self.close_now)
        self._protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._others.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        self._protocol.connection_lost(error)


def _is_own_name(host: str) -> bool:
    """Return whether *host*, with or without a port, is a name of this machine."""
    bare = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() and not host.endswith("]") else host
    bare = bare.removeprefix("[").removesuffix("]")
    if bare.lower() in ("localhost", socket.gethostname().lower()):
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(bare).is_loopback
    return False


def _silent_logger() -> logging.Logger:
    """Return a silent logger for requests that aiohttp does not understand: a traceback of each would fill the log."""
    logger = logging.getLogger(f"{__name__}.requests")
    logger.setLevel(logging.CRITICAL)
    return logger


class LocalPages:
    """Serves metrics and web page, as far as they are configured. Used on the event loop."""

    def __init__(self, node: Node) -> None:
        metrics, web = node.config.metrics.listen, node.config.web.listen
        self._servers: dict[str, LocalHttpServer] = {}  # by address
        self._page: WebPage | None = None
        # The pages and their addresses, for messages.
        self.descriptions: list[str] = []
        if metrics:
            self._server_at(metrics, "metrics.listen").add_route("/metrics", ScrapeHandler(node).handle)
            self.descriptions.append(f"metrics on {metrics}")
        if web:
            self._page = WebPage(node)
            for path, handler in self._page.handlers.items():
                self._server_at(web, "web.listen").add_route(path, handler)
            self.descriptions.append(f"web page on {web if web.startswith(UNIX) else f'http://{web}/'}")

    def _server_at(self, listen: str, key: str) -> LocalHttpServer:
        if listen not in self._servers:
            self._servers[listen] = LocalHttpServer(listen, key)
        return self._servers[listen]

    async def start(self) -> None:
        """Listen. Raises CachefsError where that fails."""
        for server in self._servers.values():
            await server.start()

    async def run(self) -> None:
        """Record the history for the web page, as long as the daemon runs; return at once without a page."""
        if self._page is not None:
            await self._page.run()

    async def stop(self) -> None:
        for server in self._servers.values():
            await server.stop()
