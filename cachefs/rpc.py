"""The control plane of one node: gRPC over a unix socket, msgpack messages, no data.

METHODS is the whole interface; the daemon serves a method `FooBar` with its coroutine (or async generator, where it
streams) `foo_bar`.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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

# Nothing of ours uses gRPC on both sides of a fork, and its fork handlers have made children die of "Bad file
# descriptor". To be set before gRPC is loaded.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
import grpc

SERVICE: Final = "cachefs.Daemon"
DEFAULT_SOCKET: Final = Path("/run/cachefs/cachefsd.sock")
SOCKET_VARIABLE: Final = "CACHEFS_SOCKET"
# A warmup list or an accessed-keys report of a million entries is tens of megabytes.
MAX_MESSAGE: Final = 256 << 20
CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name the time a connection may take: with 100 ms, a daemon that is busy for longer seems absent.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
    # A stream has no deadline. A daemon that does not even answer a ping for so long is stopped or stuck.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.http2.ping_timeout_ms", 15_000),
    # The daemon's side: by default it takes pings 15 s apart for abuse and hangs up.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)
# sun_path, less its final NUL.
MAX_SOCKET_PATH: Final = 107

Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply", bound=Message)


@dataclass(frozen=True)
class Method(Generic[Request, Reply]):
    """One call. streams: the reply is a stream of *reply* messages."""

    name: str
    request: type[Request]
    reply: type[Reply]
    streams: bool = False

    @property
    def path(self) -> str:
        return f"/{SERVICE}/{self.name}"


REPORT: Final = Method("Report", MountReport, NodeView)
NODE: Final = Method("Node", Empty, NodeView)
FETCH: Final = Method("Fetch", Fetch, Fetched)
STATUS: Final = Method("Status", Empty, Status)
DATASET_ADD: Final = Method("DatasetAdd", DatasetAdd, ListingProgress, streams=True)
DATASET_REFRESH: Final = Method("DatasetRefresh", DatasetName, ListingProgress, streams=True)
DATASET_LIST: Final = Method("DatasetList", Empty, DatasetList)
DATASET_SHOW: Final = Method("DatasetShow", DatasetName, DatasetDetail)
DATASET_REMOVE: Final = Method("DatasetRemove", DatasetName, Freed)
DATASET_LIMIT: Final = Method("DatasetLimit", DatasetLimit, DatasetView)
WARMUP: Final = Method("Warmup", Warmup, WarmupProgress, streams=True)
EVICT: Final = Method("Evict", Selection, Freed)
PIN: Final = Method("Pin", Selection, Pinned)
UNPIN: Final = Method("Unpin", Selection, Pinned)
CACHED: Final = Method("Cached", Selection, CachedFiles, streams=True)
VERIFY: Final = Method("Verify", Empty, VerifyProgress, streams=True)
JOB_PUBLISH: Final = Method("JobPublish", JobPublish, JobView)
JOB_EPOCH: Final = Method("JobEpoch", JobEpoch, Empty)
JOB_PROGRESS: Final = Method("JobProgress", JobProgress, Empty)
JOB_LIST: Final = Method("JobList", Empty, JobList)
JOB_SHOW: Final = Method("JobShow", JobName, JobView)
JOB_CANCEL: Final = Method("JobCancel", JobName, Empty)
PUSH: Final = Method("Push", PushSubscribe, PushOrder, streams=True)
PUSH_REPORT: Final = Method("PushReport", PushDone, PushReply)
STALL_LIST: Final = Method("StallList", JobName, StallRows)  # an empty name: of all jobs

METHODS: Final[tuple[Method[Any, Any], ...]] = (
    REPORT, NODE, FETCH, STATUS,
    DATASET_ADD, DATASET_REFRESH, DATASET_LIST, DATASET_SHOW, DATASET_REMOVE, DATASET_LIMIT,
    WARMUP, EVICT, PIN, UNPIN, CACHED, VERIFY,
    JOB_PUBLISH, JOB_EPOCH, JOB_PROGRESS, JOB_LIST, JOB_SHOW, JOB_CANCEL, STALL_LIST,
    PUSH, PUSH_REPORT,
)  # fmt: skip

# A failed call carries the error's class name and text, so that the caller raises the very same error.
ERROR_TRAILER: Final = "cachefs-error"


def encode(message: Message) -> bytes:
    """Raises ConfigError where a text was not UTF-8 on the command line."""
    try:
        return msgspec.msgpack.encode(message)
    except UnicodeEncodeError as error:
        shown = error.object.encode("utf-8", "backslashreplace").decode()
        raise errors.ConfigError(f"{shown!r} is not UTF-8; only paths in a dataset may be anything else") from None


def decoder(kind: type[Reply]) -> Callable[[bytes], Reply]:
    return msgspec.msgpack.Decoder(kind).decode


def socket_path(given: str | os.PathLike[str] | None = None) -> Path:
    """The daemon's socket: as given, else $CACHEFS_SOCKET, else the system-wide one."""
    return Path(given or os.environ.get(SOCKET_VARIABLE) or DEFAULT_SOCKET)


def _target(socket: Path) -> str:
    path = str(socket.absolute())
    shown = os.fsencode(path).decode("utf-8", "backslashreplace")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise errors.ConfigError(f"the path of the socket {shown} is longer than {MAX_SOCKET_PATH} bytes")
    if shown != path:
        raise errors.ConfigError(f"the path of the socket {shown} is not UTF-8")
    return f"unix:{path}"


class DaemonClient:
    """Blocking client of the node's daemon. Start it after the last fork."""

    def __init__(self, socket: Path) -> None:
        """Raises ConfigError where no socket can have such a path."""
        self.socket = socket
        self._channel = grpc.insecure_channel(_target(socket), options=CHANNEL_OPTIONS)

    def call(self, method: Method[Request, Reply], request: Request, timeout: float = 30.0) -> Reply:
        """Raises the CachefsError the daemon raised, or DaemonUnavailable."""
        # Encoded here, as gRPC would hide what is wrong with a request.
        encoded = encode(request)
        stub = self._channel.unary_unary(method.path, None, decoder(method.reply))
        try:
            return cast(Reply, stub(encoded, timeout=timeout))
        except grpc.RpcError as error:
            raise self.error(error) from None

    def begin(self, method: Method[Request, Reply], request: Request, timeout: float) -> Any:
        """Start a call and return its grpc future: result() gives the reply or raises grpc.RpcError (see `error`)."""
        stub = self._channel.unary_unary(method.path, encode, decoder(method.reply))
        return stub.future(request, timeout=timeout, wait_for_ready=True)

    def stream(self, method: Method[Request, Reply], request: Request, timeout: float | None = None) -> Iterator[Reply]:
        """Raises as `call` does, also where the daemon stops answering in the midst of it."""
        encoded = encode(request)
        stub = self._channel.unary_stream(method.path, None, decoder(method.reply))
        try:
            yield from stub(encoded, timeout=timeout)
        except grpc.RpcError as error:
            raise self.error(error) from None

    def error(self, error: grpc.RpcError) -> errors.CachefsError:
        """The error of ours that a failed call stands for."""
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
