"""Room that another process writes into: counted from when it is reserved, until the block in it is evicted."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cachefs.block import MEMORY, BlockLocation, piece_checksums
from cachefs.planning.eviction.quotas import Quota
from cachefs_daemon.store import segment_writer
from cachefs_daemon.store.block_store import BlockToStore
from cachefs_daemon.store.segment_writer import PAGE, Record, SegmentFile, span, write_record
from cachefs_daemon.store.space_reservations import ExpectedBlock, ReservedSpace, WritableSegment, close_segments
from tests.blockstore import OpenStore, data_of, disk_usage, key_of, opened, store_config

SIZE = 100_000


@pytest.fixture
def store(root: Path) -> Iterator[OpenStore]:
    with opened(store_config(root, ssd=0)) as store:
        yield store


def expected(*numbers: int) -> list[ExpectedBlock]:
    return [ExpectedBlock(key_of(number), SIZE, "snapshot") for number in numbers]


def write(
    rooms: Sequence[ReservedSpace | None], segments: Sequence[WritableSegment], *numbers: int
) -> list[tuple[ReservedSpace, bytes]]:
    """As a fetch process does it."""
    descriptors = {(one.tier, one.number): one.descriptor for one in segments}
    written = []
    for room, number in zip(rooms, numbers, strict=True):
        assert room is not None
        data = data_of(number, SIZE)
        checksums = piece_checksums(room.key, data)
        file = SegmentFile(Path(), -1, room.segment)
        record = Record(room.key, room.start, SIZE, checksums)
        write_record(file, descriptors[room.tier, room.segment], record, data, allocate=False)
        written.append((room, checksums))
    close_segments(segments)
    return written


def used(store: OpenStore) -> int:
    """Without the page of each segment that has any block."""
    return store.usage()[MEMORY].used - PAGE * len(store.storage._tiers[MEMORY].live_segments())


def test_what_was_written_is_found_once_it_is_entered(store: OpenStore, root: Path) -> None:
    rooms, segments = store.storage.reservations.reserve(expected(1, 2))
    assert used(store) == 2 * span(SIZE)
    written = write(rooms, segments, 1, 2)
    assert store.get(key_of(1)) is None
    places = store.storage.reservations.publish_blocks(written)
    for number, place in zip((1, 2), places, strict=True):
        assert store.get(key_of(number)) == place
        assert store.read(key_of(number), place) == data_of(number, SIZE)
    assert used(store) == 2 * span(SIZE)
    assert disk_usage(root / "memory") <= store.usage()[MEMORY].used + PAGE


def test_room_that_is_given_back_is_free_whatever_was_written(store: OpenStore, root: Path) -> None:
    rooms, segments = store.storage.reservations.reserve(expected(1, 2))
    write(rooms, segments, 1, 2)
    store.storage.reservations.free_spaces([room for room in rooms if room is not None])
    assert used(store) == 0
    assert disk_usage(root / "memory") <= 2 * PAGE
    assert store.put(key_of(1), data_of(1, SIZE)) is not None


def test_a_block_that_came_in_another_way_stays_and_the_room_is_free(store: OpenStore) -> None:
    rooms, segments = store.storage.reservations.reserve(expected(1, 2))
    first = store.put(key_of(1), data_of(1, SIZE))
    places = store.storage.reservations.publish_blocks(write(rooms, segments, 1, 2))
    assert places[0] == first == store.get(key_of(1))
    assert used(store) == 2 * span(SIZE)


def test_what_is_there_gets_no_room(store: OpenStore) -> None:
    store.put(key_of(1), data_of(1, SIZE))
    rooms, segments = store.storage.reservations.reserve(expected(1, 2))
    assert [room is None for room in rooms] == [True, False]
    close_segments(segments)


def test_no_more_room_is_given_than_there_is(store: OpenStore) -> None:
    rooms, segments = store.storage.reservations.reserve(expected(*range(100)))
    close_segments(segments)
    assert 0 < sum(room is not None for room in rooms) < 42
    assert store.usage()[MEMORY].used <= store.usage()[MEMORY].limit


def test_a_segment_with_room_that_is_written_to_is_not_compacted_away(root: Path) -> None:
    with opened(store_config(root, ssd=0, segment=512 << 10, policy="lru")) as store:
        rooms, segments = store.storage.reservations.reserve(expected(1))
        for number in range(2, 12):
            store.put(key_of(number), data_of(number, SIZE))
        store.evict([key_of(number) for number in range(2, 6)])
        store.maintain()
        (place,) = store.storage.reservations.publish_blocks(write(rooms, segments, 1))
        assert store.read(key_of(1), place) == data_of(1, SIZE)
        store.maintain()
        (place,) = [one for one in [store.get(key_of(1))] if one is not None]
        assert store.read(key_of(1), place) == data_of(1, SIZE)


def test_a_segment_that_somebody_has_removed_is_no_room(store: OpenStore, root: Path) -> None:
    store.put(key_of(1), data_of(1, SIZE))
    for path in (root / "memory").glob("*.seg"):
        path.unlink()
    rooms, segments = store.storage.reservations.reserve(expected(2))
    assert (rooms, segments) == ([None], [])
    store.retry()
    rooms, segments = store.storage.reservations.reserve(expected(2))
    (place,) = store.storage.reservations.publish_blocks(write(rooms, segments, 2))
    assert store.read(key_of(2), place) == data_of(2, SIZE)


@pytest.mark.parametrize("entered", [True, False])
def test_room_counts_for_its_dataset(entered: bool, store: OpenStore) -> None:
    store.set_limit(Quota("d", frozenset({"snapshot"}), share=0.5))
    limited = store.tiering.unlocked.quotas._limited["d"]
    rooms, segments = store.storage.reservations.reserve(expected(1, 2))
    assert limited.used[MEMORY] == 2 * span(SIZE)
    written = write(rooms, segments, 1, 2)
    if entered:
        store.storage.reservations.publish_blocks(written)
    else:
        store.storage.reservations.free_spaces([room for room, _ in written])
    assert limited.used[MEMORY] == (2 * span(SIZE) if entered else 0)
    assert (len(limited.last_read), len(limited.being_written)) == (2 if entered else 0, 0)


@pytest.mark.parametrize("first", ["put", "room"])
def test_a_block_that_two_bring_counts_for_its_dataset_when_one_gives_up(
    first: str, store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.set_limit(Quota("d", frozenset({"snapshot"}), share=0.5))
    limited = store.tiering.unlocked.quotas._limited["d"]
    reserved: list[ReservedSpace | None] = []
    publish = store.blocks._transfers.publish

    def reserve() -> None:
        rooms, segments = store.storage.reservations.reserve(expected(1))
        close_segments(segments)
        reserved.extend(rooms)

    def between(written: Sequence[tuple[bytes, BlockLocation]], *, transient: bool = False) -> list[BlockLocation]:
        if written and first == "put":
            reserve()
        if written:
            store.storage.reservations.free_spaces([room for room in reserved if room is not None])
        return publish(written, transient=transient)

    if first == "room":
        reserve()
    monkeypatch.setattr(store.blocks._transfers, "publish", between)
    (place,) = store.blocks.put_many([BlockToStore(key_of(1), data_of(1, SIZE), snapshot="snapshot")])
    assert isinstance(place, BlockLocation)
    assert len(reserved) == 1
    assert (limited.used[MEMORY], list(limited.last_read)) == (span(SIZE), [key_of(1)])
    assert (limited.being_written, limited.expected) == ({}, {})


def test_a_block_whose_put_fails_counts_for_its_dataset_when_its_room_is_entered(store: OpenStore) -> None:
    store.set_limit(Quota("d", frozenset({"snapshot"}), share=0.5))
    quotas = store.tiering.unlocked.quotas
    limited = quotas._limited["d"]
    assert quotas.expect_fetch(key_of(1), "snapshot", 0.0)  # by a put
    written = write(*store.storage.reservations.reserve(expected(1)), 1)
    quotas.end_expected_fetch(key_of(1), is_here=False)
    store.storage.reservations.publish_blocks(written)
    assert (limited.used[MEMORY], list(limited.last_read)) == (span(SIZE), [key_of(1)])
    assert (limited.being_written, limited.expected) == ({}, {})


def test_a_block_that_came_and_went_before_its_room_is_entered_counts_for_its_dataset(store: OpenStore) -> None:
    store.set_limit(Quota("d", frozenset({"snapshot"}), share=0.5))
    limited = store.tiering.unlocked.quotas._limited["d"]
    written = write(*store.storage.reservations.reserve(expected(1)), 1)
    store.blocks.put_many([BlockToStore(key_of(1), data_of(1, SIZE), snapshot="snapshot")])
    store.evict([key_of(1)])
    assert limited.used[MEMORY] == 0
    store.storage.reservations.publish_blocks(written)
    assert (limited.used[MEMORY], list(limited.last_read)) == (span(SIZE), [key_of(1)])
    assert (limited.being_written, limited.expected) == ({}, {})


@pytest.mark.parametrize("failing", ["publish", "reserve"])
def test_a_failure_of_the_store_loses_no_room(failing: str, store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    store.set_limit(Quota("d", frozenset({"snapshot"}), share=0.5))
    limited = store.tiering.unlocked.quotas._limited["d"]
    written = write(*store.storage.reservations.reserve(expected(1)), 1)
    transfers = store.storage.reservations._transfers
    if failing == "publish":
        monkeypatch.setattr(transfers, "publish", fail)
    else:
        monkeypatch.setattr(transfers, "reserve", fail)
    with pytest.raises(RuntimeError):
        store.storage.reservations.publish_and_reserve(written, expected(2))
    entered = int(failing == "reserve")
    assert used(store) == entered * span(SIZE)
    assert (limited.used[MEMORY], len(limited.last_read)) == (entered * span(SIZE), entered)
    assert (limited.being_written, limited.expected) == ({}, {})
    assert all(not state.writers for state in store.storage._tiers[MEMORY]._segments.values())


def test_a_tier_that_cannot_make_a_segment_gives_no_room(store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: SegmentFile, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segment_writer, "create", fail)
    rooms, segments = store.storage.reservations.reserve(expected(1, 2))
    assert (rooms, segments) == ([None, None], [])
    assert store.usage()[MEMORY].used == 0
    monkeypatch.undo()
    rooms, segments = store.storage.reservations.reserve(expected(1, 2))
    assert all(room is not None for room in rooms)
    close_segments(segments)


def test_descriptors_are_closed_by_who_has_them(store: OpenStore) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        rooms, segments = store.storage.reservations.reserve(expected(1))
        close_segments(segments)
        store.storage.reservations.free_spaces([room for room in rooms if room is not None])
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_was_written_when_the_store_was_killed_is_found_at_the_next_start(root: Path) -> None:
    config = store_config(root, ssd=0)
    with opened(config) as store:
        rooms, segments = store.storage.reservations.reserve(expected(1, 2, 3))
        write(rooms[:2], segments, 1, 2)
    with opened(config) as store:
        found: list[BlockLocation | None] = [store.get(key_of(number)) for number in (1, 2, 3)]
        assert [place is None for place in found] == [False, False, True]
        assert used(store) == 2 * span(SIZE)
        for number, place in zip((1, 2), found, strict=False):
            assert place is not None
            assert store.read(key_of(number), place) == data_of(number, SIZE)
