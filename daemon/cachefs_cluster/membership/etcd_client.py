"""Calls to etcd over gRPC. Each has a deadline, and is repeated at the next endpoint if one does not answer.

There is a channel for each endpoint, and all calls go to the one that answered last. gRPC's own round_robin takes
addresses only, and keeps a stopped endpoint in use until a ping has failed.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc

from cachefs.errors import CachefsError
from cachefs_cluster.membership import etcd_codec as codec

DecodedResponse = TypeVar("DecodedResponse")

# Seconds for which replaced channels stay open: longer than any call takes. A watch on one is restarted then.
RETIRED_SECONDS: Final = 60.0
# Least seconds of an attempt at one of several endpoints: a loaded etcd answers in half a second.
_MIN_ATTEMPT_SECONDS: Final = 1.0
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", 32 << 20),
    # etcd rejects pings that come more often than every 5 s as abuse. Without the second timeout gRPC notices nothing.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
    # Each client has its own connections: gRPC otherwise shares them, even with clients closed by another test.
    ("grpc.use_local_subchannel_pool", 1),
)
# Makes a member of etcd that has lost its leader end a stream, instead of falling silent.
_NEEDS_LEADER: Final = (("hasleader", "true"),)
# Transient errors: another endpoint, or a later call, may succeed.
_TRANSIENT_CODES: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)


class EtcdUnavailable(CachefsError):
    """No endpoint answered in time."""


class EtcdRefused(CachefsError):
    """etcd answered, and refused the call."""


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """Addresses of etcd, and the client's credentials."""

    # URLs, all http or all https, with ports.
    endpoints: Sequence[str]
    user: str = ""
    password_file: Path | None = None
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


class EtcdClient:
    """Makes blocking calls. Used by several threads."""

    def __init__(self, settings: EtcdSettings) -> None:
        """Prepare channels without connecting. Raises EtcdRefused if a certificate file cannot be read."""
        self._settings = settings
        self._certificate_times = _certificate_times(settings)
        self._channels = [_open_channel(url, settings) for url in settings.endpoints]
        self._current = 0  # index of the endpoint that is asked first
        self._lock = threading.Lock()
        self._token = ""

    @property
    def endpoint(self) -> str:
        """URL of the endpoint that is asked first."""
        return self._settings.endpoints[self._current]

    def read_range(
        self, key: bytes, timeout: float, *, prefix: bool = False, newest: bool = False
    ) -> codec.RangeResponse:
        request = codec.range_request(key, prefix=prefix, newest=newest)
        return self._call("KV/Range", request, codec.decode_range_response, timeout)

    def put_if(self, key: bytes, value: bytes, lease: int, revision: int, timeout: float) -> codec.TxnResponse:
        """Send `etcd_codec.put_if_request`. If a response is lost, the retry finds what the first attempt has put."""
        return self._call(
            "KV/Txn", codec.put_if_request(key, value, lease, revision), codec.decode_txn_response, timeout
        )

    def grant_lease(self, seconds: int, timeout: float) -> int:
        """Return the id of a new lease."""
        lease, _ = self._call("Lease/LeaseGrant", codec.grant_request(seconds), codec.decode_lease_response, timeout)
        return lease

    def revoke_lease(self, lease: int, timeout: float) -> None:
        """Revoke a lease with all its keys."""
        self._call("Lease/LeaseRevoke", codec.lease_request(lease), bytes, timeout)

    def keep_alive(self, lease: int, timeout: float) -> int:
        """Return the remaining seconds of the lease; 0 if there is no such lease."""
        _, seconds = self._call(
            "Lease/LeaseKeepAlive", codec.lease_request(lease), codec.decode_lease_response, timeout, True
        )
        return seconds

    def watch(self, prefix: bytes, revision: int) -> "EtcdWatch":
        """Watch all changes below *prefix* from *revision* on. The stream has no deadline: the caller must monitor it.
        The token must have been fetched by a call before."""
        channel = self._channels[self._current]
        method = channel.stream_stream("/etcdserverpb.Watch/Watch")
        return EtcdWatch(method, codec.watch_request(prefix, revision), self._metadata())

    def close(self) -> None:
        _close(self._channels)

    def switch_endpoint(self, url: str) -> None:
        """Ask another endpoint than *url* first."""
        with self._lock:
            if self.endpoint == url:
                self._current = (self._current + 1) % len(self._channels)

    def _call(
        self,
        name: str,
        request: bytes,
        decode: Callable[[bytes], DecodedResponse],
        timeout: float,
        streams: bool = False,
    ) -> DecodedResponse:
        """Make a call. Raises EtcdUnavailable or EtcdRefused within *timeout* seconds."""
        deadline = time.monotonic() + timeout
        attempt = max(_MIN_ATTEMPT_SECONDS, timeout / len(self._channels))
        for _ in self._channels:
            url = self.endpoint
            try:
                return self._call_once(name, request, decode, min(attempt, deadline - time.monotonic()), streams)
            except grpc.RpcError as error:
                if error.code() not in _TRANSIENT_CODES:
                    raise EtcdRefused(f"etcd at {url} refuses: {error.details()}") from None
                why = _reason(error)
                self.switch_endpoint(url)
            except codec.MalformedMessage as error:
                raise EtcdRefused(f"{url} sent an invalid response; is it an etcd server? {error}") from None
            if deadline - time.monotonic() < 0.05:
                break
        self._reload_certificates()
        raise EtcdUnavailable(f"etcd at {', '.join(self._settings.endpoints)} does not answer ({why})")

    def _reload_certificates(self) -> None:
        """Reopen the channels if a certificate was replaced, since gRPC cannot reload one."""
        stamps = _certificate_times(self._settings)
        with self._lock:
            if stamps == self._certificate_times:
                return
            channels = [_open_channel(url, self._settings) for url in self._settings.endpoints]
            before, self._certificate_times, self._channels = self._channels, stamps, channels
        # Other threads use the old channels: a call on a closed channel would end in an error that is not etcd's.
        closing = threading.Timer(RETIRED_SECONDS, _close, (before,))
        closing.daemon = True
        closing.start()

    def _call_once(
        self, name: str, request: bytes, decode: Callable[[bytes], DecodedResponse], timeout: float, streams: bool
    ) -> DecodedResponse:
        channel = self._channels[self._current]
        for attempt in (1, 2):
            if self._settings.user and not self._token:
                self._token = self._authenticate(timeout)
            metadata = self._metadata()
            try:
                if streams:
                    method = channel.stream_stream(f"/etcdserverpb.{name}")
                    response = _first_response(method(iter([request]), timeout=timeout, metadata=metadata))
                else:
                    response = channel.unary_unary(f"/etcdserverpb.{name}")(request, timeout=timeout, metadata=metadata)
                return decode(response)
            except grpc.RpcError as error:
                stale = error.code() is grpc.StatusCode.UNAUTHENTICATED or "auth token" in (error.details() or "")
                if not (stale and self._settings.user and attempt == 1):
                    raise
                self._token = ""
        raise AssertionError("unreachable")

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (*_NEEDS_LEADER, ("token", self._token)) if self._token else _NEEDS_LEADER

    def _authenticate(self, timeout: float) -> str:
        path = self._settings.password_file
        try:
            password = path.read_text().rstrip("\n") if path is not None else ""
        except (OSError, ValueError) as error:
            raise EtcdRefused(f"cluster.etcd_password_file {path} cannot be read: {error}") from None
        call = self._channels[self._current].unary_unary("/etcdserverpb.Auth/Authenticate")
        return codec.decode_token_response(
            call(codec.authenticate_request(self._settings.user, password), timeout=timeout)
        )


class EtcdWatch:
    """A stream of changes."""

    def __init__(self, method: Any, request: bytes, metadata: Any) -> None:
        self._ended = threading.Event()
        self._stream = method(self._requests(request), metadata=metadata)

    def _requests(self, request: bytes) -> Iterator[bytes]:
        yield request
        self._ended.wait()  # etcd ends a watch whose requests have ended

    def __iter__(self) -> Iterator[codec.WatchResponse]:
        """Yield changes until the stream ends. Raises EtcdUnavailable, EtcdRefused."""
        try:
            yield from map(codec.decode_watch_response, self._stream)
        except codec.MalformedMessage as error:
            raise EtcdRefused(f"etcd sent an invalid message on a watch: {error}") from None
        except grpc.RpcError as error:
            if self._ended.is_set():
                return
            if error.code() in _TRANSIENT_CODES:
                raise EtcdUnavailable(f"etcd has ended a watch ({_reason(error)})") from None
            raise EtcdRefused(f"etcd refuses a watch: {error.details()}") from None
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the watch. May be called from any thread."""
        self._ended.set()
        self._stream.cancel()


def _first_response(stream: Any) -> bytes:
    """Return the first response of a stream, and end the stream."""
    try:
        response: bytes = next(stream)
        return response
    except StopIteration:
        raise codec.MalformedMessage("a stream that ended without a response") from None
    finally:
        stream.cancel()


def _close(channels: Sequence[grpc.Channel]) -> None:
    for channel in channels:
        channel.close()


def _reason(error: grpc.RpcError) -> str:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no response in time"
    details = (error.details() or str(error.code())).strip().splitlines() or [""]
    return details[0].rpartition("last error: ")[2].removeprefix("UNKNOWN: ")[:200]


def _certificate_times(settings: EtcdSettings) -> list[int]:
    """Return the certificates' mtimes, which differ after a replacement."""
    found = []
    for path in (settings.ca, settings.certificate, settings.key):
        with contextlib.suppress(OSError):
            found.append(path.stat().st_mtime_ns if path is not None else 0)
    return found


def _open_channel(url: str, settings: EtcdSettings) -> grpc.Channel:
    scheme, _, target = url.partition("://")
    if scheme == "http":
        return grpc.insecure_channel(target, options=_OPTIONS)
    try:
        ca, certificate, key = (
            path.read_bytes() if path is not None else None
            for path in (settings.ca, settings.certificate, settings.key)
        )
    except OSError as error:
        raise EtcdRefused(f"{error.filename}, a certificate for etcd, cannot be read: {error.strerror}") from None
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(ca, key, certificate), options=_OPTIONS)
