"""The daemon's end of cachefs.rpc: a gRPC server on a unix socket."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import msgspec

from cachefs import __version__
from cachefs.errors import (
    AccessDenied,
    AlreadyExists,
    Busy,
    CachefsError,
    ConfigError,
    NotFound,
    OriginAccessDenied,
    Unidentified,
)
from cachefs.identity import IDENTITY_KEY, identity_socket_path
from cachefs.messages import Message
from cachefs.rpc import CHANNEL_OPTIONS, ERROR_TRAILER, METHODS, SERVICE, AccessRight, Method, encode, response_decoder
from cachefs_daemon.api.fetch_channel import FetchChannelServer
from cachefs_daemon.api.identity import CallerRights, Identities
from cachefs_daemon.api.service import Service
from cachefs_daemon.api.socket_path import SocketKeeper, SocketPath
from cachefs_daemon.caller import Caller

log = logging.getLogger(__name__)

# gRPC refuses more than 8 KiB of metadata; one line is far less.
MAX_ERROR_TEXT: Final = 2000
# Seconds between two checks of the sockets, of two system calls each.
CHECK_SECONDS: Final = 2.0
# Most servers whose socket was removed and that still answer their connected callers; and the seconds for which calls
# of an older one, such as warm-ups, may go on.
MAX_FORMER: Final = 8
FORMER_GRACE_SECONDS: Final = 86400.0

_CODES: Final[dict[type[CachefsError], grpc.StatusCode]] = {
    ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    NotFound: grpc.StatusCode.NOT_FOUND,
    AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    Busy: grpc.StatusCode.FAILED_PRECONDITION,
    Unidentified: grpc.StatusCode.UNAUTHENTICATED,
    AccessDenied: grpc.StatusCode.PERMISSION_DENIED,
    OriginAccessDenied: grpc.StatusCode.PERMISSION_DENIED,
}


@dataclass(frozen=True, slots=True)
class CallAuthorizer:
    """Checks the identity and the rights of each call. docs/operations.md has a table of the rights for users."""

    identities: Identities
    admission: CallerRights

    def authorize_call(self, method: Method[Any, Any], context: Any) -> tuple[Caller, ...]:
        """Return the arguments about the caller that *method* needs: the caller where jobs belong to users, else none.
        Raises AccessDenied where the caller may not call, Unidentified where it must identify itself first."""
        if method.right == AccessRight.LOOK:
            return ()
        identity = next((value for key, value in context.invocation_metadata() or () if key == IDENTITY_KEY), "")
        caller = self.identities.verify(identity)
        if caller is None:
            raise Unidentified(
                f"the daemon cannot identify the caller of {method.name}: {self.identities.socket_path.path} cannot be "
                "reached; in a container, mount the directory of the daemon's socket, not only the socket"
            )
        if method.right == AccessRight.ADMINISTER and not caller.is_administrator:
            raise AccessDenied(f"{caller} may not call {method.name}: only {self.admission.administrators} may")
        if method.right == AccessRight.MOUNT:
            self.admission.require_mount_right(caller)
        return (caller,) if method.right == AccessRight.JOB else ()


class RpcServer:
    """Listens on the daemon's socket, and dispatches the calls of cachefs.rpc to a `Service`."""

    def __init__(self, service: Service, path: Path, admission: CallerRights, channel: FetchChannelServer) -> None:
        """path: of the socket; that of cachefs.identity is beside it. admission: determines the rights of callers.
        channel: opened and closed with the socket."""
        self._socket_path = SocketPath(path)
        self._channel = channel
        self._identities = Identities(identity_socket_path(path), admission)
        door = CallAuthorizer(self._identities, admission)
        self._handlers = {method.name: _handler(method, service, door) for method in METHODS}
        self._server: grpc.aio.Server | None = None
        self._stopping = False
        self._stop_tasks: set[asyncio.Task[None]] = set()  # tasks that stop servers whose socket was removed
        self._former_servers: list[grpc.aio.Server] = []  # such servers

    async def start(self) -> None:
        """Listen. Raises Busy where another daemon listens on the socket, CachefsError where it cannot be created."""
        self._server = self._listen()
        try:
            await self._identities.start()
            await self._channel.start()
        except CachefsError:
            self._identities.stop()
            self._socket_path.remove()
            raise
        await self._server.start()

    def _listen(self) -> grpc.aio.Server:
        """Return a new server that listens on the socket. Raises CachefsError."""
        made: list[grpc.aio.Server] = []

        def bind(path: str) -> None:
            made.append(grpc.aio.server(options=CHANNEL_OPTIONS))
            made[0].add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(SERVICE, self._handlers), _UnknownCallHandler())
            )
            made[0].add_insecure_port(f"unix:{path}")

        self._socket_path.claim(bind)
        return made[0]

    async def keep_reachable(self) -> None:
        """Create sockets again that other programs have removed. Runs until it is cancelled."""
        keepers = (
            SocketKeeper(self._socket_path, self._listen_again),
            SocketKeeper(self._identities.socket_path, self._identities.start),
            SocketKeeper(self._channel.socket_path, self._channel.start),
        )
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            for keeper in keepers:
                if self._stopping:
                    return
                await keeper.check()

    async def _listen_again(self) -> None:
        """Start another server, since gRPC takes no further socket after a server's start. Raises CachefsError."""
        former, self._server = self._server, self._listen()
        await self._server.start()
        if former is None:
            return
        # Connected callers keep the former server. Telling them to reconnect would fail the calls that are just on
        # their way.
        self._former_servers.append(former)
        if len(self._former_servers) > MAX_FORMER:
            task = asyncio.create_task(self._stop_former(self._former_servers[0]))
            self._stop_tasks.add(task)
            task.add_done_callback(self._stop_tasks.discard)

    async def _stop_former(self, former: grpc.aio.Server) -> None:
        self._former_servers.remove(former)
        await former.stop(FORMER_GRACE_SECONDS)

    async def stop(self, grace: float) -> None:
        """Take no more calls, and give those in progress *grace* seconds."""
        self._stopping = True
        self._socket_path.remove()
        servers = [server for server in (self._server, *self._former_servers) if server is not None]
        await asyncio.gather(self._channel.stop(grace), *(server.stop(grace) for server in servers))
        self._identities.stop()


class _UnknownCallHandler(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers calls that this daemon does not know: they come from a mount or a command of another version."""

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler:
        name = handler_call_details.method.rpartition("/")[2]

        async def call(_: bytes, context: Any) -> bytes:
            error = CachefsError(
                f"this daemon (cachefs {__version__}) does not know the call {name}: the client is of another version; "
                "unmount and mount again, or restart the daemon"
            )
            await _fail(context, name, error)
            raise error  # _fail has raised already

        return grpc.unary_unary_rpc_method_handler(call)


def _handler(method: Method[Any, Any], service: Service, authorizer: CallAuthorizer) -> grpc.RpcMethodHandler:
    behaviour = getattr(service, method.function)
    if method.is_streaming:
        return grpc.unary_stream_rpc_method_handler(_streaming(method, behaviour, authorizer))
    return grpc.unary_unary_rpc_method_handler(_unary(method, behaviour, authorizer))


def _decoder(method: Method[Any, Any]) -> Callable[[bytes], Any]:
    """Return a function that decodes a request, and raises CachefsError."""
    decode = response_decoder(method.request)

    def read(request: bytes) -> Any:
        try:
            return decode(request)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CachefsError(
                f"{method.name}: the request is malformed ({error}); are client and daemon of one version?"
            ) from None

    return read


def _unary(
    method: Method[Any, Any], behaviour: Callable[..., Awaitable[Message]], authorizer: CallAuthorizer
) -> Callable[[bytes, Any], Awaitable[bytes]]:
    decode = _decoder(method)

    async def call(request: bytes, context: Any) -> bytes:
        try:
            caller = authorizer.authorize_call(method, context)
            return encode(await behaviour(decode(request), *caller))
        except Exception as error:
            await _fail(context, method.name, error)
            raise  # _fail has raised already

    return call


def _streaming(
    method: Method[Any, Any], behaviour: Callable[..., AsyncGenerator[Message, None]], authorizer: CallAuthorizer
) -> Callable[[bytes, Any], AsyncGenerator[bytes, None]]:
    decode = _decoder(method)

    async def call(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        try:
            caller = authorizer.authorize_call(method, context)
            # Closed at once when the caller disconnects, so that the listing or warm-up that it began ends.
            async with contextlib.aclosing(behaviour(decode(request), *caller)) as replies:
                async for reply in replies:
                    yield encode(reply)
        except Exception as error:
            await _fail(context, method.name, error)

    return call


async def _fail(context: Any, name: str, error: Exception) -> None:
    """End the call with *error*; never returns."""
    if not isinstance(error, CachefsError):
        log.error("%s failed unexpectedly", name, exc_info=error)
        error = CachefsError(f"{name}: internal error ({error!r}); see the daemon's log")
    code = next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), grpc.StatusCode.UNKNOWN)
    text = " ".join(str(error).split())[:MAX_ERROR_TEXT]
    trailer = f"{type(error).__name__}:{text}".encode("ascii", "backslashreplace").decode()
    await context.abort(code, text, trailing_metadata=((ERROR_TRAILER, trailer),))
