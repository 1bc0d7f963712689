import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.blocks.presence import SHARDS, WHOLE, ShardBytes
from cachefs.planning.blocks.space import BlockSpace


def space(files: int, size: int = 1000, block: int = 1000) -> BlockSpace:
    contents = np.zeros(files + 1, [("high", "<u8"), ("low", "<u8")])
    contents["high"] = contents["low"] = np.arange(files + 1)
    sizes = np.full(files + 1, size, np.int64)
    sizes[0] = 0
    return BlockSpace("s", block, sizes, contents)


@pytest.mark.parametrize("files", [1, 100, 256, 1000])
def test_all_of_it_is_whole_and_nothing_is_empty(files: int) -> None:
    counted = ShardBytes(space(files))
    keys = counted.space.keys(np.arange(files))
    assert counted.is_empty
    assert not counted.shard_parts().any()
    assert counted.apply_changes(keys, np.full(files, 1, np.uint8))
    assert (counted.shard_parts() == WHOLE).all()
    assert (counted.shard_parts_in(1) == WHOLE).all()
    assert not counted.shard_parts_in(2).any()
    assert counted.bytes.sum(axis=1).tolist() == [0, 1000 * files, 0]
    assert not counted.apply_changes(keys, np.full(files, 1, np.uint8))
    assert counted.apply_changes(keys, np.zeros(files, np.uint8))
    assert counted.is_empty


@given(st.lists(st.lists(st.tuples(st.integers(0, 699), st.integers(0, 2)), max_size=20), max_size=20))
def test_changes_add_up_to_what_is_there(changes: list[list[tuple[int, int]]]) -> None:
    whole = space(350, 1500)  # two blocks each: 1,000 and 500 bytes
    counted, states = ShardBytes(whole), {}
    for step in changes:
        latest = dict(step)
        states |= latest
        keys = whole.keys(np.array(list(latest), np.int64)) if latest else []
        counted.apply_changes([*keys, b"x" * 20], np.array([*latest.values(), 1], np.uint8))
    expected = np.zeros((3, SHARDS), np.int64)
    for number, state in states.items():
        expected[state, number * SHARDS // 700] += whole.sizes[number]
    assert (counted.bytes[1:] == expected[1:]).all()
