"""Origin `s3://bucket/prefix`: any server that speaks S3.

Not every server honours If-Match or Range, and any proxy can break an answer. So each answer is compared with what was
listed: ETag, length, range and total size. botocore's own retries are off, since ours (retry.py) know the deadline.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, Final, TypeVar

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore import UNSIGNED
from botocore.exceptions import ProfileNotFound

from cachefs.errors import ConfigError, ObjectChanged
from cachefs.messages import OriginOptions
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.base import ObjectRange, OriginSettings, Report
from cachefs_daemon.origin.retry import Failure, retrying
from cachefs_daemon.origin.s3_errors import BrokenAnswer, Place, judge
from cachefs_daemon.origin.s3_listing import Page, list_bucket, parse_page, parse_time

# All attempts for one page of the listing together, in seconds.
_PAGE_DEADLINE: Final = 120.0
_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_ADDRESSING: Final = ("auto", "path", "virtual")

Result = TypeVar("Result")


class S3Origin:
    """A bucket, or a part of it, as an origin (see cachefs_daemon.origin.base.Origin).

    Belongs to the event loop that first uses it.
    """

    def __init__(self, url: str, options: OriginOptions, settings: OriginSettings) -> None:
        """Raises ConfigError."""
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        prefix = prefix.strip("/")
        if not bucket:
            raise ConfigError(f"URL {url!r} names no bucket; it must look like s3://bucket/prefix")
        if options.addressing_style not in (None, *_ADDRESSING):
            raise ConfigError(f"addressing style {options.addressing_style!r} must be {', '.join(_ADDRESSING)}")
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self.requests = 0
        self.errors = 0
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._options = options
        self._settings = settings
        self._endpoint = (
            options.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        )
        self._identity = f"s3:{self._endpoint or 'aws'}:{bucket}/{self._prefix}".encode()
        self._opening = asyncio.Lock()
        self._open = AsyncExitStack()
        self._client: Any = None

    def identity(self, key: bytes) -> bytes:
        return self._identity + key

    async def list(self, report: Report) -> AsyncIterator[list[ListedObject]]:
        async for objects in list_bucket(self._page, self._prefix):
            readable = []
            for listed in objects:
                if reason := _unreadable(listed):
                    report(listed.key, reason)
                else:
                    readable.append(listed)
            yield readable

    async def read(self, wanted: ObjectRange, deadline: float) -> bytes | bytearray:
        name = self._prefix + wanted.key.decode()

        async def attempt() -> bytearray:
            return await self._read(name, wanted)

        return await self._retrying(attempt, name, deadline)

    async def close(self) -> None:
        await self._open.aclose()

    async def _retrying(self, work: Callable[[], Awaitable[Result]], key: str, deadline: float) -> Result:
        place = self._place(key)

        def judge_attempt(error: Exception) -> Failure:
            self.errors += 1
            return judge(error, place)

        return await retrying(work, judge_attempt, str(place), self._settings.attempts, deadline)

    def _place(self, key: str) -> Place:
        return Place(self._bucket, key, self._endpoint or "AWS")

    async def _page(self, **query: Any) -> Page:
        """One page of the listing."""

        async def attempt() -> Page:
            client = await self._connected()
            self.requests += 1
            # We decode the keys ourselves: botocore would silently replace what is not UTF-8.
            return parse_page(
                await client.list_objects_v2(Bucket=self._bucket, EncodingType="url", **query), self._prefix
            )

        return await self._retrying(attempt, "", _PAGE_DEADLINE)

    async def _read(self, name: str, wanted: ObjectRange) -> bytearray:
        client = await self._connected()
        self.requests += 1
        etag, first, last = wanted.version.decode(), wanted.offset, wanted.offset + wanted.length - 1
        # A whole object needs no range, and servers that answer ranges oddly then answer right.
        part = {} if wanted.length == wanted.size else {"Range": f"bytes={first}-{last}"}
        answer = await client.get_object(Bucket=self._bucket, Key=name, IfMatch=f'"{etag}"', **part)
        async with answer["Body"] as body:
            if answer.get("ETag", "").strip('"') != etag:
                raise ObjectChanged(f"{self._place(name)} has changed since it was listed; refresh the dataset")
            skip = _bytes_before(answer, wanted)
            if skip is None:
                raise ObjectChanged(
                    f"{self._place(name)}: the server sent other bytes than {first}-{last} of {wanted.size} "
                    f"(length {answer.get('ContentLength')}, range {answer.get('ContentRange')}); refresh the dataset"
                )
            end = skip + wanted.length
            return await _receive(body, skip, wanted.length, (answer.get("ContentLength") or 0) > end)

    async def _connected(self) -> Any:
        async with self._opening:
            if self._client is None:
                self._client = await self._connect()
            return self._client

    async def _connect(self) -> Any:
        options = self._options
        try:
            session = AioSession(profile=options.profile)
            session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=parse_time)
            client = session.create_client(
                "s3",
                region_name=options.region or session.get_config_variable("region") or "us-east-1",
                endpoint_url=self._endpoint,
                config=self._config(),
            )
            return await self._open.enter_async_context(client)
        except (ValueError, ProfileNotFound) as error:
            raise ConfigError(f"{self.url} cannot be reached as configured: {error}") from error

    def _config(self) -> AioConfig:
        # Servers other than AWS are seldom set up for bucket names in host names.
        style = self._options.addressing_style or ("path" if self._endpoint else "auto")
        return AioConfig(
            max_pool_connections=self._settings.max_connections,
            connect_timeout=self._settings.connect_timeout,
            read_timeout=self._settings.read_timeout,
            retries={"total_max_attempts": 1},
            s3={"addressing_style": style},
            signature_version=UNSIGNED if self._options.anonymous else None,
            # Some servers send the whole object's checksum with a range of it, which fails botocore's own check.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )


def _bytes_before(answer: Any, wanted: ObjectRange) -> int | None:
    """How many bytes of the answer's body precede the *wanted* ones; None where the body has other bytes."""
    size, offset, length = wanted.size, wanted.offset, wanted.length
    promised = answer.get("ContentLength")
    if content_range := answer.get("ContentRange"):
        found = _CONTENT_RANGE.fullmatch(content_range)
        if found is None or (int(found[1]), int(found[2])) != (offset, offset + length - 1):
            return None
        return 0 if found[3] in ("*", str(size)) and promised in (None, length) else None
    if promised == size or (promised is None and length == size):
        return offset
    # rclone answers ranges in this way: status 200 and no Content-Range, but the right bytes.
    return 0 if promised == length else None


async def _receive(body: Any, skip: int, length: int, more_follows: bool) -> bytearray:
    """*length* bytes of the *body* after its first *skip* bytes. What follows them is not read.

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
    """Why a listed object could not be read; None where it can."""
    if not listed.version:
        return "is listed without an ETag, so a change of it could not be noticed"
    try:
        listed.key.decode()
    except UnicodeDecodeError:
        return "is not UTF-8, as S3 requires, so it cannot be asked for"
    return None
