"""GETs of objects by our own HTTP client: a GET through aiobotocore takes 18 times the processor time.

Anything unusual raises Unusual, and S3Origin repeats the request through aiobotocore. Known errors become the same
exceptions as there.
"""

import asyncio
import time
from typing import Any, Final, NamedTuple

from botocore.exceptions import ReadTimeoutError

from cachefs.errors import OriginError
from cachefs_daemon.origin.base import ObjectRange, OriginSettings
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.origin.http_connection import LEDGER, SUCCESS, Answer, ClosedUnanswered, CutOff, Silent
from cachefs_daemon.origin.http_head import Malformed
from cachefs_daemon.origin.http_pool import HttpPool, Server
from cachefs_daemon.origin.http_race import Races
from cachefs_daemon.origin.http_tls import Tls, noticed
from cachefs_daemon.origin.order import Keys, Order, Way
from cachefs_daemon.origin.s3_answer import BrokenAnswer, Place, bytes_before, is_whole
from cachefs_daemon.origin.s3_checksum import check_whole, has_checksum
from cachefs_daemon.origin.s3_credentials import Credentials, CurrentCredentials
from cachefs_daemon.origin.s3_errors import is_redirect, refusal
from cachefs_daemon.origin.s3_parts import Parts
from cachefs_daemon.origin.s3_request import RequestMaker
from cachefs_daemon.origin.s3_route import NoRoute, Route, find_route

_NOT_IMPLEMENTED: Final = 501
# Replaces the body if an overloaded server sends it in chunks, as AWS does.
_UNREAD: Final = b"<Error><Code>SlowDown</Code></Error>"
_OVERLOADED: Final = (429, 503)
# Gone, another version, shorter: errors that end a read without a retry.
_FINAL: Final = frozenset((404, 412, 416))


# Seconds for which other processes get the same prepared GETs while credentials are being read.
_ORDERED: Final = 5.0


class Unusual(Exception):
    """A response or request that our own client does not handle, but aiobotocore may."""

    def __init__(self, reason: str, *, asked: bool = True) -> None:
        """asked: whether a request was sent."""
        super().__init__(reason)
        self.asked = asked


class Doubtful(Exception):
    """A response that would end a read for good, but may belong to another request: aiobotocore is to ask again."""


class _Way(NamedTuple):
    """The connections and parameters of GETs to one bucket at this moment."""

    server: Server
    pool: HttpPool
    maker: RequestMaker
    # The same for another process.
    ordered: Way
    # Monotonic seconds.
    made: float


class S3Get:
    """GETs with the settings and credentials of one aiobotocore client. Used on one event loop."""

    def __init__(
        self,
        client: Any,
        credentials: Credentials | None,
        settings: OriginSettings,
        verify: bool | str,
        endpoint: Endpoint,
    ) -> None:
        """client: of aiobotocore, after s3_route.prepare. credentials: None for unsigned requests. verify: see Tls."""
        self._client = client
        self._credentials = CurrentCredentials(credentials)
        self._settings = settings
        self._verify = verify
        self._tls = Tls(verify)
        self._races = Races(endpoint)
        self._pools: dict[Server, HttpPool] = {}
        self._routes: dict[str, Route | NoRoute] = {}  # by bucket
        self._finding = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None  # reads credentials for other processes
        self._checksums = True  # the server may be asked for checksums
        # By bucket, made since the last read of the credentials, a second ago. The time in signatures is as old;
        # servers accept times that are 15 minutes off.
        self._ways: dict[str, _Way] = {}

    async def read(self, place: Place, wanted: ObjectRange, parts: Parts | None = None) -> memoryview:
        """Return the *wanted* bytes of the object at *place*. Raises Unusual, Doubtful, and what aiobotocore's client
        raises.

        parts: receives the bytes as they arrive. Such a request is large, so it is never hedged.
        """
        etag = wanted.version.decode()
        if _is_odd(place.key, etag):
            raise Unusual("a key or an ETag is odd", asked=False)
        if self._credentials.is_look_due:
            await self._credentials.look()
            self._ways.clear()
        way = self._ways.get(place.bucket) or await self._find_way(place.bucket)
        try:
            request = way.maker.get(place.key, etag, wanted)
            if parts is None:
                answer = await self._races.ask(way.pool, request, wanted.length)
            else:
                answer = await way.pool.ask(request, wanted.length, parts)
        except Malformed as error:
            raise Unusual(f"the head of an answer is not understood: {error}") from None
        except ClosedUnanswered:
            raise BrokenAnswer("the server closed the connection without an answer") from None
        except CutOff as error:
            raise BrokenAnswer(str(error)) from None
        except Silent as error:
            raise ReadTimeoutError(endpoint_url=way.server.url, error=error) from None
        if answer.head.status not in SUCCESS:
            self._refuse(answer, place.bucket)
        try:
            return await _checked(answer, place, wanted)
        except BaseException as error:
            LEDGER.thrown_away(error, len(answer.body or b"") - (parts.handed if parts else 0))
            raise

    def order(self, place: Place, wanted: ObjectRange) -> Order | None:
        """Return the prepared GET of a whole object; None if `read` must find credentials or a route first."""
        if self._credentials.is_look_due and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self.prepare(place.bucket))
            self._looking.add_done_callback(noticed)
        way = self._ways.get(place.bucket)
        etag = wanted.version.decode()
        if way is None or time.monotonic() - way.made >= _ORDERED or _is_odd(place.key, etag):
            return None
        return Order(way.ordered, place.key, etag)

    async def prepare(self, bucket: str) -> None:
        """Find out how to send GETs to *bucket* now. Raises Unusual, and what aiobotocore's client raises."""
        await self._credentials.look()
        self._ways.clear()
        await self._find_way(bucket)

    def forget_route(self, bucket: str) -> None:
        """Ask aiobotocore again for the route to this bucket, which it may have learned from a redirect."""
        self._routes.pop(bucket, None)
        self._ways.pop(bucket, None)

    def close(self) -> None:
        """Close all connections."""
        self._credentials.close()
        if self._looking is not None:
            self._looking.cancel()
        for pool in self._pools.values():
            pool.close()

    async def _find_way(self, bucket: str) -> _Way:
        async with self._finding:
            route = self._routes.get(bucket)
            if route is None:
                try:
                    route = await find_route(self._client, bucket)
                except NoRoute as reason:
                    route = reason
                self._routes[bucket] = route
        if isinstance(route, NoRoute):
            raise Unusual(str(route), asked=False)
        frozen = self._credentials.frozen
        if route.region and frozen is None:
            raise Unusual("requests are signed, but there are no credentials", asked=False)
        pool = self._pools.get(route.server)
        if pool is None:
            pool = self._pools[route.server] = HttpPool(route.server, self._settings, self._tls)
        maker = RequestMaker(route, frozen, checksums=self._checksums)
        keys = Keys(frozen.access_key, frozen.secret_key, frozen.token) if frozen is not None else None
        ordered = Way(route, keys, self._checksums, self._verify, self._settings)
        way = self._ways[bucket] = _Way(route.server, pool, maker, ordered, time.monotonic())
        return way

    def _refuse(self, answer: Answer, bucket: str) -> None:
        """Raise what aiobotocore's client raises for this response, or Unusual, or Doubtful."""
        head, body, _ = answer
        if head.status == _NOT_IMPLEMENTED and self._checksums:
            # Cloudflare R2 answers a request for checksums like this.
            self._checksums = False
            raise Unusual("the server may not know checksums")
        overloaded = head.status == 429 or head.status >= 500
        if head.status < 400 or (body is None and not overloaded):
            raise Unusual(f"an answer has status {head.status}")
        # An overloaded server is not asked again for a chunked body; its status says enough.
        unread = body is None and head.status in _OVERLOADED
        error = refusal(head.status, head.headers, _UNREAD if unread else bytes(body or b""))
        if is_redirect(error):
            raise Unusual(f"bucket {bucket} may be in another region")
        if head.status in _FINAL:
            _doubt(answer)
        raise error


async def _checked(answer: Answer, place: Place, wanted: ObjectRange) -> memoryview:
    """Return the body, checked to be the *wanted* bytes of the object at *place*. Raises what `S3Get.read` raises."""
    head, body, _ = answer
    if head.status not in (200, 206):
        raise Unusual(f"an answer has status {head.status}")
    if head.length is None:
        raise Unusual("an answer has no length")
    if not is_whole(wanted, head.length, head.headers):
        _require_right_bytes(answer, place, wanted)
    if body is None:
        raise Unusual("a whole object came in place of a range")
    if wanted.length == wanted.size and has_checksum(head.headers):
        await check_whole(body, head.headers)
    return body


def _is_odd(key: str, etag: str) -> bool:
    # Several blanks would have to be signed as one. No server has such ETags.
    return not key or not etag.isascii() or not etag.isprintable() or " " in etag


def _require_right_bytes(answer: Answer, place: Place, wanted: ObjectRange) -> None:
    """Check that the body is the *wanted* range of the object. Raises OriginError, BrokenAnswer, Doubtful, Unusual."""
    head = answer.head
    said, span = (head.headers.get(name, b"").decode("latin-1") for name in (b"etag", b"content-range"))
    try:
        before = bytes_before(wanted, place, said, head.length, span)
    except OriginError:
        _doubt(answer)
        raise
    if before or head.length != wanted.length:
        raise Unusual("a whole object came in place of a range")


def _doubt(answer: Answer) -> None:
    """Raise Doubtful if *answer*, which would end a read for good, may belong to another request: a server or proxy
    that is out of step sends wrong responses for as long as the connection is used."""
    if answer.used is not None:
        answer.used.abort()
        raise Doubtful("a connection that had been used before gave the answer to another request")
