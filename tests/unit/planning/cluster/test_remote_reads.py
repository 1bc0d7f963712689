"""What a node holds for others to read."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.cluster.copies import RemoteEpochReads

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
