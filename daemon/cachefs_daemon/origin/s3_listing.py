"""Listing a bucket in parallel.

S3 lists keys in order, a thousand per request, and each page needs the one before. Listed page by page, a million keys
take a minute. But a listing may start after any key. So a few requests with a delimiter find directory names, these
names cut the space of keys into ranges, and the ranges are listed at once. One flat directory has no names to cut at
and is listed page by page.

Some servers (gateways over file systems) do not list keys in order. With them, keys at the cuts would be lost. This is
noticed, and then everything is listed anew in one piece. The builder drops what it has got twice.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from itertools import count
from typing import Any, Final, NamedTuple
from urllib.parse import unquote_to_bytes

from botocore.utils import parse_timestamp

from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.s3_errors import BrokenAnswer

# Cut once there are this many names to cut at, or after this many levels of a narrow tree.
_ENOUGH_NAMES: Final = 32
_MAX_LEVELS: Final = 8
# Names of one directory are read from at most this many pages, so that a million directories are not listed twice.
_PROBE_PAGES: Final = 4
# Pages that are read before the rest is cut. Each range reads half a page too much on average, so a small bucket is not
# cut at all.
_FIRST_PAGES: Final = 8
_MAX_RANGES: Final = 64
# Requests at once.
_PARALLEL: Final = 32
# Pages in a row with nothing on them. A server that has deleted much may send some; one that sends more will never end.
_MOST_EMPTY: Final = 1000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Page(NamedTuple):
    """One answer."""

    # Objects, with keys relative to the dataset's prefix.
    objects: list[ListedObject]
    # Names of directories, relative to the dataset's prefix.
    directories: list[bytes]
    # Asks for the next page; None: this is the last one.
    token: str | None


class _Range(NamedTuple):
    """A part of the keys that is listed by itself."""

    # The keys after this one,
    after: bytes
    # up to and including this one; None: to the end.
    until: bytes | None
    # Asks for the next page; None before the first one.
    token: str | None = None
    # How many pages before it had nothing on them.
    empty: int = 0


class _OutOfOrder(Exception):
    """The server does not list keys in byte order, or ignores where to start."""


FetchPage = Callable[..., Awaitable[Page]]


async def list_bucket(fetch: FetchPage, prefix: str) -> AsyncIterator[list[ListedObject]]:
    """All objects below *prefix*, in batches. fetch: returns one page, given the parameters of the query.

    Raises BrokenAnswer where the listing would never end.
    """
    keys = _Range(b"", None)
    try:
        for _ in range(_FIRST_PAGES):
            objects, rest = await _list_page(fetch, prefix, keys)
            yield objects
            if rest is None:
                return
            keys = rest
        names = await _directory_names(fetch, prefix)
        async for objects in _list_ranges(fetch, prefix, _cut(keys, names)):
            yield objects
    except _OutOfOrder:
        async for page in _pages(fetch, {"Prefix": prefix}):
            yield page.objects


def parse_page(answer: Any, prefix: str) -> Page:
    """The page in an answer to ListObjectsV2 with EncodingType=url. Raises BrokenAnswer."""
    encoded = answer.get("EncodingType") == "url"
    start = len(prefix.encode())

    def relative(name: str) -> bytes:
        # AWS writes a space as `+` and a plus as `%2B`; Ceph a space as `%20`.
        return (unquote_to_bytes(name.replace("+", " ")) if encoded else name.encode())[start:]

    objects = [
        ListedObject(
            relative(found["Key"]), found["Size"], _ns(found["LastModified"]), found.get("ETag", "").strip('"').encode()
        )
        for found in answer.get("Contents", ())
    ]
    directories = [relative(found["Prefix"]) for found in answer.get("CommonPrefixes", ())]
    token = answer.get("NextContinuationToken") if answer.get("IsTruncated") else None
    if answer.get("IsTruncated") and not token:
        # A server that only knows the first version of ListObjects answers so. To end here would lose files.
        raise BrokenAnswer("the listing is cut short without a token to go on with; does it know ListObjectsV2?")
    return Page(objects, directories, token)


def parse_time(text: str) -> datetime:
    """The time that botocore finds too, but faster for what listings contain: a page of 1,000 keys takes 14 ms of
    processor time instead of 50."""
    try:
        return datetime.fromisoformat(text)
    except (TypeError, ValueError):
        parsed: datetime = parse_timestamp(text)
        return parsed


def _ns(time: datetime) -> int:
    since = time - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1000


async def _pages(fetch: FetchPage, query: dict[str, str], most: int | None = None) -> AsyncIterator[Page]:
    """The pages of one listing, at most *most* of them. Raises BrokenAnswer where they would never end."""
    token: str | None = None
    seen: set[str] = set()
    empty = 0
    for _ in count() if most is None else range(most):
        page = await fetch(**query, **_after(token))
        yield page
        token = page.token
        if token is None:
            return
        empty = _empty_pages(empty, page)
        if token in seen:
            raise BrokenAnswer("the listing repeats itself: a token to go on with came twice")
        seen.add(token)


def _empty_pages(before: int, page: Page) -> int:
    """How many pages in a row had nothing on them, *page* included. Raises BrokenAnswer where there are too many."""
    empty = 0 if page.objects or page.directories else before + 1
    if empty > _MOST_EMPTY:
        raise BrokenAnswer(f"the listing does not go on: {empty} pages in a row had nothing on them")
    return empty


def _after(token: str | None) -> dict[str, str]:
    return {"ContinuationToken": token} if token else {}


async def _directory_names(fetch: FetchPage, prefix: str) -> list[bytes]:
    """Enough names of directories, relative to *prefix* and each with a slash at its end, to cut the key space at."""
    names: list[bytes] = []
    level = [b""]
    for _ in range(_MAX_LEVELS):
        found = await asyncio.gather(*(_names_in(fetch, prefix + name.decode()) for name in level))
        level = [name for names_in_one in found for name in names_in_one if _is_text(name)]
        names += level
        if len(names) >= _ENOUGH_NAMES or not level:
            break
    return names


async def _names_in(fetch: FetchPage, directory: str) -> list[bytes]:
    return [
        name
        async for page in _pages(fetch, {"Prefix": directory, "Delimiter": "/"}, _PROBE_PAGES)
        for name in page.directories
    ]


async def _list_ranges(fetch: FetchPage, prefix: str, ranges: list[_Range]) -> AsyncIterator[list[ListedObject]]:
    waiting = ranges[::-1]
    pending: set[asyncio.Task[tuple[list[ListedObject], _Range | None]]] = set()
    try:
        while waiting or pending:
            while waiting and len(pending) < _PARALLEL:
                pending.add(asyncio.create_task(_list_page(fetch, prefix, waiting.pop())))
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for objects, rest in [task.result() for task in done]:
                if rest is not None:
                    waiting.append(rest)
                yield objects
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def _list_page(fetch: FetchPage, prefix: str, keys: _Range) -> tuple[list[ListedObject], _Range | None]:
    """The next page of a range, and what of the range is left after it."""
    start = {"StartAfter": prefix + keys.after.decode()} if keys.after and not keys.token else {}
    page = await fetch(Prefix=prefix, **start, **_after(keys.token))
    last = keys.after
    for listed in page.objects:
        if listed.key < last:
            raise _OutOfOrder
        last = listed.key
    if keys.until is not None and last > keys.until:
        return [listed for listed in page.objects if listed.key <= keys.until], None
    if not page.token:
        return page.objects, None
    if page.token == keys.token:
        raise BrokenAnswer("the listing repeats itself: a token to go on with came twice")
    return page.objects, _Range(last, keys.until, page.token, _empty_pages(keys.empty, page))


def _cut(keys: _Range, names: list[bytes]) -> list[_Range]:
    """*keys* in at most _MAX_RANGES parts with about equally many of *names* in each."""
    inside = sorted(name for name in names if name > keys.after)
    step = -(-(len(inside) + 1) // _MAX_RANGES)
    cuts = inside[step - 1 :: step]
    return [_Range(after, until) for after, until in zip([keys.after, *cuts], [*cuts, keys.until], strict=True)]


def _is_text(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True
