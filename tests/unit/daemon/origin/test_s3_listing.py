"""Listing in parallel finds every key once, whatever the keys; and also on servers that list out of order."""

import asyncio
import bisect
import itertools
import random
from collections.abc import Callable
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.errors import ConfigError, OriginUnavailable
from cachefs.messages import OriginOptions
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.base import OriginSettings
from cachefs_daemon.origin.key_ranges import EVERYTHING, KeyRange, ListingCheckpoint, RangeCut
from cachefs_daemon.origin.kinds import open_origin
from cachefs_daemon.origin.s3 import listing as s3_listing
from cachefs_daemon.origin.s3.listing import list_bucket
from cachefs_daemon.origin.s3.page import ListingPage
from cachefs_daemon.origin.s3.response import BrokenS3Response
from tests import virtual_time


class Bucket:
    """ListObjectsV2 over some keys, by the plainest means. order: how it sorts them; ignores: this parameter; repeats:
    whether it lists the key, too, after which it is to start."""

    def __init__(
        self,
        keys: set[str],
        page_size: int,
        order: Callable[[str], Any] = str.encode,
        ignores: str = "",
        repeats: bool = False,
    ) -> None:
        self.keys = sorted(keys, key=order)
        self.page_size = page_size
        self.order = order
        self.ignores = ignores
        self.repeats = repeats
        self.requests: list[dict[str, Any]] = []

    async def fetch(self, **query: Any) -> ListingPage:
        self.requests.append(query)
        begin = 0
        if "StartAfter" in query and self.ignores != "StartAfter":
            place = bisect.bisect_left if self.repeats else bisect.bisect_right
            begin = place(self.keys, self.order(query["StartAfter"]), key=self.order)
        if "ContinuationToken" in query:
            last = self.order(query["ContinuationToken"])
            begin = max(begin, bisect.bisect_right(self.keys, last, key=self.order))
        prefixed = (key for key in itertools.islice(self.keys, begin, None) if key.startswith(query["Prefix"]))
        most = min(self.page_size, query.get("MaxKeys", self.page_size))
        *page, more = *itertools.islice(prefixed, most), next(prefixed, None)
        objects = [ListedObject(key.removeprefix("p/").encode(), 1, 0, b"") for key in page]
        return ListingPage(objects, page[-1] if more is not None else None)


def listing(bucket: Bucket) -> list[str]:
    return interrupted_listing(bucket, ListingCheckpoint(), 1 << 30)


def interrupted_listing(bucket: Bucket, place: ListingCheckpoint, batches: int) -> list[str]:
    """The keys in so many batches of a listing that begins at *place*."""

    async def collect() -> list[str]:
        found = []
        async with aclosing(list_bucket(bucket.fetch, "p/", place)) as listed:
            for _ in range(batches):
                batch = await anext(listed, None)
                if batch is None:
                    break
                found += ["p/" + one.key.decode() for one in batch]
        return found

    return virtual_time.run(collect())


parts = st.one_of(st.sampled_from(["a", "b", "a!", "a.", "ab", "0", "\uffee", "😀"]), st.text(min_size=1, max_size=3))
some_keys = st.sets(st.lists(parts, min_size=1, max_size=4).map(lambda names: "p/" + "/".join(names)), max_size=60)


# Many keys that begin alike, as in a directory without directories, or in one that lies deep.
numbers = st.builds(
    lambda start, every, count: {f"{start}{number * every:05}.jpg" for number in range(count)},
    st.sampled_from(["p/", "p/a/b/c/d/e", "p/x-", "p/\uffee/"]),
    st.integers(1, 99),
    st.integers(0, 40),
)
many_keys = st.builds(set.union, some_keys, numbers, numbers)


def encodable(key: str) -> bool:
    return not any(0xD800 <= ord(character) < 0xE000 for character in key)


@given(keys=many_keys, page_size=st.integers(1, 5), repeats=st.booleans())
def test_every_key_is_listed_once(keys: set[str], page_size: int, repeats: bool) -> None:
    keys = set(filter(encodable, keys))
    assert sorted(listing(Bucket(keys, page_size, repeats=repeats))) == sorted(keys)


@given(keys=many_keys, page_size=st.integers(1, 5), batches=st.integers(1, 30))
def test_a_listing_that_is_interrupted_at_any_page_goes_on_there(keys: set[str], page_size: int, batches: int) -> None:
    keys = set(filter(encodable, keys))
    found: list[str] = []
    left: list[KeyRange] | None = [EVERYTHING]
    seams: list[RangeCut] = []
    while left:
        place = ListingCheckpoint(left, seams)
        found += interrupted_listing(Bucket(keys, page_size), place, batches)
        left, seams = place.remaining_ranges, place.unverified_cuts
    assert sorted(found) == sorted(keys)


@given(keys=many_keys, at=st.sets(st.text(max_size=4).filter(encodable), max_size=5), page_size=st.integers(1, 5))
def test_it_does_not_matter_where_keys_are_cut(keys: set[str], at: set[str], page_size: int) -> None:
    keys = set(filter(encodable, keys))
    bounds = [b"", *sorted(one.encode() for one in at if one), None]
    place = ListingCheckpoint([KeyRange(after or b"", until) for after, until in pairwise(bounds)])
    assert sorted(interrupted_listing(Bucket(keys, page_size), place, 1 << 30)) == sorted(keys)


@given(keys=some_keys, page_size=st.integers(1, 5))
def test_a_server_that_ignores_where_to_start_loses_no_key(keys: set[str], page_size: int) -> None:
    keys = set(filter(encodable, keys))
    assert set(listing(Bucket(keys, page_size, ignores="StartAfter"))) == keys


def shuffled(key: str) -> tuple[int, ...]:
    """An order that is none of texts."""
    return tuple(ord(character) * 7919 % 127 for character in key)


@given(
    keys=many_keys,
    page_size=st.integers(1, 5),
    order=st.sampled_from([str.lower, str.swapcase, shuffled]),
    first_pages=st.integers(1, 8),
)
def test_a_server_with_any_order_loses_no_key(
    keys: set[str], page_size: int, order: Callable[[str], Any], first_pages: int
) -> None:
    # Keys that such a server takes for the same would be lost on the way from page to page.
    keys = {order(key): key for key in filter(encodable, keys)}.values()  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3_listing, "_FIRST_PAGES", first_pages)
        assert set(listing(Bucket(set(keys), page_size, order=order))) == set(keys)


@given(keys=many_keys, others=many_keys, page_size=st.integers(1, 5), numbers=st.randoms())
def test_keys_that_come_and_go_disturb_no_others(
    keys: set[str], others: set[str], page_size: int, numbers: random.Random
) -> None:
    keys = set(filter(encodable, keys))
    passing = sorted(set(filter(encodable, others)) - keys)
    bucket = Bucket(keys, page_size)
    fetch = bucket.fetch

    async def changing(**query: Any) -> ListingPage:
        bucket.keys = sorted(keys | set(passing[: numbers.randint(0, len(passing))]), key=str.encode)
        return await fetch(**query)

    bucket.fetch = changing  # type: ignore[method-assign]
    found = [key for key in listing(bucket) if key in keys]
    assert sorted(set(found)) == sorted(keys)


def test_keys_that_no_part_would_list_are_not_lost() -> None:
    """With the server, `a` comes before `X`. So the part up to X ends at a key that is behind it, and the next part
    begins behind that key. No part has keys that are out of order."""
    keys = {f"p/{start}{number:03}X" for start, many in (("0", 200), ("a", 20), ("y", 20)) for number in range(many)}
    assert set(listing(Bucket(keys, 10, order=str.lower))) == keys


@pytest.mark.parametrize("batches", range(1, 24))
def test_what_was_cut_before_an_interruption_is_looked_at_after_it(batches: int) -> None:
    """As above, and the listing goes on in another process."""
    keys = {f"p/{start}{number:03}X" for start, many in (("0", 200), ("a", 20), ("y", 20)) for number in range(many)}
    bucket, place = Bucket(keys, 10, order=str.lower), ListingCheckpoint()
    found = interrupted_listing(bucket, place, batches)
    if place.remaining_ranges is not None:  # else everything is listed anew in any case
        found += interrupted_listing(bucket, ListingCheckpoint(place.remaining_ranges, place.unverified_cuts), 1 << 30)
        assert set(found) == keys


def test_a_server_that_sorts_otherwise_loses_no_key() -> None:
    keys = {f"p/{name}/{number}" for name in ("a", "B", "c", "D") for number in range(20)}
    assert set(listing(Bucket(keys, 3, order=str.lower))) == keys


def test_a_small_bucket_takes_no_more_requests_than_pages() -> None:
    bucket = Bucket({f"p/d{number}/x" for number in range(24)}, 3)
    listing(bucket)
    assert len(bucket.requests) == 8


@pytest.mark.parametrize("name", ["p/{:05}/x", "p/{:05}", "p/one/deep/directory/{:05}.jpg"])
def test_few_pages_are_asked_for_in_vain(name: str) -> None:
    bucket = Bucket({name.format(number) for number in range(3000)}, 10)
    assert len(listing(bucket)) == 3000
    pages = [query for query in bucket.requests if "MaxKeys" not in query]
    assert len(pages) < 1.5 * 300
    assert len(bucket.requests) - len(pages) < s3_listing._EMPTY_PARTS + 300


def test_an_error_names_the_keys_that_could_not_be_listed() -> None:
    bucket = Bucket({f"p/{number:04}" for number in range(200)}, 10)
    fetch = bucket.fetch

    async def failing(**query: Any) -> ListingPage:
        if query.get("ContinuationToken") == "p/0049":
            raise OriginUnavailable("no answer")
        return await fetch(**query)

    bucket.fetch = failing  # type: ignore[method-assign]
    with pytest.raises(OriginUnavailable, match=r"no answer \(keys after '0049'\)"):
        listing(bucket)


def test_after_a_page_that_was_refused_the_listing_goes_on_with_it() -> None:
    """A proxy repeats a token once."""
    bucket = Bucket({f"p/{number:04}" for number in range(200)}, 10)
    fetch, place, found = bucket.fetch, ListingCheckpoint(), list[str]()

    async def repeating(**query: Any) -> ListingPage:
        page = await fetch(**query)
        return ListingPage(page.objects, query.get("ContinuationToken")) if len(bucket.requests) == 3 else page

    async def collect() -> None:
        async for batch in list_bucket(repeating, "p/", place):
            found.extend("p/" + one.key.decode() for one in batch)

    with pytest.raises(BrokenS3Response, match="a continuation token twice"):
        virtual_time.run(collect())
    assert place.remaining_ranges is not None
    found += interrupted_listing(bucket, ListingCheckpoint(place.remaining_ranges, place.unverified_cuts), 1 << 30)
    assert sorted(found) == sorted(bucket.keys)


def test_a_page_at_a_seam_that_could_not_be_looked_at_does_not_count() -> None:
    """Each key that shows that a part is not empty is deleted then, so both parts see different keys at the cut."""
    bucket = Bucket({f"p/{number:05}" for number in range(20_000)}, 200)
    fetch, place, found = bucket.fetch, ListingCheckpoint(), list[str]()

    async def changing(**query: Any) -> ListingPage:
        if query.get("MaxKeys") == 2:
            raise OriginUnavailable("no answer")
        page = await fetch(**query)
        if query.get("MaxKeys") == 1 and page.objects:
            bucket.keys.remove("p/" + page.objects[0].key.decode())
        return page

    async def collect() -> None:
        async for batch in list_bucket(changing, "p/", place):
            found.extend("p/" + one.key.decode() for one in batch)

    with pytest.raises(OriginUnavailable, match="no answer"):
        virtual_time.run(collect())
    assert place.remaining_ranges is not None
    found += interrupted_listing(bucket, ListingCheckpoint(place.remaining_ranges, place.unverified_cuts), 1 << 30)
    assert set(found) >= set(bucket.keys)


@pytest.mark.parametrize("name", ["p/{:02}/{:03}", "p/{:02}{:03}", "p/one/deep/directory/{:02}{:03}.jpg"])
def test_pages_are_fetched_at_the_same_time(name: str) -> None:
    bucket = Bucket({name.format(directory, number) for directory in range(40) for number in range(100)}, 10)
    running = most = 0
    fetch = bucket.fetch

    async def slow_fetch(**query: Any) -> ListingPage:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return await fetch(**query)

    bucket.fetch = slow_fetch  # type: ignore[method-assign]
    assert len(listing(bucket)) == 4000
    assert most >= 30


def test_a_bucket_whose_keys_never_end_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()
    origin = open_origin("s3://bucket", OriginOptions(endpoint_url="http://127.0.0.1:1"), OriginSettings(max_pages=20))

    async def another_page(**_: Any) -> ListingPage:
        number = next(numbers)
        return ListingPage([ListedObject(b"%09d" % number, 1, 0, b"v")], str(number))

    async def collect() -> None:
        async for _ in origin.list(lambda *_: None):
            pass

    monkeypatch.setattr(s3_listing, "_FIRST_PAGES", 1000)
    monkeypatch.setattr(origin, "_fetch_page", another_page)
    with pytest.raises(ConfigError, match=r"s3://bucket at .*more than 20 pages, or no end.*origin\.max_pages"):
        virtual_time.run(collect())
    assert next(numbers) < 30


async def _same_page(**query: str) -> ListingPage:
    return ListingPage([ListedObject(b"key", 1, 0, b"v")], "token")


async def _two_pages_in_turn(**query: str) -> ListingPage:
    second = query.get("ContinuationToken") == "a"
    return ListingPage([ListedObject(b"b" if second else b"a", 1, 0, b"v")], "b" if second else "a")


async def _empty_pages(**query: str) -> ListingPage:
    return ListingPage([], query.get("ContinuationToken", "") + "x")


@pytest.mark.parametrize("fetch", [_same_page, _two_pages_in_turn, _empty_pages])
def test_a_listing_that_would_never_end_is_an_error(
    fetch: s3_listing.FetchPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_listing, "_MAX_EMPTY_PAGES", 50)

    async def collect() -> None:
        async for _ in list_bucket(fetch, "p/"):
            pass

    with pytest.raises(BrokenS3Response, match=r"repeats itself|makes no progress"):
        virtual_time.run(asyncio.wait_for(collect(), 20))
