"""The control plane of one node: gRPC over a unix socket, msgpack messages, no data.

METHODS is the whole interface. A call is named after its constant here: DATASET_ADD is `DatasetAdd` on the wire,
and the daemon serves it with its coroutine (or async generator, where it streams) `dataset_add`.
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
from cachefs.cluster_messages import ClusterStatus, DrainRequest, DrainStatus, ScaleStatus
from cachefs.identity import IDENTITY_KEY, UNKNOWN_USER_PREFIX, request_identity
from cachefs.job_messages import (
    JobEpoch,
    JobList,
    JobName,
    JobPriorityRequest,
    JobProgress,
    JobProgressResponse,
    JobPublication,
    JobView,
    StallRows,
)
from cachefs.listener import silence_reason
from cachefs.messages import (
    CachedDatasets,
    CachedFiles,
    DatasetAddRequest,
    DatasetDetail,
    DatasetLimit,
    DatasetList,
    DatasetName,
    DatasetNames,
    DatasetSetRequest,
    DatasetSetResult,
    DatasetView,
    DirectoryEntries,
    DirectoryPath,
    Empty,
    EvictedAmount,
    EvictForecast,
    FileInfo,
    FilePath,
    ListingProgress,
    LogLevel,
    Message,
    MountReport,
    NodeView,
    PinnedAmount,
    ReloadResult,
    Selection,
    Status,
    VerifyProgress,
    WarmupForecast,
    WarmupId,
    WarmupList,
    WarmupProgress,
    WarmupRequest,
)  # fmt: skip
from cachefs.push_messages import PushAcknowledgement, PushCommand, PushReport, PushSubscription
from cachefs.read_messages import MountReadReport, ReadsRequest, ReadsResponse
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
Response = TypeVar("Response", bound=Message)


class AccessRight(StrEnum):
    """The users who may make a call."""

    LOOK = "look"  # every local user
    JOB = "job"  # every local user, for jobs of their own
    MOUNT = "mount"  # root, the user that the daemon runs as, members of its group
    ADMINISTER = "administer"  # root, the user that the daemon runs as, members of the admin group


@dataclass(eq=False)
class Method(Generic[Request, Response]):
    """One call of the interface."""

    request: type[Request]
    response: type[Response]
    right: AccessRight
    # Whether the reply is a stream of *reply* messages.
    is_streaming: bool = False
    # Name on the wire, such as `DatasetAddRequest`, and name of the daemon's function, such as `dataset_add`; see
    # `_name_methods`.
    name: str = field(default="", init=False)
    function: str = field(default="", init=False)

    @property
    def path(self) -> str:
        return f"/{SERVICE}/{self.name}"


REPORT: Final = Method(MountReport, NodeView, AccessRight.MOUNT)
NODE: Final = Method(Empty, NodeView, AccessRight.LOOK)
STATUS: Final = Method(Empty, Status, AccessRight.LOOK)
RELOAD: Final = Method(Empty, ReloadResult, AccessRight.ADMINISTER)
LOG_LEVEL: Final = Method(LogLevel, LogLevel, AccessRight.ADMINISTER)
CLUSTER: Final = Method(Empty, ClusterStatus, AccessRight.LOOK)
DRAIN: Final = Method(DrainRequest, DrainStatus, AccessRight.ADMINISTER)
SCALE_HINT: Final = Method(Empty, ScaleStatus, AccessRight.LOOK)
DATASET_ADD: Final = Method(DatasetAddRequest, ListingProgress, AccessRight.ADMINISTER, is_streaming=True)
DATASET_TRY: Final = Method(DatasetAddRequest, ListingProgress, AccessRight.ADMINISTER, is_streaming=True)
DATASET_SET: Final = Method(DatasetSetRequest, DatasetSetResult, AccessRight.ADMINISTER)
DATASET_REFRESH: Final = Method(DatasetName, ListingProgress, AccessRight.ADMINISTER, is_streaming=True)
DATASET_LIST: Final = Method(Empty, DatasetList, AccessRight.LOOK)
DATASET_SHOW: Final = Method(DatasetName, DatasetDetail, AccessRight.LOOK)
DATASET_CACHED: Final = Method(DatasetNames, CachedDatasets, AccessRight.LOOK)
DATASET_REMOVE: Final = Method(DatasetName, EvictedAmount, AccessRight.ADMINISTER)
DATASET_LIMIT: Final = Method(DatasetLimit, DatasetView, AccessRight.ADMINISTER)
WARMUP: Final = Method(WarmupRequest, WarmupProgress, AccessRight.ADMINISTER, is_streaming=True)
WARMUP_LIST: Final = Method(Empty, WarmupList, AccessRight.LOOK)
WARMUP_WATCH: Final = Method(WarmupId, WarmupProgress, AccessRight.LOOK, is_streaming=True)
WARMUP_CANCEL: Final = Method(WarmupId, WarmupProgress, AccessRight.ADMINISTER)
EVICT: Final = Method(Selection, EvictedAmount, AccessRight.ADMINISTER)
PIN: Final = Method(Selection, PinnedAmount, AccessRight.ADMINISTER)
UNPIN: Final = Method(Selection, PinnedAmount, AccessRight.ADMINISTER)
DIRECTORY_LIST: Final = Method(DirectoryPath, DirectoryEntries, AccessRight.LOOK, is_streaming=True)
FILE_SHOW: Final = Method(FilePath, FileInfo, AccessRight.LOOK)
CACHED: Final = Method(Selection, CachedFiles, AccessRight.LOOK, is_streaming=True)
WARMUP_FORECAST: Final = Method(WarmupRequest, WarmupForecast, AccessRight.LOOK)
EVICT_FORECAST: Final = Method(Selection, EvictForecast, AccessRight.LOOK)
VERIFY: Final = Method(Empty, VerifyProgress, AccessRight.ADMINISTER, is_streaming=True)
JOB_PUBLISH: Final = Method(JobPublication, JobView, AccessRight.JOB)
JOB_EPOCH: Final = Method(JobEpoch, Empty, AccessRight.JOB)
JOB_PROGRESS: Final = Method(JobProgress, JobProgressResponse, AccessRight.JOB)
JOB_LIST: Final = Method(Empty, JobList, AccessRight.LOOK)
JOB_SHOW: Final = Method(JobName, JobView, AccessRight.JOB)
JOB_CANCEL: Final = Method(JobName, Empty, AccessRight.JOB)
JOB_PRIORITY: Final = Method(JobPriorityRequest, JobView, AccessRight.JOB)
PUSH: Final = Method(PushSubscription, PushCommand, AccessRight.MOUNT, is_streaming=True)
PUSH_REPORT: Final = Method(PushReport, PushAcknowledgement, AccessRight.MOUNT)
TELL_READS: Final = Method(MountReadReport, Empty, AccessRight.MOUNT)
ASK_READS: Final = Method(ReadsRequest, ReadsResponse, AccessRight.JOB)
STALL_LIST: Final = Method(JobName, StallRows, AccessRight.JOB)  # an empty name: of all jobs


def _name_methods(namespace: Mapping[str, object]) -> tuple[Method[Any, Any], ...]:
    """Return all methods among the constants of a module, and name each after its constant."""
    found = []
    for constant, value in namespace.items():
        if isinstance(value, Method):
            value.name, value.function = constant.title().replace("_", ""), constant.lower()
            found.append(value)
    return tuple(found)


METHODS: Final = _name_methods(globals())

# Status codes of a call without an answer.
_UNANSWERED_CODES: Final = (
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
        raise errors.ConfigError(f"{shown!r} is not UTF-8; only paths in a dataset may have other bytes") from None
    except OverflowError:
        raise errors.ConfigError(f"a number of more than 64 bits in {type(message).__name__}") from None


def response_decoder(kind: type[Response]) -> Callable[[bytes], Response]:
    return msgspec.msgpack.Decoder(kind).decode


def _grpc_target(socket: Path) -> str:
    path = str(socket.absolute())
    shown = os.fsencode(path).decode("utf-8", "backslashreplace")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise errors.ConfigError(f"the path of the socket {shown} is longer than {MAX_SOCKET_PATH} bytes")
    if shown != path:
        raise errors.ConfigError(f"the path of the socket {shown} is not UTF-8")
    return f"unix:{path}"


class DaemonClient:
    """Blocking client of the node's daemon. Must be made after the last fork."""

    def __init__(self, socket: Path, *, for_unknown_user: bool = False) -> None:
        """for_unknown_user: call on behalf of an unknown user, which only users who may mount may do.

        Raises ConfigError where the path is not possible for a socket.
        """
        self.socket = socket
        self._channel = grpc.insecure_channel(_grpc_target(socket), options=CHANNEL_OPTIONS)
        self.identity = ""  # sent along with each call; "" before it is known
        self._identity_prefix = UNKNOWN_USER_PREFIX if for_unknown_user else ""
        self._has_daemon_ended = False  # as the identity was last requested: the daemon has ended

    def call(self, method: Method[Request, Response], request: Request, timeout: float = 30.0) -> Response:
        """Call the daemon. Raises the CachefsError that the daemon raised, or DaemonUnavailable."""
        # Encoded here, since gRPC would hide the error of an invalid request.
        encoded = encode(request)
        stub = self._channel.unary_unary(method.path, None, response_decoder(method.response))
        while True:
            used = self.identity
            try:
                return cast(Response, stub(encoded, timeout=timeout, metadata=self._metadata))
            except grpc.RpcError as error:
                if not self.renew_identity(error, used):
                    raise self.translate_error(error) from None

    def start_call(self, method: Method[Request, Response], request: Request, timeout: float) -> Any:
        """Start a call. Returns its gRPC future: result() gives the reply or raises grpc.RpcError (see
        `translate_error`).

        The caller retries where `renew_identity` returns True. Raises ConfigError as `encode` does.
        """
        encoded = encode(request)
        stub = self._channel.unary_unary(method.path, None, response_decoder(method.response))
        return stub.future(encoded, timeout=timeout, wait_for_ready=True, metadata=self._metadata)

    def stream_responses(
        self,
        method: Method[Request, Response],
        request: Request,
        timeout: float | None = None,
    ) -> Iterator[Response]:
        """Yield the replies. Raises as `call` does, also where the daemon stops answering before the last reply."""
        encoded = encode(request)
        stub = self._channel.unary_stream(method.path, None, response_decoder(method.response))
        while True:
            used = self.identity
            replies = stub(encoded, timeout=timeout, metadata=self._metadata)
            try:
                yield from replies
                return
            except grpc.RpcError as error:
                if not self.renew_identity(error, used):
                    raise self.translate_error(error) from None
            finally:
                replies.cancel()  # the daemon's work for a caller ends with the caller, not with its garbage collection

    def renew_identity(self, error: grpc.RpcError, old_identity: str) -> bool:
        """Return whether a failed call should be retried, as the daemon did not know the caller and now does.

        old_identity: `identity` when the call was made. A daemon that has just started knows no identity. Blocks while
        connecting to the daemon.
        """
        if error.code() != grpc.StatusCode.UNAUTHENTICATED:
            return False
        if self.identity == old_identity:
            identity = request_identity(self.socket)
            self._has_daemon_ended = identity is None
            self.identity = identity or ""
        return self.identity != old_identity

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return ((IDENTITY_KEY, self._identity_prefix + self.identity),) if self.identity else ()

    def translate_error(self, error: grpc.RpcError) -> errors.CachefsError:
        """Return the error for a failed call."""
        if error.code() in _UNANSWERED_CODES and (why := silence_reason(self.socket)):
            return errors.DaemonUnavailable(f"the daemon at {self.socket} does not answer: {why}")
        if error.code() == grpc.StatusCode.UNAUTHENTICATED and self._has_daemon_ended:
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
                return errors.AccessDenied(
                    f"you may not use the socket {self.socket} of the daemon; ask its administrator"
                )
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
