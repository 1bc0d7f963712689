"""GETs of objects by our own HTTP client: a GET through aiobotocore takes 18 times the processor time.

Anything unusual raises UnsupportedByClient, and S3Origin repeats the request through aiobotocore. Known errors become
the same exceptions as there.
"""

import asyncio
import time
from typing import Any, Final, NamedTuple

from botocore.exceptions import ReadTimeoutError

from cachefs.errors import OriginError
from cachefs_daemon.origin.base import ObjectRange, OriginSettings
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.origin.http.connection import (
    S3_COUNTERS,
    SUCCESS,
    ClosedWithoutResponse,
    HttpResponse,
    IncompleteResponse,
    ReadTimeout,
)
from cachefs_daemon.origin.http.head import MalformedHead
from cachefs_daemon.origin.http.hedging import HedgedRequests
from cachefs_daemon.origin.http.pool import HttpPool, ServerAddress
from cachefs_daemon.origin.http.tls import ClientTls, retrieve_exception
from cachefs_daemon.origin.s3.credentials import CredentialSource, CurrentCredentials
from cachefs_daemon.origin.s3.errors import client_error_of, is_redirect
from cachefs_daemon.origin.s3.parts import PartsRequest
from cachefs_daemon.origin.s3.prepared_get import FrozenCredentials, GetParameters, PreparedGet
from cachefs_daemon.origin.s3.request import RequestMaker
from cachefs_daemon.origin.s3.response import (
    BrokenS3Response,
    S3Target,
    bytes_before,
    has_checksum,
    is_whole_object,
    verify_checksum,
)
from cachefs_daemon.origin.s3.route import NoRoute, S3Route, find_route

_NOT_IMPLEMENTED: Final = 501
# Replaces the body if an overloaded server sends it in chunks, as AWS does.
_SLOW_DOWN_BODY: Final = b"<Error><Code>SlowDown</Code></Error>"
_OVERLOADED: Final = (429, 503)
# Gone, another version, shorter: errors that end a read without a retry.
_FINAL: Final = frozenset((404, 412, 416))


# Seconds for which other processes get the same prepared GETs while credentials are being read.
_PREPARED_SECONDS: Final = 5.0


class UnsupportedByClient(Exception):
    """A response or request that our own client does not handle, but aiobotocore may."""

    def __init__(self, reason: str, *, was_sent: bool = True) -> None:
        """was_sent: whether a request was sent."""
        super().__init__(reason)
        self.was_sent = was_sent


class SuspectResponse(Exception):
    """A response that would end a read for good, but may belong to another request: aiobotocore is to ask again."""


class _BucketAccess(NamedTuple):
    """The connections and parameters of GETs to one bucket at this moment."""

    server: ServerAddress
    pool: HttpPool
    request_maker: RequestMaker
    # The same for another process.
    get_parameters: GetParameters
    # Monotonic seconds.
    made: float


class S3Get:
    """GETs with the settings and credentials of one aiobotocore client. Used on one event loop."""

    def __init__(
        self,
        client: Any,
        credentials: CredentialSource | None,
        settings: OriginSettings,
        verify: bool | str,
        endpoint: Endpoint,
    ) -> None:
        """client: of aiobotocore, after s3_route.prepare_bucket. credentials: None for unsigned requests. verify: see
        ClientTls."""
        self._client = client
        self._credentials = CurrentCredentials(credentials)
        self._settings = settings
        self._verify = verify
        self._tls = ClientTls(verify)
        self._hedged_requests = HedgedRequests(endpoint)
        self._pools: dict[ServerAddress, HttpPool] = {}
        self._routes: dict[str, S3Route | NoRoute] = {}  # by bucket
        self._finding = asyncio.Lock()
        self._refresh_task: asyncio.Task[None] | None = None  # reads credentials for other processes
        self._checksums = True  # the server may be asked for checksums
        # By bucket, made since the last read of the credentials, a second ago. The time in signatures is as old;
        # servers accept times that are 15 minutes off.
        self._accesses: dict[str, _BucketAccess] = {}

    async def read(self, target: S3Target, wanted: ObjectRange, parts: PartsRequest | None = None) -> memoryview:
        """Return the *wanted* bytes of the object at *target*. Raises UnsupportedByClient, SuspectResponse, and what
        aiobotocore's client raises.

        parts: receives the bytes as they arrive. Such a request is large, so it is never hedged.
        """
        etag = wanted.version.decode()
        if _needs_botocore(target.key, etag):
            raise UnsupportedByClient("a key or an ETag has unusual characters", was_sent=False)
        if self._credentials.is_refresh_due:
            await self._credentials.refresh()
            self._accesses.clear()
        access = self._accesses.get(target.bucket) or await self._find_access(target.bucket)
        try:
            request = access.request_maker.make_get(target.key, etag, wanted)
            if parts is None:
                response = await self._hedged_requests.send_request(access.pool, request, wanted.length)
            else:
                response = await access.pool.send_request(request, wanted.length, parts)
        except MalformedHead as error:
            raise UnsupportedByClient(f"the head of an answer is not understood: {error}") from None
        except ClosedWithoutResponse:
            raise BrokenS3Response("the server closed the connection without an answer") from None
        except IncompleteResponse as error:
            raise BrokenS3Response(str(error)) from None
        except ReadTimeout as error:
            raise ReadTimeoutError(endpoint_url=access.server.url, error=error) from None
        if response.head.status not in SUCCESS:
            self._raise_refusal(response, target.bucket)
        try:
            return await _verify_response(response, target, wanted)
        except BaseException as error:
            S3_COUNTERS.count_unused_response(error, len(response.body or b"") - (parts.passed_bytes if parts else 0))
            raise

    def prepare_get(self, target: S3Target, wanted: ObjectRange) -> PreparedGet | None:
        """Return the prepared GET of a whole object; None if `read` must find credentials or a route first."""
        if self._credentials.is_refresh_due and (self._refresh_task is None or self._refresh_task.done()):
            self._refresh_task = asyncio.create_task(self.prepare_bucket(target.bucket))
            self._refresh_task.add_done_callback(retrieve_exception)
        access = self._accesses.get(target.bucket)
        etag = wanted.version.decode()
        if access is None or time.monotonic() - access.made >= _PREPARED_SECONDS or _needs_botocore(target.key, etag):
            return None
        return PreparedGet(access.get_parameters, target.key, etag)

    async def prepare_bucket(self, bucket: str) -> None:
        """Find out how to send GETs to *bucket* now. Raises UnsupportedByClient, and what aiobotocore's client
        raises."""
        await self._credentials.refresh()
        self._accesses.clear()
        await self._find_access(bucket)

    def forget_route(self, bucket: str) -> None:
        """Ask aiobotocore again for the route to this bucket, which it may have learned from a redirect."""
        self._routes.pop(bucket, None)
        self._accesses.pop(bucket, None)

    def close(self) -> None:
        """Close all connections."""
        self._credentials.close()
        if self._refresh_task is not None:
            self._refresh_task.cancel()
        for pool in self._pools.values():
            pool.close()

    async def _find_access(self, bucket: str) -> _BucketAccess:
        async with self._finding:
            route = self._routes.get(bucket)
            if route is None:
                try:
                    route = await find_route(self._client, bucket)
                except NoRoute as reason:
                    route = reason
                self._routes[bucket] = route
        if isinstance(route, NoRoute):
            raise UnsupportedByClient(str(route), was_sent=False)
        frozen = self._credentials.frozen
        if route.region and frozen is None:
            raise UnsupportedByClient("requests are signed, but there are no credentials", was_sent=False)
        pool = self._pools.get(route.server)
        if pool is None:
            pool = self._pools[route.server] = HttpPool(route.server, self._settings, self._tls)
        maker = RequestMaker(route, frozen, checksums=self._checksums)
        keys = FrozenCredentials(frozen.access_key, frozen.secret_key, frozen.token) if frozen is not None else None
        ordered = GetParameters(route, keys, self._checksums, self._verify, self._settings)
        access = self._accesses[bucket] = _BucketAccess(route.server, pool, maker, ordered, time.monotonic())
        return access

    def _raise_refusal(self, response: HttpResponse, bucket: str) -> None:
        """Raise what aiobotocore's client raises for this response, or UnsupportedByClient, or SuspectResponse."""
        head, body, _ = response
        if head.status == _NOT_IMPLEMENTED and self._checksums:
            # Cloudflare R2 answers a request for checksums like this.
            self._checksums = False
            raise UnsupportedByClient("the server may not know checksums")
        overloaded = head.status == 429 or head.status >= 500
        if head.status < 400 or (body is None and not overloaded):
            raise UnsupportedByClient(f"an answer has status {head.status}")
        # An overloaded server is not asked again for a chunked body; its status says enough.
        unread = body is None and head.status in _OVERLOADED
        error = client_error_of(head.status, head.headers, _SLOW_DOWN_BODY if unread else bytes(body or b""))
        if is_redirect(error):
            raise UnsupportedByClient(f"bucket {bucket} may be in another region")
        if head.status in _FINAL:
            _raise_if_suspect(response)
        raise error


async def _verify_response(response: HttpResponse, target: S3Target, wanted: ObjectRange) -> memoryview:
    """Return the body, checked to be the *wanted* bytes of the object at *target*. Raises what `S3Get.read` raises."""
    head, body, _ = response
    if head.status not in (200, 206):
        raise UnsupportedByClient(f"an answer has status {head.status}")
    if head.length is None:
        raise UnsupportedByClient("an answer has no length")
    if not is_whole_object(wanted, head.length, head.headers):
        _check_range(response, target, wanted)
    if body is None:
        raise UnsupportedByClient("the server sent a whole object instead of a range")
    if wanted.length == wanted.size and has_checksum(head.headers):
        await verify_checksum(body, head.headers)
    return body


def _needs_botocore(key: str, etag: str) -> bool:
    # Several blanks would have to be signed as one. No server has such ETags.
    return not key or not etag.isascii() or not etag.isprintable() or " " in etag


def _check_range(response: HttpResponse, target: S3Target, wanted: ObjectRange) -> None:
    """Check that the body is the *wanted* range of the object. Raises OriginError, BrokenS3Response, SuspectResponse,
    UnsupportedByClient."""
    head = response.head
    etag, span = (head.headers.get(name, b"").decode("latin-1") for name in (b"etag", b"content-range"))
    try:
        before = bytes_before(wanted, target, etag, head.length, span)
    except OriginError:
        _raise_if_suspect(response)
        raise
    if before or head.length != wanted.length:
        raise UnsupportedByClient("the server sent a whole object instead of a range")


def _raise_if_suspect(response: HttpResponse) -> None:
    """Raise SuspectResponse if *response*, which would end a read for good, may belong to another request: a server or
    proxy that is out of step sends wrong responses for as long as the connection is used."""
    if response.reused_connection is not None:
        response.reused_connection.abort()
        raise SuspectResponse("a reused connection gave the response to another request")
