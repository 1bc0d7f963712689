"""The HTTP server of the API: JSON on a Unix socket and, if configured, on TCP with TLS."""

import asyncio
import grp
import logging
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from cachefs.errors import AlreadyExists, Busy, CachefsError, ConfigError, NotFound, StoreFull
from cachefs.pem_files import PemFiles
from cachefs.scheduling_messages import (
    ADMISSIONS_PATH,
    ADMIT_PATH,
    ASSIGN_PATH,
    ENDED_PATH,
    EXPLAIN_PATH,
    KNOWN_PATH,
    METRICS_PATH,
    NODES_PATH,
    PLACED_PATH,
    POLICY_PATH,
    QUEUE_PATH,
    RANK_PATH,
    RESIZED_PATH,
    SCALE_PATH,
    STATUS_PATH,
    DatasetPolicy,
    JobEndReport,
    KnownJobs,
    PlacementReport,
    PlacementRequest,
    RankRequest,
    ScaleRequest,
)
from cachefs_scheduler.api.handlers import ApiHandlers
from cachefs_scheduler.certificates import ServerCertificates
from cachefs_scheduler.config import ServiceSection, split_address
from cachefs_scheduler.duties.advisor import Advisor

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
RequestT = TypeVar("RequestT", bound=msgspec.Struct)
# A response body: a message, its JSON, or nothing.
ApiResponseBody = msgspec.Struct | bytes | None

# Bytes of a request: enough for 16,384 node names.
MAX_BODY: Final = 8 << 20
# Longest wait of a poll in seconds, and the number of polls that may wait at once.
POLL_SECONDS: Final = 25.0
MAX_POLLS: Final = 64
_SETTINGS: Final = ("service.tls_cert", "service.tls_key", "service.tls_ca")
_STATUS: Final = {NotFound: 404, ConfigError: 400, Busy: 503, StoreFull: 507}


class SchedulerApiServer:
    """Serves the API on the event loop."""

    def __init__(
        self, section: ServiceSection, advisor: Advisor, handlers: ApiHandlers, metrics: Callable[[], str]
    ) -> None:
        self._section = section
        self._advisor = advisor
        self._handlers = handlers
        self._metrics = metrics
        self._polls = 0
        self._socket_file: tuple[int, int] | None = None  # st_dev and st_ino of the socket file
        self._changed = asyncio.Event()
        advisor.subscribe(self._wake_polls)
        self._app = web.Application(middlewares=[_report_errors], client_max_size=MAX_BODY)
        self._add_routes()
        self._runner = web.AppRunner(
            self._app, access_log=None, shutdown_timeout=1.0, keepalive_timeout=75, handle_signals=False
        )

    async def start(self) -> None:
        """Start to listen. Raises CachefsError."""
        await self._runner.setup()
        section = self._section
        if section.listen is not None:
            host, port = split_address(section.listen)
            try:
                await web.TCPSite(self._runner, host, port, ssl_context=_context(section)).start()
            except OSError as error:
                why = os.strerror(error.errno) if error.errno else error
                raise ConfigError(f"service.listen = {section.listen!r}: {why}") from None
        # The Unix socket is made last: a client that gets a response there may use the TCP address too.
        listening = _unix_socket(section.socket, section.socket_group)
        self._socket_file = _file_id(section.socket)
        await web.SockSite(self._runner, listening).start()

    async def stop(self) -> None:
        self._wake_polls()
        await self._runner.cleanup()
        if self._socket_file is not None and self._socket_file == _file_id(self._section.socket):
            self._section.socket.unlink(missing_ok=True)

    def _wake_polls(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- calls ------------------------------------------------------------------------------------------------------

    def _add_routes(self) -> None:
        get, post = self._app.router.add_get, self._app.router.add_post
        get(STATUS_PATH, self._get_handler(lambda request: self._handlers.status()))
        get(QUEUE_PATH, self._get_handler(lambda request: self._handlers.queue()))
        get(NODES_PATH, self._get_handler(lambda request: self._handlers.nodes(request.query.get("dataset", ""))))
        get(POLICY_PATH, self._get_handler(lambda request: self._handlers.policies(request.query.get("dataset", ""))))
        get(EXPLAIN_PATH, self._get_handler(lambda request: self._advisor.explain(request.query.get("job", ""))))
        get(
            KNOWN_PATH,
            self._get_handler(lambda request: KnownJobs(self._advisor.known_jobs(request.query.get("prefix", "")))),
        )
        get(ADMISSIONS_PATH, self._admissions)
        get(METRICS_PATH, self._metrics_text)
        post(RANK_PATH, self._post_handler(RankRequest, lambda body: self._advisor.rank(body.ask, body.candidates)))
        post(ASSIGN_PATH, self._post_handler(RankRequest, lambda body: self._advisor.assign(body.ask, body.candidates)))
        post(ADMIT_PATH, self._post_handler(PlacementRequest, self._advisor.admit))
        post(PLACED_PATH, self._post_handler(PlacementReport, self._placed))
        post(RESIZED_PATH, self._post_handler(PlacementReport, self._resized))
        post(ENDED_PATH, self._post_handler(JobEndReport, lambda body: self._advisor.note_ended(body.job)))
        post(POLICY_PATH, self._post_handler(DatasetPolicy, self._handlers.change_policy))
        post(SCALE_PATH, self._post_handler(ScaleRequest, self._handlers.scale))

    def _get_handler(self, handle: Callable[[web.Request], ApiResponseBody | Awaitable[ApiResponseBody]]) -> Handler:
        async def handler(request: web.Request) -> web.Response:
            return await _respond(handle(request))

        return handler

    def _post_handler(
        self, kind: type[RequestT], handle: Callable[[RequestT], ApiResponseBody | Awaitable[ApiResponseBody]]
    ) -> Handler:
        async def handler(request: web.Request) -> web.Response:
            try:
                body = msgspec.json.decode(await request.read(), type=kind)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise ConfigError(f"{request.path}: {error}") from None
            return await _respond(handle(body))

        return handler

    def _placed(self, body: PlacementReport) -> None:
        self._advisor.note_placed(body.job, body.nodes, body.ask)

    def _resized(self, body: PlacementReport) -> None:
        self._advisor.note_resized(body.job, body.nodes)

    async def _admissions(self, request: web.Request) -> web.Response:
        """Answer the admissions. With the query argument `after` (the version of the last answer), wait until the
        version differs or POLL_SECONDS have passed."""
        after = request.query.get("after", "")
        if after == str(self._advisor.version):
            if self._polls >= MAX_POLLS:
                raise Busy(f"{self._polls} polls wait already; try again later")
            self._polls += 1
            until = time.monotonic() + POLL_SECONDS
            try:
                while after == str(self._advisor.version) and (left := until - time.monotonic()) > 0:
                    try:
                        await asyncio.wait_for(self._changed.wait(), left)
                    except TimeoutError:
                        break
            finally:
                self._polls -= 1
        return _json(self._advisor.pending_admissions())

    async def _metrics_text(self, request: web.Request) -> web.Response:
        return web.Response(text=self._metrics(), content_type="text/plain", charset="utf-8")


@web.middleware
async def _report_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn exceptions into one-line JSON responses: `{"error": ...}`."""
    try:
        return await handler(request)
    except CachefsError as error:
        return _error(_STATUS.get(type(error), 409), str(error))
    except web.HTTPException as error:
        return _error(error.status, f"{request.method} {request.path}: {error.reason}")
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return _error(500, "internal error; see the log of cachefs-scheduler")


async def _respond(body: ApiResponseBody | Awaitable[ApiResponseBody]) -> web.Response:
    return _json(await body if isinstance(body, Awaitable) else body)


def _json(message: ApiResponseBody) -> web.Response:
    body = message if isinstance(message, bytes) else msgspec.json.encode(message) if message is not None else b"{}"
    return web.Response(body=body, content_type="application/json")


def _error(status: int, text: str) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode({"error": text}), content_type="application/json")


def _unix_socket(path: Path, group: str) -> socket.socket:
    """Return a socket that listens at *path*, for the service's user and members of *group* only. Raises
    CachefsError."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    umask = os.umask(0o177)
    try:
        _remove_stale_socket(path)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        listening.bind(str(path))
        if group:
            os.chown(path, -1, grp.getgrnam(group).gr_gid)
            os.chmod(path, 0o660)
    except (OSError, KeyError) as error:
        listening.close()
        why = error.strerror if isinstance(error, OSError) else f"there is no group {group}"
        raise ConfigError(f"service.socket = {str(path)!r}: {why}") from None
    except BaseException:
        listening.close()
        raise
    finally:
        os.umask(umask)
    return listening


def _file_id(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _remove_stale_socket(path: Path) -> None:
    """Remove a socket left by an earlier service. Raises AlreadyExists if a running service answers there."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError:
            pass  # the server is busy: its connection backlog is full
    raise AlreadyExists(f"another cachefs-scheduler answers at {path}; stop it, or set another service.socket")


def _context(section: ServiceSection) -> ssl.SSLContext | None:
    """Return the context for mutual TLS, or None without certificates. Raises ConfigError."""
    if section.tls_ca is None:
        return None
    files = PemFiles(section.tls_cert, section.tls_key, section.tls_ca, _SETTINGS)
    return ServerCertificates(files).context
