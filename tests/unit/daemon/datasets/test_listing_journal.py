"""A journal is gone on with while it is fresh and whole, by one listing at a time, and is removed otherwise."""

import contextlib
import os
import time
from pathlib import Path

import pytest

from cachefs.messages import OriginOptions
from cachefs.snapshot_builder import ListedObject, SnapshotBuilder
from cachefs_daemon.datasets.listing_journal import RESUMABLE_SECONDS, ListingJournal, journal_path, remove_stale
from cachefs_daemon.origin.key_ranges import KeyRange, RangeCut

LEFT = [KeyRange(b"b", b"m"), KeyRange(b"x", None)]
SEAMS = [RangeCut(b"m", last=b"k", seen_before=b"n"), RangeCut(b"x")]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return journal_path(tmp_path, "s3://b", 1 << 20, OriginOptions())


def builder_of(journal: ListingJournal) -> SnapshotBuilder:
    return SnapshotBuilder("s3://b", 1 << 20, bytes, journal.rows)


def save(directory: Path) -> None:
    with contextlib.closing(ListingJournal(directory)) as journal:
        builder = builder_of(journal)
        builder.add_objects([ListedObject(b"a", 1, 0, b"v"), ListedObject(b"b", 2, 0, b"v")])
        journal.save(builder, LEFT, SEAMS)


def restored(directory: Path) -> tuple[list[KeyRange] | None, int]:
    with contextlib.closing(ListingJournal(directory)) as journal:
        builder = builder_of(journal)
        place = journal.restore(builder)
        assert place is None or place.resumed_cuts == SEAMS
        return place.resumed_ranges if place is not None else None, builder.objects


def age(path: Path) -> None:
    long_ago = time.time() - 2 * RESUMABLE_SECONDS
    os.utime(path, (long_ago, long_ago))


def test_a_listing_goes_on(directory: Path, tmp_path: Path) -> None:
    save(directory)
    remove_stale(tmp_path)
    assert restored(directory) == (LEFT, 2)


def test_one_that_is_given_up_is_begun_anew(directory: Path) -> None:
    save(directory)
    with contextlib.closing(ListingJournal(directory)) as journal:
        journal.make_unresumable()
    assert restored(directory) == (None, 0)


def test_an_old_one_is_begun_anew(directory: Path) -> None:
    save(directory)
    age(directory / "place")
    assert restored(directory) == (None, 0)


@pytest.mark.parametrize("name", ["place", "rows"])
@pytest.mark.parametrize("content", [b"", b"damaged"])
def test_a_damaged_one_is_begun_anew(directory: Path, name: str, content: bytes) -> None:
    save(directory)
    (directory / name).write_bytes(content)
    assert restored(directory) == (None, 0)


def test_stale_ones_are_removed_unless_they_are_in_use(directory: Path, tmp_path: Path) -> None:
    save(directory)
    with contextlib.closing(ListingJournal(directory)):
        age(directory)
        remove_stale(tmp_path)
        assert directory.exists()
        with pytest.raises(BlockingIOError):
            ListingJournal(directory)
    remove_stale(tmp_path)
    assert not directory.exists()
    remove_stale(tmp_path / "absent")


def test_other_options_are_another_listing(tmp_path: Path) -> None:
    options = [OriginOptions(), OriginOptions(endpoint_url="http://x")]
    asked = [(url, size, each) for url in ("s3://a", "s3://b") for size in (1, 2) for each in options]
    assert len({journal_path(tmp_path, *one) for one in asked}) == len(asked)
