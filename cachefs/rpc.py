"""The control plane of one node: gRPC over a unix socket, msgpack messages, no data.

METHODS is the whole interface. A call has one name, that of its constant here: the call DATASET_ADD is `DatasetAdd` on
the wire, and the daemon serves it with its coroutine (or async generator, where it streams) `dataset_add`.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, cast

import msgspec

from cachefs import errors
from cachefs.job_messages import JobEpoch, JobList, JobName, JobProgress, JobPublish, JobView, StallRows
from cachefs.messages import (
    CachedFiles,
    DatasetAdd,
    DatasetDetail,
    DatasetLimit,
    DatasetList,
    DatasetName,
    DatasetView,
    Empty,
    Fetch,
    Fetched,
    Freed,
    ListingProgress,
    Message,
    MountReport,
    NodeView,
    Pinned,
    Selection,
    Status,
    VerifyProgress,
    Warmup,
    WarmupProgress,
)  # fmt: skip
from cachefs.push_messages import PushDone, PushOrder, PushReply, PushSubscribe
from cachefs.socket_path import MAX_SOCKET_PATH

# This variable must be set before gRPC is loaded. No process of ours uses gRPC on both sides of a fork, and gRPC's fork
# handlers have made children die of "Bad file descriptor".
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
import grpc

SERVICE: Final = "cachefs.Daemon"
# A warmup list or an accessed-keys report of a million entries is tens of megabytes.
MAX_MESSAGE: Final = 256 << 20
CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name this is the time that connecting may take: with 100 ms, a busy daemon would seem absent.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
    # A stream has no deadline. A daemon that does not even answer a ping for so long was stopped, or is stuck.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.http2.ping_timeout_ms", 15_000),
    # This one is for the daemon's side, which by default takes pings that are 15 s apart for abuse and hangs up.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)

Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply", bound=Message)


@dataclass(eq=False)
class Method(Generic[Request, Reply]):
    """One call of the interface."""

    request: type[Request]
    reply: type[Reply]
    # Is the reply a stream of *reply* messages?
    streams: bool = False
    # The name of the call on the wire, such as `DatasetAdd`, and that of the daemon's function for it, such as
    # `dataset_add`; see `_named`.
    name: str = field(default="", init=False)
    function: str = field(default="", init=False)

    @property
    def path(self) -> str:
        return f"/{SERVICE}/{self.name}"


REPORT: Final = Method(MountReport, NodeView)
NODE: Final = Method(Empty, NodeView)
FETCH: Final = Method(Fetch, Fetched)
STATUS: Final = Method(Empty, Status)
DATASET_ADD: Final = Method(DatasetAdd, ListingProgress, streams=True)
DATASET_REFRESH: Final = Method(DatasetName, ListingProgress, streams=True)
DATASET_LIST: Final = Method(Empty, DatasetList)
DATASET_SHOW: Final = Method(DatasetName, DatasetDetail)
DATASET_REMOVE: Final = Method(DatasetName, Freed)
DATASET_LIMIT: Final = Method(DatasetLimit, DatasetView)
WARMUP: Final = Method(Warmup, WarmupProgress, streams=True)
EVICT: Final = Method(Selection, Freed)
PIN: Final = Method(Selection, Pinned)
UNPIN: Final = Method(Selection, Pinned)
CACHED: Final = Method(Selection, CachedFiles, streams=True)
VERIFY: Final = Method(Empty, VerifyProgress, streams=True)
JOB_PUBLISH: Final = Method(JobPublish, JobView)
JOB_EPOCH: Final = Method(JobEpoch, Empty)
JOB_PROGRESS: Final = Method(JobProgress, Empty)
JOB_LIST: Final = Method(Empty, JobList)
JOB_SHOW: Final = Method(JobName, JobView)
JOB_CANCEL: Final = Method(JobName, Empty)
PUSH: Final = Method(PushSubscribe, PushOrder, streams=True)
PUSH_REPORT: Final = Method(PushDone, PushReply)
STALL_LIST: Final = Method(JobName, StallRows)  # an empty name: of all jobs


def _named(namespace: Mapping[str, object]) -> tuple[Method[Any, Any], ...]:
    """All calls among the constants of a module, each of which learns its name here."""
    found = []
    for constant, value in namespace.items():
        if isinstance(value, Method):
            value.name, value.function = constant.title().replace("_", ""), constant.lower()
            found.append(value)
    return tuple(found)


METHODS: Final = _named(globals())

# A failed call has a trailer of this name, with the error's class name and text; so the caller raises the same error.
ERROR_TRAILER: Final = "cachefs-error"


def encode(message: Message) -> bytes:
    """Raises ConfigError for a text that is not UTF-8 and for a number of more than 64 bits, which can come from the
    command line."""
    try:
        return msgspec.msgpack.encode(message)
    except OverflowError:
        raise errors.ConfigError("a number is too large: the daemon takes -2^63 to 2^64 - 1") from None
    except UnicodeEncodeError as error:
        shown = error.object.encode("utf-8", "backslashreplace").decode()
        raise errors.ConfigError(f"{shown!r} is not UTF-8; only paths in a dataset may be anything else") from None


def decoder(kind: type[Reply]) -> Callable[[bytes], Reply]:
    return msgspec.msgpack.Decoder(kind).decode


def _target(socket: Path) -> str:
    path = str(socket.absolute())
    shown = os.fsencode(path).decode("utf-8", "backslashreplace")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise errors.ConfigError(f"the path of the socket {shown} is longer than {MAX_SOCKET_PATH} bytes")
    if shown != path:
        raise errors.ConfigError(f"the path of the socket {shown} is not UTF-8")
    return f"unix:{path}"


class DaemonClient:
    """Blocking client of the node's daemon. It is to be made after the last fork."""

    def __init__(self, socket: Path) -> None:
        """Raises ConfigError where no socket can have such a path."""
        self.socket = socket
        self._channel = grpc.insecure_channel(_target(socket), options=CHANNEL_OPTIONS)

    def call(self, method: Method[Request, Reply], request: Request, timeout: float = 30.0) -> Reply:
        """Raises the CachefsError the daemon raised, or DaemonUnavailable."""
        # Encoded here, since gRPC would hide what is wrong with a request.
        encoded = encode(request)
        stub = self._channel.unary_unary(method.path, None, decoder(method.reply))
        try:
            return cast(Reply, stub(encoded, timeout=timeout))
        except grpc.RpcError as error:
            raise self.error(error) from None

    def begin(self, method: Method[Request, Reply], request: Request, timeout: float) -> Any:
        """Start a call. Returns its gRPC future: result() gives the reply or raises grpc.RpcError (see `error`)."""
        stub = self._channel.unary_unary(method.path, encode, decoder(method.reply))
        return stub.future(request, timeout=timeout, wait_for_ready=True)

    def stream(self, method: Method[Request, Reply], request: Request, timeout: float | None = None) -> Iterator[Reply]:
        """The replies. Raises as `call` does, also where the daemon stops answering before the last reply."""
        encoded = encode(request)
        stub = self._channel.unary_stream(method.path, None, decoder(method.reply))
        try:
            yield from stub(encoded, timeout=timeout)
        except grpc.RpcError as error:
            raise self.error(error) from None

    def error(self, error: grpc.RpcError) -> errors.CachefsError:
        """The error that a failed call stands for."""
        for name, text in error.trailing_metadata() or ():
            if name == ERROR_TRAILER:
                kind, _, message = text.partition(":")
                found = getattr(errors, kind, errors.CachefsError)
                return cast(errors.CachefsError, found(message))
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.DaemonUnavailable(
                f"the daemon at {self.socket} did not answer in time; is it running? See its log"
            )
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return errors.DaemonUnavailable(
                f"no daemon answers at {self.socket}; start it with `cachefsd`, or name its socket with --socket"
            )
        return errors.CachefsError(f"the daemon failed: {error.details()}")

    def close(self) -> None:
        self._channel.close()
