"""Another way to the objects of a dataset: what is changed, what is kept, and what is refused."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cachefs.errors import ConfigError
from cachefs.messages import OriginChange, OriginOptions
from cachefs.snapshot import Snapshot
from cachefs.snapshot_builder import ListedObject, build_snapshot_file
from cachefs_daemon.datasets.origin_access import (
    ListingComparison,
    apply_change,
    check_any_alike,
    compare_listing,
    describe_options,
    is_same_version,
    kept_name_prefix,
)
from cachefs_daemon.origin.base import OriginSettings
from cachefs_daemon.origin.kinds import open_origin
from tests import virtual_time


def test_what_is_not_given_stays_and_none_takes_away() -> None:
    before = OriginOptions(endpoint_url="http://a", region="eu", anonymous=True)
    assert apply_change(before, OriginChange()) == before
    now = apply_change(before, OriginChange(endpoint_url="http://b", region=None, anonymous=False))
    assert now == OriginOptions(endpoint_url="http://b")


def test_names_of_objects_stay_as_they_were_first() -> None:
    def origin(endpoint: str) -> Any:
        return open_origin("s3://bucket/x", OriginOptions(endpoint_url=endpoint), OriginSettings())

    one, two = origin("http://one"), origin("http://two")
    named = kept_name_prefix(one, two, b"")
    assert named == one.identity(b"") != two.identity(b"")
    assert kept_name_prefix(two, origin("http://three"), named) == named
    assert kept_name_prefix(two, one, named) == b""


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (b"etag", b"etag", True), (b"etag\0commit", b"etag\0other", True), (b"etag", b"gate", False),
        (b"5-17", b"5-17-18-3", True), (b"5-17-18-3", b"5-17", True), (b"5-1", b"5-17", False),
    ],
)  # fmt: skip
def test_versions_that_end_early_are_the_same(one: bytes, other: bytes, same: bool) -> None:
    assert is_same_version(one, other) is same


class Shelf:
    """An origin with these objects."""

    url = "s3://shelf"

    def __init__(self, *objects: ListedObject) -> None:
        self._objects = list(objects)

    async def list(self, _: object) -> AsyncIterator[list[ListedObject]]:
        yield []
        yield self._objects
        raise AssertionError("no more is asked for than is needed")


def test_a_look_compares_with_what_was_listed(tmp_path: Path) -> None:
    listed = [ListedObject(key, 5, 1, b"v") for key in (b"a", b"b", b"c")]
    path = build_snapshot_file(listed, "s3://shelf", 4 << 20, lambda key: key, tmp_path)
    there: Any = Shelf(
        listed[0], ListedObject(b"b", 6, 1, b"v"), ListedObject(b"c", 5, 1, b"w"), ListedObject(b"new", 5, 1, b"v"),
        ListedObject(b"dir/", 0, 1, b"v"),
    )  # fmt: skip
    with contextlib.closing(Snapshot(path)) as snapshot:
        found = virtual_time.run(compare_listing(there, snapshot))
    assert found == ListingComparison(4, 1)
    check_any_alike("d", found)
    with pytest.raises(ConfigError, match="none of the first 7 objects there"):
        check_any_alike("d", ListingComparison(7, 0))
    with pytest.raises(ConfigError, match="there are no objects"):
        check_any_alike("d", ListingComparison(0, 0))


def test_the_way_in_few_words() -> None:
    assert describe_options(OriginOptions()) == ""
    options = OriginOptions(endpoint_url="http://ceph", region="eu", profile="lab", anonymous=True)
    assert describe_options(options) == "http://ceph, region eu, profile lab, anonymous"
    assert (
        describe_options(OriginOptions(user_project="p_1", requester_pays=True)) == "user project p_1, requester pays"
    )
