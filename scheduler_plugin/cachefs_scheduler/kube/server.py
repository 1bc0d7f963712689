"""The HTTP(S) server for kube-scheduler and for the API server's webhooks, with limits on requests.

Malformed, oversized or slow requests get a status other than 200; kube-scheduler then skips an `ignorable` extender,
and the API server a webhook whose failurePolicy is Ignore.
"""

import asyncio
import contextlib
import logging
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from aiohttp import web

from cachefs.errors import ConfigError
from cachefs_scheduler.kube.admission_webhook import AdmissionWebhook
from cachefs_scheduler.kube.extender import Extender
from cachefs_scheduler.kube.kube_messages import (
    LARGE_BYTES,
    AdmissionReview,
    ExtenderRequest,
    FilterResult,
    decode_request,
)

log = logging.getLogger(__name__)

# Seconds for a body to arrive, and for a response to be made and sent. kube-scheduler waits 1 s for its answer
# (`httpTimeout`), the API server 2 s (`timeoutSeconds`): a slower body serves no caller.
BODY_SECONDS: Final = 2.0
RESPONSE_SECONDS: Final = 30.0
HANDSHAKE_SECONDS: Final = 5.0
# Go closes an idle connection after 90 s; connections idle for longer than this are cut.
_IDLE_SECONDS: Final = 120.0
# Concurrent requests whose bodies arrive, requests being answered, large requests, and connections.
MAX_ARRIVING: Final = 256
MAX_REQUESTS: Final = 256
MAX_LARGE: Final = 4
# Large requests of one address: a caller that sends no body leaves room for kube-scheduler.
MAX_LARGE_PER_ADDRESS: Final = 2
MAX_CONNECTIONS: Final = 512
# Bytes of an AdmissionReview. The API server accepts objects of about 3 MB.
_MAX_REVIEW: Final = 8 << 20
_MAX_HEADER: Final = 8 << 10
_MAX_TEXT: Final = 200

# Silences aiohttp's tracebacks for input that is not HTTP.
_http = logging.getLogger(f"{__name__}.http")
_http.setLevel(logging.CRITICAL)

_reviews = msgspec.json.Decoder(AdmissionReview)
_encoder = msgspec.json.Encoder()

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Address to listen on."""

    host: str
    port: int
    # None: no TLS, for loopback or behind a TLS proxy.
    tls: ssl.SSLContext | None = None
    # Largest request body in bytes.
    most_body: int = 64 << 20


@dataclass(frozen=True, slots=True)
class StatusSources:
    """Sources of /metrics and /healthz."""

    # Returns the metrics as text for Prometheus.
    metrics: Callable[[], str]
    # Returns False if the container should be restarted.
    is_healthy: Callable[[], bool]


class KubeServer:
    """Serves extender and webhooks. Used on the event loop."""

    def __init__(self, extender: Extender, admission: AdmissionWebhook, status: StatusSources) -> None:
        self.port = 0  # since `start`
        self._extender = extender
        self._admission = admission
        self._status = status
        self._address: ListenAddress
        self._requests = 0
        # Handlers of requests whose bodies arrive, oldest first, with the callers' addresses.
        self._receiving: dict[web.RequestHandler, str] = {}
        self._large: Counter[str] = Counter()  # by address: large requests in progress
        self._large_changed = asyncio.Condition()
        # Handlers whose request is being answered.
        self._busy: set[object] = set()
        self._server: asyncio.Server | None = None
        app = web.Application(middlewares=[self._limit_request], handler_args={"max_field_size": _MAX_HEADER})
        app.router.add_post("/filter", self._filter)
        app.router.add_post("/prioritize", self._prioritize)
        app.router.add_post("/mutate", self._mutate)
        app.router.add_post("/mutate/affinity", self._mutate)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            keepalive_timeout=_IDLE_SECONDS,
            shutdown_timeout=1.0,
            handle_signals=False,
            logger=_http,
        )

    async def start(self, address: ListenAddress) -> None:
        """Start to listen. Raises ConfigError."""
        self._address = address
        await self._runner.setup()
        handshake = HANDSHAKE_SECONDS if address.tls is not None else None
        try:
            # asyncio and aiohttp set TCP_NODELAY on each connection.
            self._server = await asyncio.get_running_loop().create_server(
                self._accept_connection, address.host, address.port, ssl=address.tls, ssl_handshake_timeout=handshake
            )
        except OSError as error:
            where = f"{address.host}:{address.port}"
            raise ConfigError(f"kube.listen = {where!r}: cannot listen there: {error.strerror or error}") from None
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    # --- connections and requests ------------------------------------------------------------------------------------

    def _accept_connection(self) -> Any:
        """Return the handler of a new connection. Above the limit, the connections idle the longest are cut."""
        server = self._runner.server
        assert server is not None
        open_ones = server.connections
        if (surplus := len(open_ones) + 1 - MAX_CONNECTIONS) > 0:
            for each in [each for each in open_ones if each not in self._busy][:surplus]:
                if each.transport is not None:
                    each.transport.abort()
        return server()

    @web.middleware
    async def _limit_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            # 60 KB may expand to 60 MB. Neither kube-scheduler nor the API server compresses.
            return _refusal(415, "requests must not be compressed")
        self._busy.add(request.protocol)
        try:
            async with asyncio.timeout(RESPONSE_SECONDS):
                return await handler(request)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            return _refusal(408, "too slow")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _refusal(400, f"not what kube-scheduler or an API server sends: {error}")
        except ConnectionError:
            return _refusal(400, "the connection was lost")  # never read; prevents aiohttp's traceback
        except (web.HTTPException, asyncio.CancelledError):
            raise
        except Exception as error:
            log.error("%s: internal error", request.path, exc_info=error)
            return _refusal(500, "internal error; see the log of cachefs-scheduler")
        finally:
            self._busy.discard(request.protocol)

    @contextlib.asynccontextmanager
    async def _receive_body(self, request: web.Request, most: int) -> AsyncIterator[bytearray]:
        """Receive the request's body, and count the request until it is answered. Large bodies also count against their
        own limit. `/healthz` and `/metrics` have no body and no limit."""
        if (request.content_length or 0) > most:
            raise _too_large(most)
        async with contextlib.AsyncExitStack() as large:
            body = bytearray()
            self._count_arriving(request)
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    if (request.content_length or 0) > LARGE_BYTES:
                        await large.enter_async_context(self._large_permit(request.remote or ""))
                    await self._read_body(body, request, most)
            except TimeoutError:
                raise web.HTTPRequestTimeout(text="the request did not arrive in time\n") from None
            finally:
                self._receiving.pop(request.protocol, None)
            if self._requests >= MAX_REQUESTS:
                raise web.HTTPServiceUnavailable(text=f"{MAX_REQUESTS} requests are being answered already\n")
            self._requests += 1
            large.callback(self._count_response)
            yield body

    @contextlib.asynccontextmanager
    async def _large_permit(self, address: str) -> AsyncIterator[None]:
        """Wait for a slot for a large request of this address, and hold it until the request is answered."""
        async with self._large_changed:
            await self._large_changed.wait_for(
                lambda: self._large.total() < MAX_LARGE and self._large[address] < MAX_LARGE_PER_ADDRESS
            )
            self._large[address] += 1
        try:
            yield
        finally:
            self._large -= Counter([address])  # drops zero counts
            async with self._large_changed:
                self._large_changed.notify_all()

    def _count_response(self) -> None:
        self._requests -= 1

    def _count_arriving(self, request: web.Request) -> None:
        """Count a request whose body arrives. Above the limit, the oldest request of the address with the most requests
        is cut: a flood from one caller costs that caller's requests, not kube-scheduler's."""
        if len(self._receiving) >= MAX_ARRIVING:
            ((address, _),) = Counter(self._receiving.values()).most_common(1)
            oldest = next(one for one, its in self._receiving.items() if its == address)
            del self._receiving[oldest]
            if oldest.transport is not None:
                oldest.transport.abort()
        self._receiving[request.protocol] = request.remote or ""

    async def _read_body(self, body: bytearray, request: web.Request, most: int) -> None:
        # A request without a length must be small: kube-scheduler sends the length.
        most = most if request.content_length is not None else min(most, LARGE_BYTES)
        while chunk := await request.content.readany():
            body += chunk
            if len(body) > most:
                raise _too_large(most)

    # --- handlers ----------------------------------------------------------------------------------------------------

    async def _filter(self, request: web.Request) -> web.StreamResponse:
        begun = time.monotonic()
        async with self._receive_body(request, self._address.most_body) as body:
            query = await decode_request(body)
            refused = self._extender.refused_nodes(query.args.pod, query.names)
            if query.args.node_names is not None:
                kept = [name for name in query.names if name not in refused] if refused else query.names
                result = FilterResult(node_names=kept, failed=refused, unresolvable=refused)
                response: web.StreamResponse = _json(_encoder.encode(result))
            else:
                response = await _respond_with_nodes(request, query, refused)
        self._extender.record_duration("filter", time.monotonic() - begun)
        return response

    async def _prioritize(self, request: web.Request) -> web.StreamResponse:
        begun = time.monotonic()
        async with self._receive_body(request, self._address.most_body) as body:
            query = await decode_request(body)
        response = _json(_encoder.encode(self._extender.node_priorities(query.args.pod, query.names)))
        self._extender.record_duration("prioritize", time.monotonic() - begun)
        return response

    async def _mutate(self, request: web.Request) -> web.StreamResponse:
        async with self._receive_body(request, _MAX_REVIEW) as body:
            review = _reviews.decode(body)
        response = self._admission.review_pod(review, affinity=request.path.endswith("/affinity"))
        return _json(_encoder.encode(response))

    async def _healthz(self, _request: web.Request) -> web.StreamResponse:
        if self._status.is_healthy():
            return web.Response(text="ok\n")
        return _refusal(500, "a part of the service has ended; see the log of cachefs-scheduler")

    async def _metrics(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(text=self._status.metrics(), headers={"Content-Type": "text/plain; version=0.0.4"})


async def _respond_with_nodes(
    request: web.Request, query: ExtenderRequest, refused: dict[str, str]
) -> web.StreamResponse:
    """Answer FilterResult with whole nodes, in pieces, so that other requests do not wait while 50 MB are encrypted."""
    failed = _encoder.encode(FilterResult(failed=refused, unresolvable=refused))
    # {"Nodes":null is replaced by the nodes.
    ending = failed.removeprefix(b'{"Nodes":null')
    pieces: Sequence[bytes | memoryview] = [b'{"Nodes":', *await query.nodes_without(frozenset(refused)), ending]
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.content_length = sum(map(len, pieces))
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
    await response.write_eof()
    return response


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _too_large(most: int) -> web.HTTPRequestEntityTooLarge:
    return web.HTTPRequestEntityTooLarge(most, most, text=f"a request has {most:,} bytes at most\n")


def _refusal(status: int, why: str) -> web.Response:
    return web.Response(status=status, text=f"{why[:_MAX_TEXT]}\n")
