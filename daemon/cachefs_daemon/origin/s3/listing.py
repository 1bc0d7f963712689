"""Lists a bucket in parallel.

S3 lists keys in order, a thousand per request, and each page needs the one before. Listed page by page, a million keys
take minutes. But a listing may start after any text. So while fewer requests are in flight than allowed, long ranges of
keys are cut (`key_ranges.py`), and their parts are listed concurrently. Cutting needs no directories and no request
that lists nothing but names: a part begins with a request for its first key, since it may be empty.

Some servers (gateways over file systems) do not list keys in order, and keys at the cuts would be lost. Keys out of
order, and disagreement where two parts meet (`RangeCut`), reveal such a server, and then everything is listed anew in
one piece. The builder drops duplicates.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from cachefs.errors import CachefsError, OriginUnavailable
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.key_ranges import (
    KeyCharacters,
    KeyRange,
    ListingCheckpoint,
    RangeCut,
    choose_cuts,
    common_length,
)
from cachefs_daemon.origin.s3.page import ListingPage
from cachefs_daemon.origin.s3.response import BrokenS3Response

# Pages read before keys are cut. Each range reads half a page too much on average, so small buckets are not cut.
_FIRST_PAGES: Final = 8
# Concurrent requests.
_PARALLEL: Final = 32
# Parts may turn out to be empty: this many, and one more for each of so many pages. (Stores charge for requests.)
_EMPTY_PARTS: Final = 64
_PAGES_PER_EMPTY_PART: Final = 2
# Keys of a page whose characters are recorded: recording all would take longer than the rest.
_SAMPLED_KEYS: Final = 4
# How often two requests may see different keys where two parts meet, before the server counts as unordered.
_CUT_CHECKS: Final = 3
# Most empty pages in a row. A server that has deleted much may send some; one that sends more will never end.
_MAX_EMPTY_PAGES: Final = 1000


class _OutOfOrder(Exception):
    """The server does not list keys in byte order, or ignores the start key."""


FetchPage = Callable[..., Awaitable[ListingPage]]


async def list_bucket(
    fetch: FetchPage, prefix: str, checkpoint: ListingCheckpoint | None = None
) -> AsyncIterator[list[ListedObject]]:
    """Yield all objects below *prefix*, in batches. fetch: returns one page, given the parameters of the query.
    checkpoint: where to begin; updated before each batch.

    Raises BrokenS3Response if the listing would never end.
    """
    checkpoint = checkpoint or ListingCheckpoint()
    try:
        async for objects in _ParallelListing(fetch, prefix, checkpoint).list_objects():
            yield objects
    except _OutOfOrder:
        checkpoint.track(None, {})
        async for page in _pages(fetch, {"Prefix": prefix}):
            yield page.objects


@dataclass(slots=True, eq=False)
class _Range:
    """A range of keys that is listed by itself."""

    # The last key that arrived. The range holds the keys after it,
    last: bytes
    # up to this one; None: up to the last key.
    until: bytes | None
    # Token for the next page; None before the first one.
    token: str | None = None
    # Empty pages in a row so far.
    empty_pages: int = 0
    # Pages that arrived since the range was cut.
    pages: int = 0
    # Length of the common prefix of the first and the last key of its last page.
    page_width: int = 0
    # The range was cut off another one, and may turn out to be empty.
    is_new_part: bool = False
    # The first key on its last page that is beyond its end.
    beyond: bytes | None = None

    def accept_page(self, page: ListingPage) -> list[ListedObject]:
        """Return the objects on its next page that are in the range. Raises _OutOfOrder, BrokenS3Response."""
        # A failed listing may be resumed after `last`, so that moves once the page is known to be good.
        if page.token is not None and page.token == self.token:
            raise BrokenS3Response("the listing repeats itself: the server sent a continuation token twice")
        self.empty_pages = _empty_pages(self.empty_pages, page)
        before = self.last
        for listed in page.objects:
            if listed.key < self.last:
                raise _OutOfOrder
            self.last = listed.key
        self.token = page.token
        # Some servers also list the key to start after.
        objects = page.objects
        if objects and (objects[0].key <= before != b"" or (self.until is not None and self.last > self.until)):
            until = self.until
            self.beyond = next((one.key for one in objects if until is not None and one.key > until), None)
            objects = [
                one for one in objects if (one.key > before or not before) and (until is None or one.key <= until)
            ]
        if objects:
            self.pages += 1
            self.page_width = common_length(_text(objects[0].key), _text(objects[-1].key))
        return objects

    @property
    def is_listed(self) -> bool:
        """Whether nothing is left of the range, after a page arrived."""
        return self.token is None or (self.until is not None and self.last >= self.until)


class _ParallelListing:
    """The unlisted rest of a bucket, in ranges that are listed concurrently."""

    def __init__(self, fetch: FetchPage, prefix: str, checkpoint: ListingCheckpoint) -> None:
        self._fetch = fetch
        self._prefix = prefix
        self._checkpoint = checkpoint
        self._cuts = {one.cut: one for one in checkpoint.resumed_cuts}
        unbegun = {one.cut for one in checkpoint.resumed_cuts if not one.is_begun}
        self._remaining = {
            _Range(one.after, one.until, is_new_part=one.after in unbegun): None for one in checkpoint.resumed_ranges
        }
        self._requests: dict[asyncio.Task[ListingPage], _Range] = {}
        self._characters = KeyCharacters()
        self._pages = 0
        self._empty_parts = 0

    async def list_objects(self) -> AsyncIterator[list[ListedObject]]:
        """Yield the objects of all ranges. Raises _OutOfOrder, BrokenS3Response."""
        self._checkpoint.track(lambda: [KeyRange(one.last, one.until) for one in self._remaining], self._cuts)
        try:
            for cut in list(self._cuts):
                await self._verify_cut(cut)
            self._send_requests()
            while self._requests:
                done, _ = await asyncio.wait(self._requests, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    key_range = self._requests.pop(task)
                    start = key_range.last
                    objects = self._accept_page(key_range, task.result())
                    if key_range.is_listed:
                        del self._remaining[key_range]
                    try:
                        await self._verify_cut(start)
                        if key_range.until is not None:
                            await self._verify_cut(key_range.until)
                    except CachefsError:
                        # The page does not count: a resumed listing begins with it.
                        key_range.last, self._remaining[key_range] = start, None
                        raise
                    yield objects
                self._send_requests()
        finally:
            for task in self._requests:
                task.cancel()
            await asyncio.gather(*self._requests, return_exceptions=True)

    def _accept_page(self, key_range: _Range, page: ListingPage) -> list[ListedObject]:
        start = key_range.last
        objects = key_range.accept_page(page)
        if key_range.is_listed and key_range.until in self._cuts:
            seam = self._cuts[key_range.until]
            seam.last = max((one.key for one in objects), default=start)
            seam.seen_before = key_range.beyond
        if key_range.is_new_part and start in self._cuts and (page.objects or not page.token):
            seam = self._cuts[start]
            seam.seen_after = page.objects[0].key if page.objects else None
            seam.is_begun = True
        if key_range.is_new_part:
            # One key does not tell how far a page reaches.
            key_range.is_new_part, key_range.pages = False, 0
            self._empty_parts += not objects
        else:
            self._pages += bool(objects)
        for listed in objects[:: max(1, len(objects) // _SAMPLED_KEYS)]:
            self._characters.add_characters_of(_text(listed.key))
        return objects

    def _send_requests(self) -> None:
        """Send as many requests as allowed."""
        in_flight = set(self._requests.values())
        for one in [one for one in self._remaining if one not in in_flight][: _PARALLEL - len(in_flight)]:
            self._request_page(one)
        if self._pages < _FIRST_PAGES:
            return
        # The longer a range has been listed without an end, the more is probably left of it.
        long = sorted((one for one in self._remaining if one.pages), key=lambda one: one.pages, reverse=True)
        for number, one in enumerate(long):
            free = min(_PARALLEL - len(self._requests), self._empty_parts_left())
            if free <= 0:
                break
            for part in self._split_range(one, -(-free // (len(long) - number))):
                self._request_page(part)

    async def _verify_cut(self, cut: bytes) -> None:
        """Verify the seam at *cut*, if there is one and both its parts are known. Raises _OutOfOrder."""
        seam = self._cuts.get(cut)
        if seam is None or not seam.is_known:
            return
        if seam.seen_before != seam.seen_after and not await self._is_transient_difference(seam):
            raise _OutOfOrder
        del self._cuts[cut]  # only now: a listing that fails earlier is resumed here

    async def _is_transient_difference(self, seam: RangeCut) -> bool:
        """Return whether the difference at a seam is transient: keys may come or go between requests, but not every
        time."""
        assert seam.last is not None
        for _ in range(_CUT_CHECKS):
            before, after = [await self._first_key(start) for start in (seam.last, seam.cut)]
            if before == after or (before is not None and before <= seam.cut):
                return True
        return False

    async def _first_key(self, start: bytes) -> bytes | None:
        """Return the first key after *start*, of the two that are listed next."""
        query: dict[str, Any] = {"Prefix": self._prefix, "MaxKeys": 2}
        if start:
            query["StartAfter"] = self._prefix + start.decode()
        page = await self._page(query, start)
        return next((one.key for one in page.objects if one.key > start), None)

    def _empty_parts_left(self) -> int:
        """Return how many more parts may turn out to be empty, beyond those requested now."""
        new = sum(one.is_new_part for one in self._requests.values())
        return _EMPTY_PARTS + self._pages // _PAGES_PER_EMPTY_PART - self._empty_parts - new

    def _split_range(self, key_range: _Range, most: int) -> list[_Range]:
        """Cut at most *most* parts off the end of a range."""
        until = None if key_range.until is None else _text(key_range.until)
        found = choose_cuts(_text(key_range.last), until, key_range.page_width, self._characters, most)
        # Keys that are not UTF-8 are never cut.
        at = [
            cut
            for cut in map(str.encode, found)
            if key_range.last < cut and (key_range.until is None or cut < key_range.until)
        ]
        if not at:
            return []
        parts = [
            _Range(after, before, is_new_part=True)
            for after, before in zip(at, [*at[1:], key_range.until], strict=True)
        ]
        self._cuts.update((cut, RangeCut(cut)) for cut in at)
        key_range.until, key_range.pages = at[0], 0
        self._remaining.update(dict.fromkeys(parts))
        return parts

    def _request_page(self, one: _Range) -> None:
        query: dict[str, Any] = {"Prefix": self._prefix}
        if one.token is not None:
            query["ContinuationToken"] = one.token
        elif one.last:
            query["StartAfter"] = self._prefix + one.last.decode()
        if one.is_new_part:
            query["MaxKeys"] = 1
        self._requests[asyncio.create_task(self._page(query, one.last))] = one

    async def _page(self, query: dict[str, Any], last: bytes) -> ListingPage:
        try:
            return await self._fetch(**query)
        except OriginUnavailable as error:
            if not last:
                raise
            raise OriginUnavailable(f"{error} (keys after {_text(last)!r})") from None


async def _pages(fetch: FetchPage, query: dict[str, str]) -> AsyncIterator[ListingPage]:
    """Yield the pages of one listing. Raises BrokenS3Response if they would never end."""
    token: str | None = None
    seen: set[str] = set()
    empty = 0
    while True:
        page = await fetch(**query, **_after(token))
        yield page
        token = page.token
        if token is None:
            return
        empty = _empty_pages(empty, page)
        if token in seen:
            raise BrokenS3Response("the listing repeats itself: the server sent a continuation token twice")
        seen.add(token)


def _empty_pages(before: int, page: ListingPage) -> int:
    """Return the number of empty pages in a row, *page* included. Raises BrokenS3Response if there are too many."""
    empty = 0 if page.objects else before + 1
    if empty > _MAX_EMPTY_PAGES:
        raise BrokenS3Response(f"the listing makes no progress: {empty} pages in a row were empty")
    return empty


def _after(token: str | None) -> dict[str, str]:
    return {"ContinuationToken": token} if token else {}


def _text(key: bytes) -> str:
    return key.decode(errors="replace")
