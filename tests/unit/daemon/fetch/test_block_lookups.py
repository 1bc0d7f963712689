"""Look-ups are done at once, on the event loop, and only where that waits for nothing."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cachefs.block import BlockLocation
from cachefs.errors import NotFound
from cachefs.messages import BlockRef
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch import fetcher
from cachefs_daemon.fetch.fetcher import BlockLookups
from cachefs_daemon.origin.base import ObjectRange
from tests.blockstore import OpenStore, data_of, key_of, store_config


class Disk:
    """A clock, and a disk whose reads take a while."""

    now = 0.0
    takes = 0.0
    reads = 0
    is_read = True

    def resolve(self, ref: BlockRef) -> BlockSource:
        self.now += self.takes
        self.reads += self.is_read
        if ref.entry == 0:
            raise NotFound("no entry 0")
        return BlockSource(key_of(ref.entry), None, ObjectRange(b"name", b"v1", 9, 0, 9))  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[OpenStore]:
    opened = OpenStore(store_config(tmp_path))
    yield opened
    opened.close()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(fetcher, "count_disk_waits", lambda: disk.reads)
    monkeypatch.setattr(fetcher, "time", SimpleNamespace(monotonic=lambda: disk.now))
    return disk


def ref(entry: int, bad: bytes = b"", *, slow: bool = False) -> BlockRef:
    return BlockRef("snapshot", entry, 0, bad, is_tier_slow=slow)


def test_a_block_is_found_where_it_is_and_else_at_its_origin(store: OpenStore, disk: Disk) -> None:
    ours = BlockLookups(store.blocks, disk.resolve)
    place = store.put(key_of(1), data_of(1))
    assert ours.look_up_now(ref(1)) == place
    assert isinstance(ours.look_up_now(ref(2)), BlockSource)
    assert isinstance(ours.look_up_now(ref(0)), NotFound)
    assert ours.look_up([ref(1), ref(2), ref(0)])[0] == place


def test_complaints_are_for_threads_and_a_busy_index_is_not_waited_for(store: OpenStore, disk: Disk) -> None:
    ours = BlockLookups(store.blocks, disk.resolve)
    place = store.put(key_of(1), data_of(1))
    assert isinstance(place, BlockLocation)
    assert ours.look_up_now(ref(1, place.pack())) is None
    with store.index._lock:
        assert ours.look_up_now(ref(1)) == place


def test_where_a_disk_hangs_threads_look_up(store: OpenStore, disk: Disk) -> None:
    ours = BlockLookups(store.blocks, disk.resolve)
    place = store.put(key_of(1), data_of(1))
    assert isinstance(place, BlockLocation)
    assert ours.look_up_now(ref(1, place.pack(), slow=True)) is None
    assert ours.look_up_now(ref(1)) is None
    disk.now += fetcher.THREADS_SECONDS
    assert ours.look_up_now(ref(1)) == place


def test_after_a_look_up_that_a_disk_made_slow_threads_look_up_for_a_while(store: OpenStore, disk: Disk) -> None:
    ours = BlockLookups(store.blocks, disk.resolve)
    disk.takes = fetcher.MAX_LOOKUP_SECONDS * 2
    disk.is_read = False  # the processor was not to be had
    for _ in range(2):
        assert isinstance(ours.look_up_now(ref(1)), BlockSource)
    disk.is_read = True
    assert isinstance(ours.look_up_now(ref(1)), BlockSource)
    disk.takes = 0.0
    assert ours.look_up_now(ref(1)) is None
    disk.now += fetcher.THREADS_SECONDS
    assert isinstance(ours.look_up_now(ref(1)), BlockSource)


def test_sources_of_many_blocks_are_told_at_once_as_far_as_no_disk_is_waited_for(store: OpenStore, disk: Disk) -> None:
    ours = BlockLookups(store.blocks, disk.resolve)
    refs = [ref(entry) for entry in range(6)]
    disk.is_read = False
    found = ours.find_sources_now(refs)
    assert isinstance(found[0], NotFound)
    assert [one.key for one in found[1:] if isinstance(one, BlockSource)] == [key_of(entry) for entry in range(1, 6)]
    disk.takes = fetcher.MAX_LOOKUP_SECONDS * 0.6  # the processor was not to be had
    assert len(ours.find_sources_now(refs)) == 2
    disk.is_read = True
    assert len(ours.find_sources_now(refs)) == 2
    assert ours.find_sources_now(refs) == []
    assert len(ours.find_sources(refs)) == 6
    disk.now += fetcher.THREADS_SECONDS
    assert len(ours.find_sources_now(refs)) == 2
