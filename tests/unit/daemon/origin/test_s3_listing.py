"""Listing in parallel finds every key once, whatever the keys; and also on servers that list out of order."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from cachefs_daemon.origin import s3_listing
from cachefs_daemon.origin.s3_errors import BrokenAnswer
from cachefs_daemon.origin.s3_listing import Page, list_bucket, parse_page, parse_time
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.snapshot_builder import ListedObject


class Bucket:
    """ListObjectsV2 over some keys, by the plainest means. order: how it sorts them; ignores: this parameter."""

    def __init__(
        self, keys: set[str], page_size: int, order: Callable[[str], Any] = str.encode, ignores: str = ""
    ) -> None:
        self.keys = sorted(keys, key=order)
        self.page_size = page_size
        self.order = order
        self.ignores = ignores
        self.requests: list[dict[str, str]] = []

    async def fetch(self, **query: str) -> Page:
        self.requests.append(query)
        prefix = query["Prefix"]
        found = [key for key in self.keys if key.startswith(prefix)]
        if "Delimiter" in query:
            found = list(dict.fromkeys(_rolled_up(key, prefix) for key in found))
        if "StartAfter" in query and self.ignores != "StartAfter":
            found = [key for key in found if self.order(key) > self.order(query["StartAfter"])]
        if "ContinuationToken" in query:
            last = self.order(query["ContinuationToken"])
            found = [key for key in found if self.order(key) > last]
        page = found[: self.page_size]
        names = [key.removeprefix("p/").encode() for key in page]
        directories = [name for name in names if "Delimiter" in query and name.endswith(b"/")]
        objects = [ListedObject(name, 1, 0, b"") for name in names if name not in directories]
        return Page(objects, directories, page[-1] if len(found) > len(page) else None)


def _rolled_up(key: str, prefix: str) -> str:
    name, slash, _ = key.removeprefix(prefix).partition("/")
    return prefix + name + slash


def listing(bucket: Bucket) -> list[str]:
    async def collect() -> list[str]:
        return ["p/" + found.key.decode() async for batch in list_bucket(bucket.fetch, "p/") for found in batch]

    return asyncio.run(collect())


parts = st.one_of(st.sampled_from(["a", "b", "a!", "a.", "ab", "0", "\uffee", "😀"]), st.text(min_size=1, max_size=3))
some_keys = st.sets(st.lists(parts, min_size=1, max_size=4).map(lambda names: "p/" + "/".join(names)), max_size=60)


def encodable(key: str) -> bool:
    return not any(0xD800 <= ord(character) < 0xE000 for character in key)


@settings(max_examples=200, deadline=None)
@given(keys=some_keys, page_size=st.integers(1, 5))
def test_every_key_is_listed_once(keys: set[str], page_size: int) -> None:
    keys = set(filter(encodable, keys))
    assert sorted(listing(Bucket(keys, page_size))) == sorted(keys)


@settings(max_examples=100, deadline=None)
@given(keys=some_keys, page_size=st.integers(1, 5))
def test_a_server_that_ignores_where_to_start_loses_no_key(keys: set[str], page_size: int) -> None:
    keys = set(filter(encodable, keys))
    assert set(listing(Bucket(keys, page_size, ignores="StartAfter"))) == keys


def test_a_server_that_sorts_otherwise_loses_no_key() -> None:
    keys = {f"p/{name}/{number}" for name in ("a", "B", "c", "D") for number in range(20)}
    assert set(listing(Bucket(keys, 3, order=str.lower))) == keys


def test_a_small_bucket_takes_no_more_requests_than_pages() -> None:
    bucket = Bucket({f"p/d{number}/x" for number in range(24)}, 3)
    listing(bucket)
    assert len(bucket.requests) == 8


def test_a_million_directories_are_not_listed_twice() -> None:
    bucket = Bucket({f"p/{number:05}/x" for number in range(3000)}, 10)
    assert len(listing(bucket)) == 3000
    assert len(bucket.requests) < 300 + s3_listing._MAX_RANGES + s3_listing._PROBE_PAGES + s3_listing._FIRST_PAGES


def test_pages_are_fetched_at_the_same_time() -> None:
    bucket = Bucket({f"p/{directory:02}/{number:03}" for directory in range(40) for number in range(100)}, 10)
    running = most = 0
    fetch = bucket.fetch

    async def slow_fetch(**query: str) -> Page:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return await fetch(**query)

    bucket.fetch = slow_fetch  # type: ignore[method-assign]
    assert len(listing(bucket)) == 4000
    assert most >= 30


@pytest.mark.parametrize(
    ("encoding", "key", "expected"),
    [
        ("url", "p/a+b%2Bc%20d%25", b"a b+c d%"),
        ("url", "p/%FF%00", b"\xff\x00"),
        (None, "p/a+b%20é", "a+b%20é".encode()),
    ],
)
def test_keys_are_decoded_as_the_server_says(encoding: str | None, key: str, expected: bytes) -> None:
    found = {"Key": key, "Size": 3, "LastModified": parse_time("2026-01-02T03:04:05.678Z"), "ETag": '"e"'}
    page = parse_page({"EncodingType": encoding, "Contents": [found], "IsTruncated": False}, "p/")
    assert page == Page([ListedObject(expected, 3, 1_767_323_045_678_000_000, b"e")], [], None)


def test_times_in_headers_are_understood_too() -> None:
    assert parse_time("Fri, 02 Jan 2026 03:04:05 GMT") == parse_time("2026-01-02T03:04:05Z")


def test_a_page_that_cannot_be_followed_is_not_taken_for_the_last() -> None:
    with pytest.raises(BrokenAnswer, match="cut short"):
        parse_page({"IsTruncated": True, "Contents": []}, "p/")


async def _same_page(**query: str) -> Page:
    return Page([ListedObject(b"key", 1, 0, b"v")], [], "token")


async def _two_pages_in_turn(**query: str) -> Page:
    second = query.get("ContinuationToken") == "a"
    return Page([ListedObject(b"b" if second else b"a", 1, 0, b"v")], [], "b" if second else "a")


async def _empty_pages(**query: str) -> Page:
    return Page([], [], query.get("ContinuationToken", "") + "x")


@pytest.mark.parametrize("fetch", [_same_page, _two_pages_in_turn, _empty_pages])
def test_a_listing_that_would_never_end_is_an_error(
    fetch: s3_listing.FetchPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_listing, "_MOST_EMPTY", 50)

    async def collect() -> None:
        async for _ in list_bucket(fetch, "p/"):
            pass

    with pytest.raises(BrokenAnswer, match=r"repeats itself|does not go on"):
        asyncio.run(asyncio.wait_for(collect(), 20))
