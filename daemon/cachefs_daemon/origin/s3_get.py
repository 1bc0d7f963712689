"""GETs of objects by our own HTTP client, since one through aiobotocore takes 18 times the processor time.

Everything that is unusual is left to aiobotocore: it raises Unusual, and S3Origin repeats the request there. Known
errors become the same exceptions as there.
"""

import asyncio
import time
from typing import Any, Final, NamedTuple, Protocol

from botocore.exceptions import ReadTimeoutError

from cachefs_daemon.origin.base import ObjectRange, OriginSettings
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.origin.http_connection import ClosedUnanswered, CutOff, Silent
from cachefs_daemon.origin.http_head import Head, Malformed
from cachefs_daemon.origin.http_pool import HttpPool, Server
from cachefs_daemon.origin.http_race import Races
from cachefs_daemon.origin.http_tls import Tls
from cachefs_daemon.origin.s3_answer import bytes_before
from cachefs_daemon.origin.s3_checksum import check_whole, has_checksum
from cachefs_daemon.origin.s3_errors import BrokenAnswer, Place, is_redirect, refusal
from cachefs_daemon.origin.s3_parts import Parts
from cachefs_daemon.origin.s3_request import RequestMaker
from cachefs_daemon.origin.s3_route import NoRoute, Route, find_route

# Seconds that credentials and the time in signatures are used, at most. Servers take times that are 15 minutes off.
_FRESH: Final = 1.0

_NOT_IMPLEMENTED: Final = 501
# Taken for the body where an overloaded server sends it in chunks, as AWS does.
_UNREAD: Final = b"<Error><Code>SlowDown</Code></Error>"
_OVERLOADED: Final = (429, 503)


class Unusual(Exception):
    """Nothing for our own client; aiobotocore may know what to do."""

    def __init__(self, reason: str, *, asked: bool = True) -> None:
        """asked: whether a request was sent."""
        super().__init__(reason)
        self.asked = asked


class Credentials(Protocol):
    """A source of credentials, as aiobotocore's session finds it. It renews them itself."""

    async def get_frozen_credentials(self) -> Any: ...


class _Way(NamedTuple):
    """How GETs of one bucket go at this moment."""

    server: Server
    pool: HttpPool
    maker: RequestMaker


class S3Get:
    """GETs with the settings and credentials of one client of aiobotocore. Used on one event loop."""

    def __init__(
        self,
        client: Any,
        credentials: Credentials | None,
        settings: OriginSettings,
        verify: bool | str,
        endpoint: Endpoint,
    ) -> None:
        """client: of aiobotocore, after s3_route.prepare. credentials: None for requests that are not signed. verify:
        as in Tls."""
        self._client = client
        self._source = credentials
        self._settings = settings
        self._tls = Tls(verify)
        self._races = Races(endpoint)
        self._pools: dict[Server, HttpPool] = {}
        self._routes: dict[str, Route | NoRoute] = {}  # by bucket
        self._finding = asyncio.Lock()
        self._checksums = True  # the server may be asked for them
        self._credentials: Any = None  # as they were at the last look
        self._looked = float("-inf")  # monotonic seconds of that look
        self._ways: dict[str, _Way] = {}  # by bucket, made since that look

    async def read(self, place: Place, wanted: ObjectRange, parts: Parts | None = None) -> memoryview:
        """The *wanted* bytes of the object at the *place*. Raises Unusual, and what a client of aiobotocore raises.

        parts: is told of the bytes as they arrive. Such a request is never sent twice, as it is large.
        """
        etag = wanted.version.decode()
        # Blanks in a row would have to be signed as one. No server has such ETags.
        if not place.key or not etag.isascii() or not etag.isprintable() or " " in etag:
            raise Unusual("a key or an ETag is odd", asked=False)
        if time.monotonic() - self._looked >= _FRESH:
            await self._look_at_credentials()
        way = self._ways.get(place.bucket) or await self._find_way(place.bucket)
        try:
            request = way.maker.get(place.key, etag, wanted)
            if parts is None:
                head, body = await self._races.ask(way.pool, request, wanted.length)
            else:
                head, body = await way.pool.ask(request, wanted.length, parts)
        except Malformed as error:
            raise Unusual(f"the head of an answer is not understood: {error}") from None
        except ClosedUnanswered:
            raise BrokenAnswer("the server closed the connection without an answer") from None
        except CutOff as error:
            raise BrokenAnswer(str(error)) from None
        except Silent as error:
            raise ReadTimeoutError(endpoint_url=way.server.url, error=error) from None
        if head.status not in (200, 206):
            self._refuse(head, body, place.bucket)
        if head.length is None:
            raise Unusual("an answer has no length")
        headers = head.headers
        said, span = headers.get(b"etag", b"").decode("latin-1"), headers.get(b"content-range", b"").decode("latin-1")
        before = bytes_before(wanted, place, said, head.length, span)
        if before or body is None or head.length != wanted.length:
            raise Unusual("a whole object came in place of a range")
        if wanted.length == wanted.size and has_checksum(headers):
            await check_whole(body, headers)
        return body

    def forget_route(self, bucket: str) -> None:
        """Ask aiobotocore again how GETs of this bucket are sent, which may have learned it from a redirect."""
        self._routes.pop(bucket, None)
        self._ways.pop(bucket, None)

    def close(self) -> None:
        """Close all connections."""
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
        if route.region and self._credentials is None:
            raise Unusual("requests are signed, but there are no credentials", asked=False)
        pool = self._pools.get(route.server)
        if pool is None:
            pool = self._pools[route.server] = HttpPool(route.server, self._settings, self._tls)
        way = self._ways[bucket] = _Way(
            route.server, pool, RequestMaker(route, self._credentials, checksums=self._checksums)
        )
        return way

    async def _look_at_credentials(self) -> None:
        """They are asked for once a second, and their source renews them when it is time."""
        found = await self._source.get_frozen_credentials() if self._source is not None else None
        self._credentials = found
        self._ways.clear()
        self._looked = time.monotonic()

    def _refuse(self, head: Head, body: memoryview | None, bucket: str) -> None:
        """Raises what a client of aiobotocore raises for such an answer, or Unusual."""
        if head.status == _NOT_IMPLEMENTED and self._checksums:
            # Cloudflare R2 gave this answer to a question for checksums.
            self._checksums = False
            raise Unusual("the server may not know checksums")
        overloaded = head.status == 429 or head.status >= 500
        if head.status < 400 or (body is None and not overloaded):
            raise Unusual(f"an answer has status {head.status}")
        # An overloaded server is not asked again for what it has said in chunks; its status says enough.
        unread = body is None and head.status in _OVERLOADED
        error = refusal(head.status, head.headers, _UNREAD if unread else bytes(body or b""))
        if is_redirect(error):
            raise Unusual(f"bucket {bucket} may be in another region")
        raise error
