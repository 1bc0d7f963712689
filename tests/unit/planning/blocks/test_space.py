"""Numbers of blocks against the keys and refs they stand for."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.block import block_count, block_key, block_length
from cachefs.errors import ConfigError, SnapshotDamaged
from cachefs.planning.blocks import space as module
from cachefs.planning.blocks.space import NO_BLOCK, BlockSpace, Samples, expand_runs
from cachefs.snapshot import SUFFIX, Snapshot
from cachefs.snapshot_builder import ListedObject, build_snapshot_file
from tests.simulated import space_of

BLOCK_SIZE = 1 << 20
SIZES = (0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 5 * BLOCK_SIZE, 3 * BLOCK_SIZE + 7)


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    objects = [
        ListedObject(b"%d/%d/file%d" % (number % 3, number % 5, number), size, 7, b"v%d" % size)
        for number, size in enumerate(SIZES * 5)
    ]
    return Snapshot(build_snapshot_file(objects, "s3://bucket", BLOCK_SIZE, lambda key: b"s3:" + key, tmp_path))


def test_every_block_of_a_snapshot_has_its_number(snapshot: Snapshot) -> None:
    space = BlockSpace.of(snapshot)
    number = 0
    for entry in (snapshot.entry(number) for number in range(1 + snapshot.directories + snapshot.files)):
        assert space.first_block[entry.number] == number
        for block in range(block_count(entry.size, BLOCK_SIZE)):
            key = block_key(entry.content, block)
            assert space.find(key) == number
            assert space.key(number) == key
            assert space.sizes[number] == block_length(entry.size, BLOCK_SIZE, block)
            assert [part.tolist() for part in space.refs(np.array([number]))] == [[entry.number], [block]]
            number += 1
    assert (space.count, space.bytes, space.snapshot) == (number, snapshot.bytes, snapshot.id)
    everything = space.keys(np.arange(space.count))
    assert space.ids(everything).tolist() == list(range(space.count))


def test_keys_of_others_have_no_number(snapshot: Snapshot) -> None:
    space = BlockSpace.of(snapshot)
    content = space.key(0)[:16]
    wrong = [b"\0" * 20, b"\xff" * 20, block_key(content, 1 << 31), content[:8] + b"\1" * 12]
    assert space.ids(wrong).tolist() == [NO_BLOCK] * 4
    assert [space.find(key) for key in wrong] == [NO_BLOCK] * 4
    assert space.ids([]).tolist() == []


def test_a_damaged_snapshot_has_no_space(snapshot: Snapshot, tmp_path: Path) -> None:
    (path,) = tmp_path.glob(f"*{SUFFIX}")
    content = snapshot.entry(snapshot.directories + 3).content
    damaged = path.read_bytes().replace(content, content[::-1])
    path.unlink()
    path.write_bytes(damaged)
    with pytest.raises(SnapshotDamaged):
        BlockSpace.of(Snapshot(path))


def test_contents_that_begin_alike_are_told_apart() -> None:
    contents = np.array([(7, 1), (7, 2), (0, 0), (7, 3)], [("high", "<u8"), ("low", "<u8")])
    space = BlockSpace("alike", 10, np.array([10, 25, 0, 5]), contents)
    keys = space.keys(np.arange(5))
    assert len(set(keys)) == 5
    assert space.ids(keys).tolist() == [space.find(key) for key in keys] == list(range(5))


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=10), st.data())
@settings(deadline=None)
def test_records_are_in_the_blocks_that_hold_their_bytes(sizes: list[int], data: st.DataObject) -> None:
    space = space_of(sizes, block_size=100)
    entries = data.draw(st.lists(st.integers(-1, len(sizes)), max_size=8))
    parts = [(data.draw(st.integers(0, 3500)), data.draw(st.integers(0, 1000))) for _ in entries]
    starts, ids = space.blocks_of(
        np.array(entries), np.array([offset for offset, _ in parts]), np.array([length for _, length in parts])
    )
    whole_starts, whole = space.blocks_of(np.array(entries))
    for index, (entry, (offset, length)) in enumerate(zip(entries, parts, strict=True)):
        size = sizes[entry] if 0 <= entry < len(sizes) else 0
        first = int(space.first_block[entry]) if size else 0
        last_block_ends = 100 * block_count(size, 100)
        expected = sorted({first + byte // 100 for byte in range(offset, min(offset + length, last_block_ends))})
        assert ids[starts[index] : starts[index + 1]].tolist() == expected
        blocks = list(range(first, first + block_count(size, 100)))
        assert whole[whole_starts[index] : whole_starts[index + 1]].tolist() == blocks


def test_counterparts_are_the_same_blocks_elsewhere() -> None:
    sizes = [100, 250, 0, 130]
    old, new = space_of(sizes, "old", 100), space_of([*sizes, 400, 30], "new", 100)
    common = old.counterparts(new)
    assert common is not None
    assert new.keys(common) == old.keys(np.arange(old.count))
    back = new.counterparts(old)
    assert back is not None
    assert back.tolist() == [*range(old.count), NO_BLOCK, NO_BLOCK, NO_BLOCK, NO_BLOCK, NO_BLOCK]
    assert old.counterparts(space_of(sizes, "other", 100, seed=1)) is None


def test_more_blocks_than_can_be_planned_are_refused_before_they_are_written_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="has 3,221,225,472 blocks"):
        space_of([3 << 60], block_size=1 << 30)
    space = space_of([BLOCK_SIZE * 5] * 3, block_size=BLOCK_SIZE)
    samples = Samples(space, *space.blocks_of(np.arange(3)))
    monkeypatch.setattr(module, "MAX_BLOCKS", 20)
    assert len(samples.reads_in_order(np.array([0, 1, 2, 0], np.uint32)).blocks) == 20
    with pytest.raises(ConfigError, match="are 25 blocks"):
        samples.reads_in_order(np.array([0, 1, 2, 0, 1], np.uint32))
    with pytest.raises(ConfigError, match="are 25 blocks"):
        space.blocks_of(np.array([0, 0, 0, 0, 0]))


def test_bytes_that_no_file_can_have_are_no_blocks() -> None:
    space = space_of([BLOCK_SIZE * 3] * 2, block_size=BLOCK_SIZE)
    far = np.array([0, 2**63, 2**64 - 1, BLOCK_SIZE, 0], np.uint64)
    long = np.array([2**64 - 1, 2**64 - 1, 1, 2**63, 1], np.uint64)
    starts, ids = space.blocks_of(np.array([1, 1, 1, 1, 1]), far, long)
    assert np.diff(starts).tolist() == [3, 0, 0, 2, 1]
    assert ids.tolist() == [3, 4, 5, 4, 5, 3]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=30), st.integers(1, 12))
def test_runs_are_written_part_by_part(given_runs: list[tuple[int, int]], at_once: int) -> None:
    first = np.array([start for start, _ in given_runs], np.int64)
    ends = np.cumsum([count for _, count in given_runs], dtype=np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_RUN_PART", at_once)
        found = expand_runs(first, ends, np.int32)
    assert found.dtype == np.int32
    assert found.tolist() == [number for start, count in given_runs for number in range(start, start + count)]
