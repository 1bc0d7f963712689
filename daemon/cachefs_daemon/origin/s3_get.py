"""GETs of objects by our own HTTP client, since one through aiobotocore takes 18 times the processor time.

Everything that is unusual is left to aiobotocore: it raises Unusual, and S3Origin repeats the request there. Known
errors become the same exceptions as there.
"""

import asyncio
import time
from typing import Any, Final, Protocol

from botocore.exceptions import ReadTimeoutError

from cachefs_daemon.origin.base import ObjectRange, OriginSettings
from cachefs_daemon.origin.http_connection import Answer, ClosedUnanswered, CutOff, Silent
from cachefs_daemon.origin.http_head import Malformed
from cachefs_daemon.origin.http_pool import HttpPool, Server
from cachefs_daemon.origin.http_tls import Tls
from cachefs_daemon.origin.s3_answer import bytes_before
from cachefs_daemon.origin.s3_checksum import ASKED, check_whole
from cachefs_daemon.origin.s3_errors import BrokenAnswer, Place, is_redirect, refusal
from cachefs_daemon.origin.s3_route import NoRoute, Route, find_route
from cachefs_daemon.origin.sigv4 import Signer

# Seconds that credentials and the time in signatures are used, at most. Servers take times that are 15 minutes off.
_FRESH: Final = 1.0


class Unusual(Exception):
    """Nothing for our own client; aiobotocore may know what to do."""


class Credentials(Protocol):
    """A source of credentials, as aiobotocore's session finds it. It renews them itself."""

    async def get_frozen_credentials(self) -> Any: ...


class S3Get:
    """GETs with the settings and credentials of one client of aiobotocore. Used on one event loop."""

    def __init__(
        self, client: Any, credentials: Credentials | None, settings: OriginSettings, verify: bool | str
    ) -> None:
        """client: of aiobotocore, after s3_route.prepare. credentials: None for requests that are not signed. verify:
        as in Tls."""
        self._client = client
        self._source = credentials
        self._settings = settings
        self._tls = Tls(verify)
        self._pools: dict[Server, HttpPool] = {}
        self._routes: dict[str, Route | NoRoute] = {}  # by bucket
        self._finding = asyncio.Lock()
        self._credentials: Any = None  # as they were at the last look
        self._looked = float("-inf")  # loop time of that look
        self._when = ""  # value of X-Amz-Date, of that time
        self._signers: dict[tuple[str, str], Signer] = {}  # by region and service, for these credentials

    async def read(self, place: Place, wanted: ObjectRange) -> memoryview:
        """The *wanted* bytes of the object at the *place*. Raises Unusual, and what a client of aiobotocore raises."""
        route = self._routes.get(place.bucket) or await self._find_route(place.bucket)
        if isinstance(route, NoRoute):
            raise Unusual(str(route))
        request = await self._request(route, place.key, wanted)
        answer = await self._ask(route, request, wanted.length)
        head = answer.head
        if head.status not in (200, 206):
            self._refuse(answer, place.bucket)
        if head.length is None:
            raise Unusual("an answer has no length")
        headers = head.headers
        etag, span = headers.get(b"etag", b""), headers.get(b"content-range", b"")
        before = bytes_before(wanted, place, etag.decode("latin-1"), head.length, span.decode("latin-1"))
        if before or head.length != wanted.length or answer.body is None:
            raise Unusual("a whole object came in place of a range")
        if wanted.length == wanted.size:
            await check_whole(answer.body, headers)
        return answer.body

    def forget_route(self, bucket: str) -> None:
        """Ask aiobotocore again how GETs of this bucket are sent, which may have learned it from a redirect."""
        self._routes.pop(bucket, None)

    def close(self) -> None:
        """Close all connections."""
        for pool in self._pools.values():
            pool.close()

    async def _find_route(self, bucket: str) -> Route | NoRoute:
        async with self._finding:
            if bucket not in self._routes:
                try:
                    self._routes[bucket] = await find_route(self._client, bucket)
                except NoRoute as reason:
                    self._routes[bucket] = reason
            return self._routes[bucket]

    async def _request(self, route: Route, key: str, wanted: ObjectRange) -> bytes:
        etag = wanted.version.decode()
        # Blanks in a row would have to be signed as one. No server has such ETags.
        if not key or not (etag.isascii() and etag.isprintable()) or " " in etag:
            raise Unusual("a key or an ETag is odd")
        path = route.path(key)
        headers = [("host", route.host), ("if-match", f'"{etag}"')]
        if wanted.length != wanted.size:
            # A whole object needs no range, and servers that answer ranges oddly then answer right.
            headers.append(("range", f"bytes={wanted.offset}-{wanted.offset + wanted.length - 1}"))
        else:
            headers.append(ASKED)
        if route.region:
            await self._sign(route, path, headers)
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
        return (
            f"GET {path} HTTP/1.1\r\n{lines}user-agent: {route.user_agent}\r\naccept-encoding: identity\r\n\r\n"
        ).encode()

    async def _sign(self, route: Route, path: str, headers: list[tuple[str, str]]) -> None:
        """Add what proves who we are."""
        await self._look_at_credentials()
        signer = self._signers.get((route.region, route.service))
        if signer is None:
            found = self._credentials
            signer = Signer(found.access_key, found.secret_key, route.region, route.service)
            self._signers[route.region, route.service] = signer
        headers.append(("x-amz-content-sha256", route.payload))
        headers.append(("x-amz-date", self._when))
        if self._credentials.token:
            headers.append(("x-amz-security-token", self._credentials.token))
        headers.append(("authorization", signer.authorization(self._when, path, headers, route.payload)))

    async def _look_at_credentials(self) -> None:
        now = time.monotonic()
        if now - self._looked < _FRESH:
            return
        if self._source is None:
            raise Unusual("requests are signed, but there are no credentials")
        found = await self._source.get_frozen_credentials()
        if found != self._credentials:
            self._credentials = found
            self._signers.clear()
        self._when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self._looked = now

    async def _ask(self, route: Route, request: bytes, room: int) -> Answer:
        pool = self._pools.get(route.server)
        if pool is None:
            pool = self._pools[route.server] = HttpPool(route.server, self._settings, self._tls)
        try:
            return await pool.ask(request, room)
        except Malformed as error:
            raise Unusual(f"the head of an answer is not understood: {error}") from None
        except ClosedUnanswered:
            raise BrokenAnswer("the server closed the connection without an answer") from None
        except CutOff as error:
            raise BrokenAnswer(str(error)) from None
        except Silent as error:
            raise ReadTimeoutError(endpoint_url=route.server.url, error=error) from None

    def _refuse(self, answer: Answer, bucket: str) -> None:
        """Raises what a client of aiobotocore raises for such an answer, or Unusual."""
        head = answer.head
        overloaded = head.status == 429 or head.status >= 500
        if head.status < 400 or (answer.body is None and not overloaded):
            raise Unusual(f"an answer has status {head.status}")
        # An overloaded server is not asked again for what it has said in chunks; its status says enough.
        error = refusal(head.status, head.headers, bytes(answer.body or b""))
        if is_redirect(error):
            raise Unusual(f"bucket {bucket} may be in another region")
        raise error
