"""The control endpoint: the HTTP server for requests of other nodes.

Only members of the cluster are served, with TLS only those whose certificate names a member; and observers, such as
cachefs-scheduler, for their own paths (see cachefs_daemon.reporting). A client that does not finish its TLS handshake,
opens too many connections or sends too much loses its connection, without effect on other clients.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Final, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from cachefs.errors import AccessDenied, Busy, CachefsError, ConfigError
from cachefs.observe_messages import OBSERVE_PREFIX, OBSERVER_HEADER
from cachefs_cluster.membership.handshake import SECRET_HINT
from cachefs_cluster.membership.membership import Membership
from cachefs_cluster.membership.secret import ProofScope, is_nonce, proofs_match
from cachefs_cluster.membership.view import NodeRecord, encode_record, format_address
from cachefs_cluster.sharing.observers import NO_OBSERVERS, Observers
from cachefs_cluster.sharing.security import INSECURE, ConnectionSecurity
from cachefs_cluster.sharing.wire import (
    ADDRESSEE,
    CLUSTER,
    LIST,
    NODE,
    NONCE,
    OTHER_INCARNATION,
    PROOF,
    RESPONDER,
    SENDER,
)
from cachefs_daemon.runtime.connection_limits import ConnectionBounds, ConnectionLimits

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HANDSHAKE_SECONDS: Final = 5.0
# Limits of connections. A member has one for its poll, and a few for snapshots, orders and counters.
CONNECTION_BOUNDS: Final = ConnectionBounds(total=16384, unknown=64, unknown_of_address=64, of_member=32)
# Seconds within which a connection must identify its sender.
UNIDENTIFIED_SECONDS: Final = 10.0
# Seconds that responses in progress may take when the daemon ends.
STOP_SECONDS: Final = 1.0
# Most bytes of a request's body.
MAX_BODY: Final = 64 << 10
# Seconds between two log lines about the same refusal.
LOG_SECONDS: Final = 60.0
# Most reasons that are remembered for the log's rate limit.
_MAX_REFUSALS: Final = 256
_STATUS: Final = {Busy: 503, AccessDenied: 403}


class ControlEndpoint:
    """The server, with its connection limits and access checks. Used on the event loop."""

    def __init__(
        self,
        cluster: str,
        membership: Membership,
        security: ConnectionSecurity = INSECURE,
        observers: Observers = NO_OBSERVERS,
    ) -> None:
        """cluster: its name; nodes of others are refused. observers: clients that may read the paths below
        OBSERVE_PREFIX."""
        self.port = 0  # set by `start`
        self.cluster = self._cluster = cluster
        self._observers = observers
        self._membership = membership
        self._security = security
        self._app = web.Application(middlewares=[self._check], client_max_size=MAX_BODY)
        self._app.on_response_prepare.append(self._sign)
        self._app.router.add_get(NODE, self._serve_record)
        self._runner = web.AppRunner(
            self._app, access_log=None, shutdown_timeout=STOP_SECONDS, keepalive_timeout=300, handle_signals=False,
            logger=_RequestLogger(self),
        )  # fmt: skip
        self._server: asyncio.Server | None = None
        self.limits: ConnectionLimits[_HandshakeConnection] = ConnectionLimits(CONNECTION_BOUNDS)
        self._timers: dict[
            _HandshakeConnection, asyncio.TimerHandle
        ] = {}  # close connections that do not identify themselves
        self._connections: dict[object, _HandshakeConnection] = {}  # by the protocol that serves the connection
        self._logged_refusals: dict[str, float] = {}  # time of the last log line, by reason

    def add_route(self, method: str, path: str, handler: Handler) -> None:
        """Route requests for *path*, in aiohttp's syntax, to *handler*. Call it before `start`. A CachefsError of the
        handler is answered with its text."""
        self._app.router.add_route(method, path, handler)

    def sender(self, request: web.Request) -> NodeRecord | None:
        """Return the member that sent the request; None if the sender is no member (yet)."""
        return self._membership.view.get(request.headers.get(SENDER, ""))

    def observer_name(self, request: web.Request) -> str:
        """Return the name of the observer that sent the request, or ""."""
        transport = request.transport
        proven = self._security.names(transport and transport.get_extra_info("ssl_object"))
        return self._observers.identify(request.headers.get(OBSERVER_HEADER, ""), proven)

    def may_command(self, observer: str) -> bool:
        """Return whether the observer may send commands to this node."""
        return observer in self._observers.commanders

    async def start(self, host: str, port: int) -> None:
        """Listen on the address. Raises ConfigError if that fails."""
        await self._runner.setup()
        try:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: _HandshakeConnection(self), host, port
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {format_address(host, port)} for other nodes: {error.strerror}; see `cluster.listen`"
            ) from None
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    # --- each connection ---------------------------------------------------------------------------------------------

    def add_connection(self, connection: "_HandshakeConnection") -> asyncio.Protocol:
        """Admit a connection, and return the protocol that serves it."""
        leaves = self.limits.add(connection)
        if leaves is not None:
            leaves.dismiss("there are too many connections, and this one has been idle for longest")
        why = f"it did not identify itself within {UNIDENTIFIED_SECONDS:.0f} s"
        self._timers[connection] = asyncio.get_running_loop().call_later(UNIDENTIFIED_SECONDS, connection.dismiss, why)
        server = self._runner.server
        assert server is not None
        inside = cast(asyncio.Protocol, server())
        self._connections[inside] = connection
        return inside

    def remove_connection(self, connection: "_HandshakeConnection", protocol: asyncio.Protocol) -> None:
        """Remove a closed connection that was admitted."""
        self.limits.remove(connection)
        self._end_timer(connection)
        self._connections.pop(protocol, None)

    def _identify(self, connection: "_HandshakeConnection | None", member: str) -> bool:
        """Return whether the connection of *member* may stay."""
        if connection is None:
            return True
        if not self.limits.identify(connection, member):
            return False
        self._end_timer(connection)
        return True

    def _end_timer(self, connection: "_HandshakeConnection") -> None:
        if (timer := self._timers.pop(connection, None)) is not None:
            timer.cancel()

    async def _handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Handle a request, on a connection that is not closed for others meanwhile."""
        doorstep = self._connections.get(request.protocol)
        if doorstep is None:
            return await handler(request)
        self.limits.mark_busy(doorstep)
        try:
            return await handler(request)
        finally:
            self.limits.mark_idle(doorstep)

    @property
    def tls(self) -> ssl.SSLContext | None:
        return self._security.server

    def log_refusal(self, who: str, why: str) -> None:
        """Log a refusal, at most once a minute for the same reason."""
        now = time.monotonic()
        if now - self._logged_refusals.get(why, -LOG_SECONDS) < LOG_SECONDS:
            return
        if len(self._logged_refusals) >= _MAX_REFUSALS:
            self._logged_refusals.clear()
        self._logged_refusals[why] = now
        log.warning("control endpoint: %s is refused: %s", who, why)

    # --- each request ------------------------------------------------------------------------------------------------

    @web.middleware
    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if OBSERVER_HEADER in request.headers or request.path.startswith(OBSERVE_PREFIX):
                return await self._handle_observer(request, handler)
            if self._is_for_another_start(request):
                return _refusal(OTHER_INCARNATION, "this is another start of the daemon")
            why = self._refusal_reason(request)
            if why:
                self.log_refusal(f"node {request.headers.get(SENDER, '')[:32]!r} at {request.remote}", why)
                return _refusal(403, why)
            sender, doorstep = self.sender(request), self._connections.get(request.protocol)
            if sender is None or self._identify(doorstep, sender.id):
                return await self._handle(request, handler)
            most = self.limits.bounds.of_member
            self.log_refusal(f"node {sender.name} at {request.remote}", f"it has {most} connections already")
            return _refusal(503, f"there are {most} connections of this node already")
        except CachefsError as error:
            return web.Response(status=_STATUS.get(type(error), 409), text=str(error))
        except (web.HTTPException, asyncio.CancelledError, ConnectionError):
            raise
        except Exception:
            log.exception("control endpoint: %s %s failed", request.method, request.path)
            return web.Response(status=500, text="internal error; see the daemon's log")

    async def _handle_observer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer an observer, or refuse a client that claims to be one."""
        name, claimed = self.observer_name(request), request.headers.get(OBSERVER_HEADER, "")[:64]
        if not name or not request.path.startswith(OBSERVE_PREFIX):
            proven = "its certificate names it, and " if self._security.server is not None else ""
            why = (
                f"{claimed!r} is not an observer of this node: it becomes one when {proven}cluster.observers or "
                "schedulers lists it"
            )
            self.log_refusal(f"a client at {request.remote}", why)
            return _refusal(403, why)
        doorstep = self._connections.get(request.protocol)
        if not self._identify(doorstep, f"observer {name}"):
            return _refusal(503, f"there are {self.limits.bounds.of_member} connections of {name} already")
        return await self._handle(request, handler)

    def _refusal_reason(self, request: web.Request) -> str:
        if request.headers.get(CLUSTER) != self._cluster:
            return f"it is of cluster {request.headers.get(CLUSTER, '')[:64]!r}, and this node of {self._cluster!r}"
        sender = self.sender(request)
        transport = request.transport
        refusal = self._security.refusal(transport and transport.get_extra_info("ssl_object"), sender)
        refusal = refusal or self._proof_problem(request)
        if refusal or request.path == NODE:
            return refusal
        view = self._membership.view
        if view.source == "static" and request.headers.get(LIST, "") not in ("", str(view.epoch)):
            return "its list of nodes differs from that of this node; make cluster.nodes the same on all nodes"
        return "" if sender is not None else "it is not a member of the cluster, or not yet"

    def _is_for_another_start(self, request: web.Request) -> bool:
        """Return whether the proof of a request is for another start of this node's daemon. The response names this
        one, and the sender asks again: a proof for no start in particular could be kept, and used by another user."""
        mine = self._membership.view.own_record
        return (
            self._security.secret is not None
            and mine is not None
            and is_nonce(request.headers.get(NONCE, ""))
            and request.headers.get(ADDRESSEE, "") != mine.incarnation
        )

    def _proof_problem(self, request: web.Request) -> str:
        """Return why the request does not prove knowledge of the cluster's secret; "" if it does, or without one."""
        secret, mine = self._security.secret, self._membership.view.own_record
        if secret is None or mine is None:
            return ""
        scope = _scope(request, mine)
        if scope is not None and proofs_match(request.headers.get(PROOF, ""), secret.request_proof(scope)):
            return ""
        return f"it does not prove that it knows this cluster's secret: {SECRET_HINT}"

    async def _sign(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add this node's id and proof to a response. Only proven senders get the proof that a request is served."""
        view, secret = self._membership.view, self._security.secret
        response.headers[RESPONDER] = view.me
        if secret is None or view.own_record is None or (scope := _scope(request, view.own_record)) is None:
            return
        serves = response.status < 300
        if serves and self._proof_problem(request):
            return
        response.headers[ADDRESSEE] = view.own_record.incarnation
        response.headers[PROOF] = secret.response_proof(scope, view.own_record.incarnation, serves=serves)

    async def _serve_record(self, request: web.Request) -> web.Response:
        mine = self._membership.view.own_record
        if mine is None:
            return web.Response(status=503, text="this node is in no cluster yet")
        return web.Response(body=encode_record(mine), content_type="application/json")


def _scope(request: web.Request, mine: NodeRecord) -> ProofScope | None:
    """Return the scope that the proof of a request to this node must have; None if the request has no nonce."""
    headers = request.headers
    nonce = headers.get(NONCE, "")
    if not is_nonce(nonce):
        return None
    what = f"{request.method} {request.path}"
    return ProofScope(nonce, headers.get(SENDER, ""), mine.id, headers.get(ADDRESSEE, ""), mine.control_port, what)


def _refusal(status: int, why: str) -> web.Response:
    """Make a response that closes its connection."""
    response = web.Response(status=status, text=why)
    response.force_close()
    return response


class _RequestLogger(logging.Logger):
    """Logger for aiohttp, which logs each invalid request with a traceback."""

    def __init__(self, endpoint: ControlEndpoint) -> None:
        super().__init__("requests", logging.WARNING)
        self._endpoint = endpoint

    def handle(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            address = record.getMessage().rpartition(" ")[2][:64]
            self._endpoint.log_refusal(f"a client at {address}", "it sent an invalid request")
        else:
            log.handle(record)


class _HandshakeConnection(asyncio.Protocol):
    """A connection during its TLS handshake. Afterwards the protocol that serves requests takes over.

    asyncio's own servers do not report failed handshakes, and wait for them for a minute.
    """

    def __init__(self, endpoint: ControlEndpoint) -> None:
        self._endpoint = endpoint
        self._early_bytes: list[bytes] = []  # bytes that arrived right after the handshake
        self._protocol: asyncio.Protocol | None = None
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self.address = ""  # address of the client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        self._transport = transport
        self._protocol = self._endpoint.add_connection(self)
        if self._endpoint.tls is None:
            self._protocol.connection_made(transport)
        else:
            self._task = asyncio.create_task(self._shake_hands(transport, self._endpoint.tls))

    def dismiss(self, why: str) -> None:
        """Close the connection, and log the reason."""
        self._endpoint.log_refusal(f"a connection from {self.address}", why)
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._task is None and self._protocol is not None:
            self._protocol.data_received(data)
        else:
            self._early_bytes.append(data)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received() if self._task is None and self._protocol is not None else None

    def pause_writing(self) -> None:
        if self._task is None and self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._task is None and self._protocol is not None:
            self._protocol.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        if self._protocol is None:
            return
        inside, self._protocol = self._protocol, None
        self._endpoint.remove_connection(self, inside)
        if self._task is None:
            inside.connection_lost(error)

    async def _shake_hands(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        who = f"a client at {self.address}" if self.address else "a client"
        try:
            secure = await asyncio.get_running_loop().start_tls(
                transport, self, context, server_side=True, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except ssl.SSLError as error:
            self._endpoint.log_refusal(who, f"TLS failed: {error.reason or error}")
        except (OSError, TimeoutError) as error:
            self._endpoint.log_refusal(who, f"TLS failed: {str(error) or type(error).__name__}")
        else:
            if secure is not None and self._protocol is not None:
                self._task = None
                self._protocol.connection_made(secure)
                for data in self._early_bytes:
                    self._protocol.data_received(data)
                self._early_bytes = []
                return
        transport.abort()
        if self._protocol is not None:
            inside, self._protocol = self._protocol, None
            self._endpoint.remove_connection(self, inside)
