"""The reads of whole epochs: which node reads each block first, and what a node holds for others to read."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.cluster.epoch_reads import FirstReads, RemoteEpochReads, ScheduledReads
from cachefs.planning.cluster.homes import NO_NODE

HOLDERS = np.array([1, 0, 1, 1, 0, 1, 0, 0], np.uint16)


def order(*blocks: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(blocks, np.int32)


def test_what_others_read_of_mine_comes_in_their_order() -> None:
    orders = [(0, order(0, 1, 2, 3)), (1, order(7, 6))]
    one = RemoteEpochReads.of(orders, HOLDERS == 1, 1)
    assert one.blocks.tolist() == [0, 2, 3]
    assert one.positions.tolist() == [0.0, 0.5, 0.75]
    assert one.readers.tolist() == [0, 0, 0]
    zero = RemoteEpochReads.of(orders, HOLDERS == 0, 0)
    assert zero.blocks.tolist() == [7, 6], "4 is read by nobody, 1 by this node itself"
    assert [zero.reads_before(place) for place in (0.0, 0.1, 0.5, 0.6)] == [0, 1, 1, 2]


def test_a_block_that_is_read_again_is_there_again() -> None:
    orders = [(2, order(4, 4, 1)), (0, order(1, 2)), (1, order(4))]
    duty = RemoteEpochReads.of(orders, HOLDERS == 0, 0)
    assert list(zip(duty.blocks.tolist(), duty.readers.tolist(), strict=True)) == [(4, 1), (4, 2), (4, 2), (1, 2)]


def test_nobody_reads() -> None:
    assert (
        len(RemoteEpochReads.of([], HOLDERS == 0, 0).blocks)
        == len(RemoteEpochReads.of([(1, order())], HOLDERS == 0, 0).blocks)
        == 0
    )


@given(st.integers(1, 6), st.integers(0, 200), st.integers(0, 9))
def test_each_read_is_local_or_one_nodes_duty(nodes: int, blocks: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    permutation = draw.permutation(blocks).astype(np.int32)
    orders = [(node, permutation[node::nodes]) for node in range(nodes)]
    holders = draw.integers(0, nodes, blocks).astype(np.uint16)
    duties = [RemoteEpochReads.of(orders, holders == node, node).blocks for node in range(nodes)]
    local = [own[holders[own] == node] for node, own in orders]
    assert np.sort(np.concatenate([*local, *duties])).tolist() == list(range(blocks))
    assert all(
        (np.diff(RemoteEpochReads.of(orders, holders == node, node).positions) >= 0).all() for node in range(nodes)
    )


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 9), max_size=12)), max_size=4))
def test_the_first_read_counts(orders: list[tuple[int, list[int]]]) -> None:
    reads = FirstReads.of(10, [(node, np.array(order, np.int32)) for node, order in orders])
    assert reads.positions is not None
    first: dict[int, tuple[Any, int]] = {}
    for node, order in orders:
        for place, block in enumerate(order):
            at = (np.float32(place) / np.float32(len(order)), node)
            first[block] = min(first.get(block, at), at)
    for block in range(10):
        assert (reads.positions[block], reads.reader[block]) == first.get(block, (2, NO_NODE))


def test_reads_of_what_is_not_there_are_refused() -> None:
    for node, block in ((0, 10), (0, -1), (NO_NODE, 1)):
        with pytest.raises(ValueError, match="beyond the 10"):
            FirstReads.of(10, [(node, np.array([block], np.int32))])


def test_reads_are_timed_by_the_leader_s_clock() -> None:
    reads = FirstReads.of(4, [(0, order(0, 1)), (1, order(2, 3))])
    assert ScheduledReads(reads, -0.5, 3.0).times(slice(None)).tolist() == [-0.5, 1.0, -0.5, 1.0]
    far = ScheduledReads(reads.without_positions(), 2.0, 1.0)
    assert far.times(np.array([1, 3])).tolist() == [2.0, 2.0]
