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
from cachefs_daemon.origin.base import (
    Data,
    ObjectRange,
    OriginSettings,
    ReportProblem,
    missing_proof,
    not_a_directory_error,
    too_many_pages_error,
)
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.origin.key_ranges import ListingCheckpoint
from cachefs_daemon.origin.request_counters import OWN_COUNTERS, CountedRequest
from cachefs_daemon.origin.retry import Failure, run_with_retries
from cachefs_daemon.origin.s3.connection import RAW_PAGE, OpenClient, shared_connection
from cachefs_daemon.origin.s3.errors import are_credentials_refused, judge_error, outcome_of
from cachefs_daemon.origin.s3.get import SuspectResponse, UnsupportedByClient
from cachefs_daemon.origin.s3.listing import list_bucket
from cachefs_daemon.origin.s3.page import ListingPage, parse_page
from cachefs_daemon.origin.s3.parts import PartsRequest
from cachefs_daemon.origin.s3.prepared_get import PreparedGet
from cachefs_daemon.origin.s3.response import BrokenS3Response, S3Target, bytes_before

# Seconds for all attempts for one page of the listing together.
_PAGE_DEADLINE: Final = 120.0
# Seconds after which the first page is not retried: a silent endpoint may be a typing error of a waiting user.
_FIRST_PAGE_SECONDS: Final = 3.0
# The bucket may be the ARN of an access point, with slashes in place of colons.
_URL: Final = re.compile(
    r"s3://(?P<bucket>arn:[^/:]*:s3[^/:]*:[^/:]*:[^/:]*:(?:outpost[/:][^/:]+[/:])?accesspoint[/:][^/:]+|[^/]*)"
    r"(?:/(?P<prefix>.*))?",
    re.DOTALL,
)
_ADDRESSING: Final = ("auto", "path", "virtual")
_READ_COUNTERS: Final = OWN_COUNTERS.counters_of("s3")
_LIST_COUNTERS: Final = OWN_COUNTERS.counters_of("s3", "list")

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
            raise ConfigError("--requester-pays needs credentials, as their account pays: leave out --anonymous")
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self.requests = 0
        self.errors = 0
        self.fallback_reads = 0
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._connection = shared_connection(options, settings)
        self._connection.add_origin()
        self.endpoint = self._connection.server
        self._endpoint = self._connection.endpoint_url
        self._identity = f"s3:{self._endpoint or 'aws'}:{bucket}/{self._prefix}".encode()
        self._outage = self._connection.outage
        self._has_responded = False
        self._max_pages = settings.max_pages
        self._requester_pays = options.requester_pays

    def identity(self, key: bytes) -> bytes:
        return self._identity + key

    async def list_from(
        self, report: ReportProblem, checkpoint: ListingCheckpoint
    ) -> AsyncIterator[list[ListedObject]]:
        """See cachefs_daemon.origin.base.ResumableOrigin."""
        pages = 0
        is_empty = checkpoint.is_start  # a resumed listing may have nothing left
        try:
            async for objects in list_bucket(self._fetch_page, self._prefix, checkpoint):
                pages += 1
                if pages > self._max_pages:
                    raise too_many_pages_error(f"{self.url} at {self._endpoint or 'AWS'}", self._max_pages)
                readable = []
                for listed in objects:
                    if reason := _unreadable(listed):
                        report(listed.key, reason)
                    else:
                        readable.append(listed)
                is_empty = is_empty and not objects
                yield readable
            if is_empty and self._prefix:
                beside = await self._fetch_page(Prefix=self._prefix.removesuffix("/"), MaxKeys=1)
                if any(not each.key for each in beside.objects):
                    raise not_a_directory_error(self.url)
        except BrokenS3Response as error:
            raise judge_error(error, self._target("")).error from None

    def list(self, report: ReportProblem) -> AsyncIterator[list[ListedObject]]:
        return self.list_from(report, ListingCheckpoint())

    async def read(self, wanted: ObjectRange, deadline: Deadline) -> Data:
        target = self._target(self._prefix + wanted.key.decode())
        return await self._run_with_retries(functools.partial(self._read, target, wanted), target, deadline)

    @property
    def can_read_ranges(self) -> bool:
        return not self._connection.fallback.is_active

    async def read_parts(
        self, wanted: ObjectRange, lengths: Sequence[int], on_part: Callable[[int, Data], None]
    ) -> None:
        target = self._target(self._prefix + wanted.key.decode())

        async def request(client: OpenClient) -> None:
            began = await self.endpoint.wait_for_turn(self.url)
            parts = PartsRequest(target, wanted, lengths, on_part)
            body = await client.own_client.read(target, wanted, parts)
            parts.pass_all_parts(body)
            self.endpoint.note_response(self.url, wanted.length, began)

        try:
            await self._attempt(request)
        except (UnsupportedByClient, SuspectResponse) as unusual:
            self.errors += 1
            raise OriginUnavailable(f"{target}: {unusual}") from None
        except Exception as error:
            raise self._note_error(error, target).error from None

    async def preconnect(self) -> None:
        """Open the connection (see cachefs_daemon.origin.base.PreconnectingOrigin). Sends no request."""
        async with self._connection.client() as client:
            await client.own_client.prepare_bucket(self._bucket)

    def prepare_get(self, wanted: ObjectRange) -> PreparedGet | None:
        """See cachefs_daemon.origin.s3.prepared_get.PreparedGetOrigin."""
        client = self._connection.current
        if client is None or self.endpoint.is_limited or self._connection.fallback.is_active:
            return None
        return client.own_client.prepare_get(self._target(self._prefix + wanted.key.decode()), wanted)

    def note_success(self, wanted: ObjectRange, seconds: float) -> None:
        self.requests += 1
        self._connection.touch()
        self._outage.note_response()
        self._connection.fallback.note_accepted()
        self.endpoint.note_response(self.url, wanted.length, time.monotonic() - seconds)

    def note_failure(self, reason: str, *, throttled: bool) -> None:
        self.requests += 1
        self.errors += 1
        if throttled:
            self.endpoint.note_refusal(self.url, reason)

    def count_hedges(self, sent: int, won: int) -> None:
        self.endpoint.count_hedges(sent, won)

    async def close(self) -> None:
        await self._connection.remove_origin()

    def _run_with_retries(
        self, request: _Request[Result], target: S3Target, deadline: Deadline, give_up: float = math.inf
    ) -> Coroutine[Any, Any, Result]:
        attempt, judged = functools.partial(self._attempt, request), functools.partial(self._note_error, target=target)
        return run_with_retries(attempt, judged, target, deadline, give_up)

    def _note_error(self, error: Exception, target: S3Target) -> Failure:
        """Return the failure that an attempt's exception means, and count it."""
        self.errors += 1
        failure = judge_error(error, target)
        self.endpoint.note_failure(self.url, failure, self._outage)
        return failure

    async def _attempt(self, request: _Request[Result]) -> Result:
        """Send *request*, and once more if its credentials were refused and others are found."""
        client = await self._connection.acquire_client()
        try:
            self.requests += 1
            result = await request(client)
        except Exception as error:
            if not are_credentials_refused(error) or not await self._connection.renew_credentials(client):
                raise
            self.errors += 1
        else:
            self._outage.note_response()
            return result
        finally:
            self._connection.release_client(client)
        async with self._connection.client() as client:
            self.requests += 1
            result = await request(client)
        self._outage.note_response()
        return result

    def _target(self, key: str) -> S3Target:
        return S3Target(self._bucket, key, self._endpoint or "AWS", self._requester_pays)

    async def _fetch_page(self, **query: Any) -> ListingPage:
        """Return one page of the listing."""

        async def request(client: OpenClient) -> ListingPage:
            # We decode the keys ourselves: botocore would silently replace invalid UTF-8.
            with _LIST_COUNTERS.counted_request(outcome_of) as exchange, exchange.as_current():
                page = await client.botocore_client.list_objects_v2(Bucket=self._bucket, EncodingType="url", **query)
                exchange.count_received(len(page[RAW_PAGE]))
                return parse_page(page[RAW_PAGE], query["Prefix"])

        give_up = math.inf if self._has_responded else asyncio.get_running_loop().time() + _FIRST_PAGE_SECONDS
        page = await self._run_with_retries(request, self._target(""), Deadline.after(_PAGE_DEADLINE), give_up)
        self._has_responded = True
        return page

    async def _read(self, target: S3Target, wanted: ObjectRange, client: OpenClient) -> Data:
        began = await self.endpoint.wait_for_turn(self.url)
        detour = self._connection.fallback
        if not detour.is_active:
            try:
                data = await client.own_client.read(target, wanted)
            except SuspectResponse as doubt:
                self.requests += 1
                self.errors += 1
                right = await self._read_with_fallback(client.botocore_client, target, wanted)
                # Only now the response is known to be wrong, and is logged.
                self._count_fallback()
                detour.note_rejected(str(doubt))
                return right
            except UnsupportedByClient as unusual:
                detour.note_rejected(str(unusual))
                client.own_client.forget_route(self._bucket)
                if unusual.was_sent:
                    self.requests += 1
                    self.errors += 1
            else:
                detour.note_accepted()
                self.endpoint.note_response(self.url, wanted.length, began)
                return data
        self._count_fallback()
        body = await self._read_with_fallback(client.botocore_client, target, wanted)
        self.endpoint.note_response(self.url, wanted.length, began)
        return body

    def _count_fallback(self) -> None:
        self.fallback_reads += 1
        _READ_COUNTERS.count_fallback()

    async def _read_with_fallback(self, client: Any, target: S3Target, wanted: ObjectRange) -> bytearray:
        """Read through aiobotocore."""
        etag, first, last = wanted.version.decode(), wanted.offset, wanted.offset + wanted.length - 1
        # A whole object needs no range, and servers that handle ranges badly then answer right.
        part = {} if wanted.length == wanted.size else {"Range": f"bytes={first}-{last}"}
        with _READ_COUNTERS.counted_request(outcome_of) as exchange, exchange.as_current():
            response = await client.get_object(Bucket=self._bucket, Key=target.key, IfMatch=f'"{etag}"', **part)
            async with response["Body"] as body:
                promised = response.get("ContentLength")
                skip = bytes_before(
                    wanted, target, response.get("ETag", ""), promised, response.get("ContentRange", "")
                )
                more_follows = (promised or 0) > skip + wanted.length
                data = await _receive(_CountedBody(body, exchange), skip, wanted.length, more_follows)
        _READ_COUNTERS.count_dropped_bytes(skip)
        return data


class _CountedBody:
    """A body whose bytes are counted as they arrive."""

    def __init__(self, body: Any, exchange: CountedRequest) -> None:
        self._body = body
        self._exchange = exchange

    async def read(self, most: int) -> bytes:
        chunk: bytes = await self._body.read(most)
        self._exchange.count_received(len(chunk))
        return chunk


async def _receive(body: Any, skip: int, length: int, more_follows: bool) -> bytearray:
    """Return *length* bytes of *body* after its first *skip* bytes, and read no more.

    more_follows: the server has promised more bytes than these. Raises BrokenS3Response.
    """
    data = bytearray()
    while len(data) < skip + length:
        chunk = await body.read(skip + length - len(data))
        if not chunk:
            raise BrokenS3Response(f"the body ended after {len(data)} of {skip + length} bytes")
        data += chunk
        if skip:
            dropped = min(skip, len(data))
            del data[:dropped]
            skip -= dropped
    if not more_follows and await body.read(1):
        raise BrokenS3Response(f"the body is longer than the {length} bytes promised")
    return data


def _unreadable(listed: ListedObject) -> str | None:
    """Return why a listed object could not be read; None if it can."""
    if reason := missing_proof(listed.version):
        return reason
    try:
        listed.key.decode()
    except UnicodeDecodeError:
        return "is not UTF-8, as S3 requires, so it cannot be requested"
    return None
