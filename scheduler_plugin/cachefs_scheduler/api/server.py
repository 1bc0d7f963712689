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
    ADMISSIONS,
    ADMIT,
    ASSIGN,
    ENDED,
    EXPLAIN,
    KNOWN,
    METRICS,
    NODES,
    PLACED,
    POLICY,
    QUEUE,
    RANK,
    RESIZED,
    SCALE,
    STATUS,
    Ask,
    DatasetPolicy,
    Ended,
    KnownJobs,
    Placed,
    RankAsk,
    ScaleAsk,
)
from cachefs_scheduler.api.answers import Answers
from cachefs_scheduler.certificates import ServerCertificates
from cachefs_scheduler.config import ServiceSection, split_address
from cachefs_scheduler.duties.advisor import Advisor

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Body = TypeVar("Body", bound=msgspec.Struct)
# A response body: a message, its JSON, or nothing.
Said = msgspec.Struct | bytes | None

# Bytes of a request: enough for 16,384 node names.
MOST_BODY: Final = 8 << 20
# Longest wait of a poll in seconds, and the number of polls that may wait at once.
POLL_SECONDS: Final = 25.0
MOST_POLLS: Final = 64
_SETTINGS: Final = ("service.tls_cert", "service.tls_key", "service.tls_ca")
_STATUS: Final = {NotFound: 404, ConfigError: 400, Busy: 503, StoreFull: 507}


class Server:
    """Serves the API on the event loop."""

    def __init__(self, section: ServiceSection, advisor: Advisor, answers: Answers, metrics: Callable[[], str]) -> None:
        self._section = section
        self._advisor = advisor
        self._answers = answers
        self._metrics = metrics
        self._polls = 0
        self._bound: tuple[int, int] | None = None  # st_dev and st_ino of the socket file
        self._news = asyncio.Event()
        advisor.subscribe(self._wake)
        self._app = web.Application(middlewares=[_guard], client_max_size=MOST_BODY)
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
        self._bound = _file(section.socket)
        await web.SockSite(self._runner, listening).start()

    async def stop(self) -> None:
        self._wake()
        await self._runner.cleanup()
        if self._bound is not None and self._bound == _file(self._section.socket):
            self._section.socket.unlink(missing_ok=True)

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # --- calls ------------------------------------------------------------------------------------------------------

    def _add_routes(self) -> None:
        get, post = self._app.router.add_get, self._app.router.add_post
        get(STATUS, self._get(lambda request: self._answers.status()))
        get(QUEUE, self._get(lambda request: self._answers.queue()))
        get(NODES, self._get(lambda request: self._answers.nodes(request.query.get("dataset", ""))))
        get(POLICY, self._get(lambda request: self._answers.policies(request.query.get("dataset", ""))))
        get(EXPLAIN, self._get(lambda request: self._advisor.explain(request.query.get("job", ""))))
        get(KNOWN, self._get(lambda request: KnownJobs(self._advisor.known(request.query.get("prefix", "")))))
        get(ADMISSIONS, self._admissions)
        get(METRICS, self._metrics_text)
        post(RANK, self._post(RankAsk, lambda body: self._advisor.rank(body.ask, body.candidates)))
        post(ASSIGN, self._post(RankAsk, lambda body: self._advisor.assign(body.ask, body.candidates)))
        post(ADMIT, self._post(Ask, self._advisor.admit))
        post(PLACED, self._post(Placed, self._placed))
        post(RESIZED, self._post(Placed, self._resized))
        post(ENDED, self._post(Ended, lambda body: self._advisor.ended(body.job)))
        post(POLICY, self._post(DatasetPolicy, self._answers.change_policy))
        post(SCALE, self._post(ScaleAsk, self._answers.scale))

    def _get(self, answer: Callable[[web.Request], Said | Awaitable[Said]]) -> Handler:
        async def handler(request: web.Request) -> web.Response:
            return await _answered(answer(request))

        return handler

    def _post(self, kind: type[Body], answer: Callable[[Body], Said | Awaitable[Said]]) -> Handler:
        async def handler(request: web.Request) -> web.Response:
            try:
                body = msgspec.json.decode(await request.read(), type=kind)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise ConfigError(f"{request.path}: {error}") from None
            return await _answered(answer(body))

        return handler

    def _placed(self, body: Placed) -> None:
        self._advisor.placed(body.job, body.nodes, body.ask)

    def _resized(self, body: Placed) -> None:
        self._advisor.resized(body.job, body.nodes)

    async def _admissions(self, request: web.Request) -> web.Response:
        """Answer the admissions. With the query argument `after` (the version of the last answer), wait until the
        version differs or POLL_SECONDS have passed."""
        after = request.query.get("after", "")
        if after == str(self._advisor.version):
            if self._polls >= MOST_POLLS:
                raise Busy(f"{self._polls} polls wait already; try again later")
            self._polls += 1
            until = time.monotonic() + POLL_SECONDS
            try:
                while after == str(self._advisor.version) and (left := until - time.monotonic()) > 0:
                    try:
                        await asyncio.wait_for(self._news.wait(), left)
                    except TimeoutError:
                        break
            finally:
                self._polls -= 1
        return _json(self._advisor.admissions())

    async def _metrics_text(self, request: web.Request) -> web.Response:
        return web.Response(text=self._metrics(), content_type="text/plain", charset="utf-8")


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
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


async def _answered(said: Said | Awaitable[Said]) -> web.Response:
    return _json(await said if isinstance(said, Awaitable) else said)


def _json(message: Said) -> web.Response:
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
        _clear(path)
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


def _file(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _clear(path: Path) -> None:
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
