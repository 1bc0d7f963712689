"""The control plane of one node: gRPC over a unix socket, msgpack messages, no data.

METHODS is the whole interface. A call is named after its constant here: DATASET_ADD is `DatasetAdd` on the wire, and
the daemon serves it with its coroutine (or async generator, where it streams) `dataset_add`.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, cast

import msgspec

from cachefs import errors
from cachefs.cluster_messages import ClusterStatus, DrainNode, DrainStatus, ScaleStatus
from cachefs.identity import FOR_SOMEBODY, IDENTITY_KEY, ask_identity
from cachefs.job_messages import (
    JobEpoch,
    JobList,
    JobName,
    JobProgress,
    JobProgressReply,
    JobPublish,
    JobView,
    StallRows,
)
from cachefs.listener import why_silent
from cachefs.messages import (
    CachedFiles,
    DatasetAdd,
    DatasetDetail,
    DatasetLimit,
    DatasetList,
    DatasetName,
    DatasetNames,
    DatasetReached,
    DatasetsCached,
    DatasetSet,
    DatasetView,
    Directory,
    DirectoryEntries,
    Empty,
    EvictForecast,
    FileInfo,
    FilePath,
    Freed,
    ListingProgress,
    LogLevel,
    Message,
    MountReport,
    NodeView,
    Pinned,
    Reloaded,
    Selection,
    Status,
    VerifyProgress,
    Warmup,
    WarmupForecast,
    WarmupId,
    WarmupList,
    WarmupProgress,
)  # fmt: skip
from cachefs.push_messages import PushDone, PushOrder, PushReply, PushSubscribe
from cachefs.read_messages import MountReads, ReadsAsked, ReadsTold
from cachefs.socket_path import MAX_SOCKET_PATH, is_forbidden

# Must be set before gRPC is loaded. No process uses gRPC on both sides of a fork, and gRPC's fork handlers have made
# children die of "Bad file descriptor".
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
import grpc

SERVICE: Final = "cachefs.Daemon"
# Large enough for a warmup list or an accessed-keys report of a million entries, tens of megabytes.
MAX_MESSAGE: Final = 256 << 20
# Timeout for closing a connection, which takes a millisecond.
CLOSE_SECONDS: Final = 5.0
CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name the timeout of connecting: with 100 ms, a busy daemon would seem absent.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
    # A stream has no deadline. A daemon that does not answer a ping within this time was stopped, or is stuck.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.http2.ping_timeout_ms", 15_000),
    # For the daemon's side, which by default takes pings 15 s apart for abuse and hangs up.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)

Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply", bound=Message)


class Right(StrEnum):
    """The users who may make a call."""

    LOOK = "look"  # every local user
    JOB = "job"  # every local user, for jobs of their own
    MOUNT = "mount"  # root, the user that the daemon runs as, members of its group
    ADMINISTER = "administer"  # root, the user that the daemon runs as, members of the admin group


@dataclass(eq=False)
class Method(Generic[Request, Reply]):
    """One call of the interface."""

    request: type[Request]
    reply: type[Reply]
    right: Right
    # Whether the reply is a stream of *reply* messages.
    streams: bool = False
    # Name on the wire, such as `DatasetAdd`, and name of the daemon's function, such as `dataset_add`; see `_named`.
    name: str = field(default="", init=False)
    function: str = field(default="", init=False)

    @property
    def path(self) -> str:
        return f"/{SERVICE}/{self.name}"


REPORT: Final = Method(MountReport, NodeView, Right.MOUNT)
NODE: Final = Method(Empty, NodeView, Right.LOOK)
STATUS: Final = Method(Empty, Status, Right.LOOK)
RELOAD: Final = Method(Empty, Reloaded, Right.ADMINISTER)
LOG_LEVEL: Final = Method(LogLevel, LogLevel, Right.ADMINISTER)
CLUSTER: Final = Method(Empty, ClusterStatus, Right.LOOK)
DRAIN: Final = Method(DrainNode, DrainStatus, Right.ADMINISTER)
SCALE_HINT: Final = Method(Empty, ScaleStatus, Right.LOOK)
DATASET_ADD: Final = Method(DatasetAdd, ListingProgress, Right.ADMINISTER, streams=True)
DATASET_TRY: Final = Method(DatasetAdd, ListingProgress, Right.ADMINISTER, streams=True)
DATASET_SET: Final = Method(DatasetSet, DatasetReached, Right.ADMINISTER)
DATASET_REFRESH: Final = Method(DatasetName, ListingProgress, Right.ADMINISTER, streams=True)
DATASET_LIST: Final = Method(Empty, DatasetList, Right.LOOK)
DATASET_SHOW: Final = Method(DatasetName, DatasetDetail, Right.LOOK)
DATASET_CACHED: Final = Method(DatasetNames, DatasetsCached, Right.LOOK)
DATASET_REMOVE: Final = Method(DatasetName, Freed, Right.ADMINISTER)
DATASET_LIMIT: Final = Method(DatasetLimit, DatasetView, Right.ADMINISTER)
WARMUP: Final = Method(Warmup, WarmupProgress, Right.ADMINISTER, streams=True)
WARMUP_LIST: Final = Method(Empty, WarmupList, Right.LOOK)
WARMUP_WATCH: Final = Method(WarmupId, WarmupProgress, Right.LOOK, streams=True)
WARMUP_CANCEL: Final = Method(WarmupId, WarmupProgress, Right.ADMINISTER)
EVICT: Final = Method(Selection, Freed, Right.ADMINISTER)
PIN: Final = Method(Selection, Pinned, Right.ADMINISTER)
UNPIN: Final = Method(Selection, Pinned, Right.ADMINISTER)
DIRECTORY_LIST: Final = Method(Directory, DirectoryEntries, Right.LOOK, streams=True)
FILE_SHOW: Final = Method(FilePath, FileInfo, Right.LOOK)
CACHED: Final = Method(Selection, CachedFiles, Right.LOOK, streams=True)
WARMUP_FORECAST: Final = Method(Warmup, WarmupForecast, Right.LOOK)
EVICT_FORECAST: Final = Method(Selection, EvictForecast, Right.LOOK)
VERIFY: Final = Method(Empty, VerifyProgress, Right.ADMINISTER, streams=True)
JOB_PUBLISH: Final = Method(JobPublish, JobView, Right.JOB)
JOB_EPOCH: Final = Method(JobEpoch, Empty, Right.JOB)
JOB_PROGRESS: Final = Method(JobProgress, JobProgressReply, Right.JOB)
JOB_LIST: Final = Method(Empty, JobList, Right.LOOK)
JOB_SHOW: Final = Method(JobName, JobView, Right.JOB)
JOB_CANCEL: Final = Method(JobName, Empty, Right.JOB)
PUSH: Final = Method(PushSubscribe, PushOrder, Right.MOUNT, streams=True)
PUSH_REPORT: Final = Method(PushDone, PushReply, Right.MOUNT)
TELL_READS: Final = Method(MountReads, Empty, Right.MOUNT)
ASK_READS: Final = Method(ReadsAsked, ReadsTold, Right.JOB)
STALL_LIST: Final = Method(JobName, StallRows, Right.JOB)  # an empty name: of all jobs


def _named(namespace: Mapping[str, object]) -> tuple[Method[Any, Any], ...]:
    """Return all methods among the constants of a module, and name each after its constant."""
    found = []
    for constant, value in namespace.items():
        if isinstance(value, Method):
            value.name, value.function = constant.title().replace("_", ""), constant.lower()
            found.append(value)
    return tuple(found)


METHODS: Final = _named(globals())

# Status codes of a call without an answer.
_SILENT: Final = (
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.CANCELLED,
)
# Trailer of a failed call with the error's class name and text, so that the caller raises the same error.
ERROR_TRAILER: Final = "cachefs-error"


def encode(message: Message) -> bytes:
    """Return the encoded message. Raises ConfigError for a text that is not UTF-8 and a number of more than 64 bits,
    since both may come from users."""
    try:
        return msgspec.msgpack.encode(message)
    except UnicodeEncodeError as error:
        shown = error.object.encode("utf-8", "backslashreplace").decode()
        raise errors.ConfigError(f"{shown!r} is not UTF-8; only paths in a dataset may be anything else") from None
    except OverflowError:
        raise errors.ConfigError(f"a number of more than 64 bits in {type(message).__name__}") from None


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
    """Blocking client of the node's daemon. Must be made after the last fork."""

    def __init__(self, socket: Path, *, for_somebody: bool = False) -> None:
        """for_somebody: call on behalf of an unknown user, which only users who may mount may do.

        Raises ConfigError where the path is not possible for a socket.
        """
        self.socket = socket
        self._channel = grpc.insecure_channel(_target(socket), options=CHANNEL_OPTIONS)
        self.identity = ""  # sent along with each call; "" before it is known
        self._prefix = FOR_SOMEBODY if for_somebody else ""
        self._nobody_answers = False  # as the identity was last requested: the daemon has ended

    def call(self, method: Method[Request, Reply], request: Request, timeout: float = 30.0) -> Reply:
        """Call the daemon. Raises the CachefsError that the daemon raised, or DaemonUnavailable."""
        # Encoded here, since gRPC would hide the error of an invalid request.
        encoded = encode(request)
        stub = self._channel.unary_unary(method.path, None, decoder(method.reply))
        while True:
            used = self.identity
            try:
                return cast(Reply, stub(encoded, timeout=timeout, metadata=self._metadata))
            except grpc.RpcError as error:
                if not self.identified(error, used):
                    raise self.error(error) from None

    def begin(self, method: Method[Request, Reply], request: Request, timeout: float) -> Any:
        """Start a call. Returns its gRPC future: result() gives the reply or raises grpc.RpcError (see `error`).

        The caller retries where `identified` returns True. Raises ConfigError as `encode` does.
        """
        encoded = encode(request)
        stub = self._channel.unary_unary(method.path, None, decoder(method.reply))
        return stub.future(encoded, timeout=timeout, wait_for_ready=True, metadata=self._metadata)

    def stream(
        self,
        method: Method[Request, Reply],
        request: Request,
        timeout: float | None = None,
    ) -> Iterator[Reply]:
        """Yield the replies. Raises as `call` does, also where the daemon stops answering before the last reply."""
        encoded = encode(request)
        stub = self._channel.unary_stream(method.path, None, decoder(method.reply))
        while True:
            used = self.identity
            replies = stub(encoded, timeout=timeout, metadata=self._metadata)
            try:
                yield from replies
                return
            except grpc.RpcError as error:
                if not self.identified(error, used):
                    raise self.error(error) from None
            finally:
                replies.cancel()  # the daemon's work for a caller ends with the caller, not with its garbage collection

    def identified(self, error: grpc.RpcError, used: str) -> bool:
        """Return whether a failed call should be retried, as the daemon did not know the caller and now does.

        used: `identity` when the call was made. A daemon that has just started knows no identity. Blocks while
        connecting to the daemon.
        """
        if error.code() != grpc.StatusCode.UNAUTHENTICATED:
            return False
        if self.identity == used:
            answer = ask_identity(self.socket)
            self._nobody_answers = answer is None
            self.identity = answer or ""
        return self.identity != used

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return ((IDENTITY_KEY, self._prefix + self.identity),) if self.identity else ()

    def error(self, error: grpc.RpcError) -> errors.CachefsError:
        """Return the error for a failed call."""
        if error.code() in _SILENT and (why := why_silent(self.socket)):
            return errors.DaemonUnavailable(f"the daemon at {self.socket} does not answer: {why}")
        if error.code() == grpc.StatusCode.UNAUTHENTICATED and self._nobody_answers:
            return errors.DaemonUnavailable(f"the daemon at {self.socket} has ended; start it with `cachefsd`")
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
            if is_forbidden(self.socket):
                return errors.AccessDenied(f"you may not use the socket {self.socket} of the daemon; ask who runs it")
            return errors.DaemonUnavailable(
                f"no daemon answers at {self.socket}; start it with `cachefsd`, or name its socket with --socket"
            )
        return errors.CachefsError(f"the daemon failed: {error.details()}")

    def close(self) -> None:
        """Close the channel within CLOSE_SECONDS.

        gRPC waits for its calls to end, without a deadline, and a KeyboardInterrupt during the start of a call leaves a
        call that never ends.
        """
        closing = threading.Thread(target=self._channel.close, name="close-channel", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
