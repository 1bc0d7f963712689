"""The daemon's end of cachefs.rpc: a gRPC server on a unix socket."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
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
from cachefs.identity import identity_socket
from cachefs.messages import Message
from cachefs.rpc import CHANNEL_OPTIONS, ERROR_TRAILER, METHODS, SERVICE, Method, decoder, encode
from cachefs_daemon.api.door import Door
from cachefs_daemon.api.fetch_channel import FetchChannel
from cachefs_daemon.api.identity import SOCKET_MODE, Admission, Identities
from cachefs_daemon.api.service import Service

log = logging.getLogger(__name__)

# gRPC refuses more than 8 KiB of metadata; one line is far less.
MAX_ERROR_TEXT: Final = 2000

_CODES: Final[dict[type[CachefsError], grpc.StatusCode]] = {
    ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    NotFound: grpc.StatusCode.NOT_FOUND,
    AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    Busy: grpc.StatusCode.FAILED_PRECONDITION,
    Unidentified: grpc.StatusCode.UNAUTHENTICATED,
    AccessDenied: grpc.StatusCode.PERMISSION_DENIED,
    OriginAccessDenied: grpc.StatusCode.PERMISSION_DENIED,
}


class Server:
    """Listens on the daemon's socket, and has a `Service` answer the calls that cachefs.rpc lists."""

    def __init__(self, service: Service, path: Path, admission: Admission, channel: FetchChannel) -> None:
        """path: of the socket; that of cachefs.identity is beside it. admission: who may do more than look. channel: is
        opened and closed with the socket."""
        self._path = path
        self._channel = channel
        self._identities = Identities(identity_socket(path), admission)
        self._server = grpc.aio.server(options=CHANNEL_OPTIONS)
        door = Door(self._identities, admission)
        handlers = {method.name: _handler(method, service, door) for method in METHODS}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers), _Unknown()))

    async def start(self) -> None:
        """Raises Busy where another daemon listens on the socket, CachefsError where it cannot be made."""
        _clear(self._path)
        before = os.umask(0o022)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            os.umask(0o777 & ~SOCKET_MODE)
            self._server.add_insecure_port(f"unix:{self._path}")
        except (OSError, RuntimeError) as error:
            raise CachefsError(f"cannot listen on the socket {self._path}: {error}") from None
        finally:
            os.umask(before)
        await self._identities.start()
        await self._channel.start()
        await self._server.start()

    async def stop(self, grace: float) -> None:
        """Take no more calls, and give those in progress *grace* seconds."""
        await asyncio.gather(self._server.stop(grace), self._channel.stop(grace))
        self._identities.stop()
        self._path.unlink(missing_ok=True)


def _clear(path: Path) -> None:
    """Remove a socket nobody listens on any more. Raises Busy where somebody does."""
    if not path.is_socket():
        if path.exists():
            raise CachefsError(f"{path} is in the way of the daemon's socket and no socket itself; remove it")
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            log.info("removing the stale socket %s", path)
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise CachefsError(f"cannot tell whether a daemon listens on {path}: {error}") from None
    raise Busy(f"another daemon listens on {path}; stop it, or give this one another daemon.socket")


class _Unknown(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers calls that this daemon does not know: they come from a mount or a command of another version."""

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler:
        name = handler_call_details.method.rpartition("/")[2]

        async def call(_: bytes, context: Any) -> bytes:
            error = CachefsError(
                f"this daemon (cachefs {__version__}) knows no call {name}: the client is of another version; "
                "unmount and mount again, or restart the daemon"
            )
            await _fail(context, name, error)
            raise error  # _fail has raised already

        return grpc.unary_unary_rpc_method_handler(call)


def _handler(method: Method[Any, Any], service: Service, door: Door) -> grpc.RpcMethodHandler:
    behaviour = getattr(service, method.function)
    if method.streams:
        return grpc.unary_stream_rpc_method_handler(_streaming(method, behaviour, door))
    return grpc.unary_unary_rpc_method_handler(_unary(method, behaviour, door))


def _unary(
    method: Method[Any, Any], behaviour: Callable[..., Awaitable[Message]], door: Door
) -> Callable[[bytes, Any], Awaitable[bytes]]:
    decode = decoder(method.request)

    async def call(request: bytes, context: Any) -> bytes:
        try:
            caller = door.admit(method, context)
            return encode(await behaviour(decode(request), *caller))
        except Exception as error:
            await _fail(context, method.name, error)
            raise  # _fail has raised already

    return call


def _streaming(
    method: Method[Any, Any], behaviour: Callable[..., AsyncGenerator[Message, None]], door: Door
) -> Callable[[bytes, Any], AsyncGenerator[bytes, None]]:
    decode = decoder(method.request)

    async def call(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        try:
            caller = door.admit(method, context)
            # Closed at once when the caller goes away, so that what it began (a listing, a warmup) ends.
            async with contextlib.aclosing(behaviour(decode(request), *caller)) as replies:
                async for reply in replies:
                    yield encode(reply)
        except Exception as error:
            await _fail(context, method.name, error)

    return call


async def _fail(context: Any, name: str, error: Exception) -> None:
    """End the call with *error*; never returns."""
    if isinstance(error, msgspec.MsgspecError):
        error = CachefsError(f"{name}: the request is malformed ({error}); are client and daemon of one version?")
    if not isinstance(error, CachefsError):
        log.error("%s failed unexpectedly", name, exc_info=error)
        error = CachefsError(f"{name}: internal error ({error!r}); see the daemon's log")
    code = next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), grpc.StatusCode.UNKNOWN)
    text = " ".join(str(error).split())[:MAX_ERROR_TEXT]
    trailer = f"{type(error).__name__}:{text}".encode("ascii", "backslashreplace").decode()
    await context.abort(code, text, trailing_metadata=((ERROR_TRAILER, trailer),))
