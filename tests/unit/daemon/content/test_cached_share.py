"""How much of a dataset is here is told from a sample of its blocks, whatever its shape."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cachefs.block import MEMORY, SSD, BlockLocation, block_count, block_key, block_length
from cachefs.snapshot import Snapshot
from cachefs.snapshot_builder import ListedObject, build_snapshot_file
from cachefs_daemon.content.cached_share import SAMPLED_BLOCKS, cached_share
from cachefs_daemon.store.index_writer import IndexWriter

BLOCK = 1 << 20


@pytest.fixture
def index(root: Path) -> Iterator[IndexWriter]:
    with closing(IndexWriter(root / "index")) as made:
        yield made


def snapshot_of(directory: Path, sizes: list[int]) -> Snapshot:
    objects = [ListedObject(b"d%d/%06d" % (at % 7, at), size, at, b"v") for at, size in enumerate(sizes)]
    return Snapshot(build_snapshot_file(objects, "s3://bucket/data", BLOCK, lambda key: b"s3:" + key, directory))


def keep(index: IndexWriter, snapshot: Snapshot, tier_of: Callable[[int], int | None]) -> dict[int, int]:
    """Put the blocks for whose number among all there is a tier into the index. Returns the bytes in each tier."""
    total = {MEMORY: 0, SSD: 0}
    at = 0
    for _, size, content in snapshot.contents():
        for number in range(block_count(size, BLOCK)):
            length = block_length(size, BLOCK, number)
            if (tier := tier_of(at)) is not None:
                index.put(block_key(content, number), BlockLocation(tier, 0, 0, length, bytes(8)))
                total[tier] += length
            at += 1
    return total


def test_of_few_blocks_all_are_looked_at(root: Path, index: IndexWriter) -> None:
    with closing(snapshot_of(root, [1000 * at for at in range(100)])) as snapshot:
        total = keep(index, snapshot, lambda at: (MEMORY, SSD, None)[at % 3])
        found = cached_share(index, snapshot, "images")
        assert (found.memory, found.ssd, found.is_estimate) == (total[MEMORY], total[SSD], False)
        assert found.bytes == snapshot.bytes


@pytest.mark.parametrize(
    "sizes", [[1000] * 5000, [300 * BLOCK + 5] * 20, [100 * BLOCK, 2 * BLOCK] * 40], ids=["files", "shards", "both"]
)
@pytest.mark.parametrize(
    "tier_of",
    [lambda at: MEMORY if at % 8 == 0 else None, lambda at: SSD if at < 1500 else None, lambda at: MEMORY],
    ids=["one in eight", "the first", "all"],
)
def test_of_many_it_is_about_right(
    root: Path, index: IndexWriter, sizes: list[int], tier_of: Callable[[int], int | None]
) -> None:
    with closing(snapshot_of(root, sizes)) as snapshot:
        total = keep(index, snapshot, tier_of)
        found = cached_share(index, snapshot, "images")
        assert found.is_estimate
        assert found.memory == pytest.approx(total[MEMORY], abs=0.07 * snapshot.bytes)
        assert found.ssd == pytest.approx(total[SSD], abs=0.07 * snapshot.bytes)
        assert cached_share(index, snapshot, "images") == found  # it changes with the cache only


def test_the_work_is_bounded(root: Path, index: IndexWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(index, "get_many", lambda keys: asked.append(len(keys)) or [None] * len(keys))
    for sizes in ([1] * 3000, [3000 * BLOCK], [200 * BLOCK] * 500, []):
        with closing(snapshot_of(root, sizes)) as snapshot:
            cached_share(index, snapshot, "images")
    assert all(count <= SAMPLED_BLOCKS for count in asked)
    assert asked[:2] == [pytest.approx(SAMPLED_BLOCKS, abs=10)] * 2
    assert asked[3] == 0
