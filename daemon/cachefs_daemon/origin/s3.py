"""Origin `s3://bucket/prefix`: any server that speaks S3.

Not every server honours If-Match or Range, and any proxy can break a response. So each response is compared with the
listing: ETag, length, range and total size. botocore's own retries are off, since ours (retry.py) know the deadline.
"""

import asyncio
import functools
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from cachefs.errors import ConfigError, OriginUnavailable
from cachefs.messages import OriginOptions
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.base import Data, ObjectRange, OriginSettings, Report, no_directory, no_proof, too_many_pages
from cachefs_daemon.origin.key_ranges import ListingPlace
from cachefs_daemon.origin.ledger import HERE, Exchange
from cachefs_daemon.origin.order import Order
from cachefs_daemon.origin.patience import Patience
from cachefs_daemon.origin.retry import Failure, retrying
from cachefs_daemon.origin.s3_answer import BrokenAnswer, Place, bytes_before
from cachefs_daemon.origin.s3_connection import RAW_PAGE, OpenClient, connection
from cachefs_daemon.origin.s3_errors import are_credentials_refused, judge, outcome_of
from cachefs_daemon.origin.s3_get import Doubtful, Unusual
from cachefs_daemon.origin.s3_listing import list_bucket
from cachefs_daemon.origin.s3_page import Page, parse_page
from cachefs_daemon.origin.s3_parts import Parts

# Seconds for all attempts for one page of the listing together.
_PAGE_DEADLINE: Final = 120.0
# Seconds after which the first page is not retried: a silent endpoint may be a typing error of a waiting user.
_FIRST_PAGE_TRIED: Final = 3.0
# The bucket may be the ARN of an access point, with slashes in place of colons.
_URL: Final = re.compile(
    r"s3://(?P<bucket>arn:[^/:]*:s3[^/:]*:[^/:]*:[^/:]*:(?:outpost[/:][^/:]+[/:])?accesspoint[/:][^/:]+|[^/]*)"
    r"(?:/(?P<prefix>.*))?",
    re.DOTALL,
)
_ADDRESSING: Final = ("auto", "path", "virtual")
_READ: Final = HERE.of("s3")
_LISTED: Final = HERE.of("s3", "list")

Result = TypeVar("Result")
_Request = Callable[[OpenClient], Awaitable[Result]]


class S3Origin:
    """A bucket, or a part of it, as an origin (see cachefs_daemon.origin.base.Origin).

    Belongs to the event loop that first uses it.
    """

    def __init__(self, url: str, options: OriginOptions, settings: OriginSettings) -> None:
        """Raises ConfigError."""
        found = _URL.fullmatch(url)
        bucket, prefix = (found["bucket"], (found["prefix"] or "").strip("/")) if found is not None else ("", "")
        if not bucket:
            raise ConfigError(f"URL {url!r} names no bucket; it must look like s3://bucket/prefix")
        if options.addressing_style not in (None, *_ADDRESSING):
            raise ConfigError(f"addressing style {options.addressing_style!r} must be {', '.join(_ADDRESSING)}")
        if options.user_project:
            raise ConfigError("--user-project is for gs://; for s3:// it is --requester-pays")
        if options.requester_pays and options.anonymous:
            raise ConfigError("--requester-pays needs credentials, which say who pays: leave out --anonymous")
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self.requests = 0
        self.errors = 0
        self.detours = 0
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._connection = connection(options, settings)
        self._connection.hold()
        self.endpoint = self._connection.limits
        self._endpoint = self._connection.endpoint
        self._identity = f"s3:{self._endpoint or 'aws'}:{bucket}/{self._prefix}".encode()
        self._outage = self._connection.outage
        self._has_answered = False
        self._max_pages = settings.max_pages
        self._requester_pays = options.requester_pays

    def identity(self, key: bytes) -> bytes:
        return self._identity + key

    async def list_from(self, report: Report, place: ListingPlace) -> AsyncIterator[list[ListedObject]]:
        """See cachefs_daemon.origin.base.ResumableOrigin."""
        pages = 0
        is_empty = place.is_start  # a resumed listing may have nothing left
        try:
            async for objects in list_bucket(self._page, self._prefix, place):
                pages += 1
                if pages > self._max_pages:
                    raise too_many_pages(f"{self.url} at {self._endpoint or 'AWS'}", self._max_pages)
                readable = []
                for listed in objects:
                    if reason := _unreadable(listed):
                        report(listed.key, reason)
                    else:
                        readable.append(listed)
                is_empty = is_empty and not objects
                yield readable
            if is_empty and self._prefix:
                beside = await self._page(Prefix=self._prefix.removesuffix("/"), MaxKeys=1)
                if any(not each.key for each in beside.objects):
                    raise no_directory(self.url)
        except BrokenAnswer as error:
            raise judge(error, self._place("")).error from None

    def list(self, report: Report) -> AsyncIterator[list[ListedObject]]:
        return self.list_from(report, ListingPlace())

    async def read(self, wanted: ObjectRange, patience: Patience) -> Data:
        place = self._place(self._prefix + wanted.key.decode())
        return await self._retrying(functools.partial(self._read, place, wanted), place, patience)

    @property
    def reads_ranges(self) -> bool:
        return not self._connection.detour.is_taken

    async def read_parts(
        self, wanted: ObjectRange, lengths: Sequence[int], arrived: Callable[[int, Data], None]
    ) -> None:
        place = self._place(self._prefix + wanted.key.decode())

        async def request(client: OpenClient) -> None:
            began = await self.endpoint.turn(self.url)
            parts = Parts(place, wanted, lengths, arrived)
            body = await client.lean.read(place, wanted, parts)
            parts.finish(body)
            self.endpoint.answered(self.url, wanted.length, began)

        try:
            await self._attempt(request)
        except (Unusual, Doubtful) as unusual:
            self.errors += 1
            raise OriginUnavailable(f"{place}: {unusual}") from None
        except Exception as error:
            raise self._judged(error, place).error from None

    async def prepare(self) -> None:
        """Open the connection (see cachefs_daemon.origin.base.PreparedOrigin). Sends no request."""
        async with self._connection.client() as client:
            await client.lean.prepare(self._bucket)

    def order(self, wanted: ObjectRange) -> Order | None:
        """See cachefs_daemon.origin.order.OrderingOrigin."""
        client = self._connection.current
        if client is None or self.endpoint.is_limited or self._connection.detour.is_taken:
            return None
        return client.lean.order(self._place(self._prefix + wanted.key.decode()), wanted)

    def brought(self, wanted: ObjectRange, seconds: float) -> None:
        self.requests += 1
        self._connection.touch()
        self._outage.answered()
        self._connection.detour.usual()
        self.endpoint.answered(self.url, wanted.length, time.monotonic() - seconds)

    def not_brought(self, reason: str, *, throttled: bool) -> None:
        self.requests += 1
        self.errors += 1
        if throttled:
            self.endpoint.refused(self.url, reason)

    def hedged(self, sent: int, won: int) -> None:
        self.endpoint.hedges(sent, won)

    async def close(self) -> None:
        await self._connection.release()

    def _retrying(
        self, request: _Request[Result], place: Place, patience: Patience, give_up: float = math.inf
    ) -> Coroutine[Any, Any, Result]:
        attempt, judged = functools.partial(self._attempt, request), functools.partial(self._judged, place=place)
        return retrying(attempt, judged, place, patience, give_up)

    def _judged(self, error: Exception, place: Place) -> Failure:
        """Return the failure that an attempt's exception means, and count it."""
        self.errors += 1
        failure = judge(error, place)
        self.endpoint.failed(self.url, failure, self._outage)
        return failure

    async def _attempt(self, request: _Request[Result]) -> Result:
        """Send *request*, and once more if its credentials were refused and others are found."""
        client = await self._connection.take()
        try:
            self.requests += 1
            result = await request(client)
        except Exception as error:
            if not are_credentials_refused(error) or not await self._connection.renew(client):
                raise
            self.errors += 1
        else:
            self._outage.answered()
            return result
        finally:
            self._connection.give_back(client)
        async with self._connection.client() as client:
            self.requests += 1
            result = await request(client)
        self._outage.answered()
        return result

    def _place(self, key: str) -> Place:
        return Place(self._bucket, key, self._endpoint or "AWS", self._requester_pays)

    async def _page(self, **query: Any) -> Page:
        """Return one page of the listing."""

        async def request(client: OpenClient) -> Page:
            # We decode the keys ourselves: botocore would silently replace invalid UTF-8.
            with _LISTED.request(outcome_of) as exchange, exchange.current():
                answer = await client.full.list_objects_v2(Bucket=self._bucket, EncodingType="url", **query)
                exchange.got(len(answer[RAW_PAGE]))
                return parse_page(answer[RAW_PAGE], query["Prefix"])

        give_up = math.inf if self._has_answered else asyncio.get_running_loop().time() + _FIRST_PAGE_TRIED
        page = await self._retrying(request, self._place(""), Patience.of(_PAGE_DEADLINE), give_up)
        self._has_answered = True
        return page

    async def _read(self, place: Place, wanted: ObjectRange, client: OpenClient) -> Data:
        began = await self.endpoint.turn(self.url)
        detour = self._connection.detour
        if not detour.is_taken:
            try:
                data = await client.lean.read(place, wanted)
            except Doubtful as doubt:
                self.requests += 1
                self.errors += 1
                right = await self._read_fully(client.full, place, wanted)
                # Only now the response is known to be wrong, and is logged.
                self._detour()
                detour.unusual(str(doubt))
                return right
            except Unusual as unusual:
                detour.unusual(str(unusual))
                client.lean.forget_route(self._bucket)
                if unusual.asked:
                    self.requests += 1
                    self.errors += 1
            else:
                detour.usual()
                self.endpoint.answered(self.url, wanted.length, began)
                return data
        self._detour()
        whole = await self._read_fully(client.full, place, wanted)
        self.endpoint.answered(self.url, wanted.length, began)
        return whole

    def _detour(self) -> None:
        self.detours += 1
        _READ.detour()

    async def _read_fully(self, client: Any, place: Place, wanted: ObjectRange) -> bytearray:
        """Read through aiobotocore."""
        etag, first, last = wanted.version.decode(), wanted.offset, wanted.offset + wanted.length - 1
        # A whole object needs no range, and servers that handle ranges badly then answer right.
        part = {} if wanted.length == wanted.size else {"Range": f"bytes={first}-{last}"}
        with _READ.request(outcome_of) as exchange, exchange.current():
            answer = await client.get_object(Bucket=self._bucket, Key=place.key, IfMatch=f'"{etag}"', **part)
            async with answer["Body"] as body:
                promised = answer.get("ContentLength")
                skip = bytes_before(wanted, place, answer.get("ETag", ""), promised, answer.get("ContentRange", ""))
                more_follows = (promised or 0) > skip + wanted.length
                data = await _receive(_Counted(body, exchange), skip, wanted.length, more_follows)
        _READ.drop(skip)
        return data


class _Counted:
    """A body whose bytes are counted as they arrive."""

    def __init__(self, body: Any, exchange: Exchange) -> None:
        self._body = body
        self._exchange = exchange

    async def read(self, most: int) -> bytes:
        chunk: bytes = await self._body.read(most)
        self._exchange.got(len(chunk))
        return chunk


async def _receive(body: Any, skip: int, length: int, more_follows: bool) -> bytearray:
    """Return *length* bytes of *body* after its first *skip* bytes, and read no more.

    more_follows: the server has promised more bytes than these. Raises BrokenAnswer.
    """
    data = bytearray()
    while len(data) < skip + length:
        chunk = await body.read(skip + length - len(data))
        if not chunk:
            raise BrokenAnswer(f"the body ended after {len(data)} of {skip + length} bytes")
        data += chunk
        if skip:
            dropped = min(skip, len(data))
            del data[:dropped]
            skip -= dropped
    if not more_follows and await body.read(1):
        raise BrokenAnswer(f"the body is longer than the {length} bytes promised")
    return data


def _unreadable(listed: ListedObject) -> str | None:
    """Return why a listed object could not be read; None if it can."""
    if reason := no_proof(listed.version):
        return reason
    try:
        listed.key.decode()
    except UnicodeDecodeError:
        return "is not UTF-8, as S3 requires, so it cannot be asked for"
    return None
