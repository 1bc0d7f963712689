"""What does not fit on one node is held by another one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.cluster.copies import held_bytes, move_overflow
from cachefs.planning.cluster.homes import NO_NODE


def test_nothing_moves_where_all_fits() -> None:
    holders = np.array([0, 1, 1, NO_NODE], np.uint16)
    assert move_overflow(holders, np.array([1, 2]), np.ones(4, np.uint32)) is holders


def test_what_is_too_much_goes_where_there_is_room() -> None:
    holders = np.array([0, 0, 0, 0, 0, 1, 2], np.uint16)
    found = move_overflow(holders, np.array([2, 2, 3]), np.ones(7, np.uint32))
    assert found.tolist() == [0, 0, 2, 2, 1, 1, 2]
    assert holders.tolist() == [0, 0, 0, 0, 0, 1, 2]


def test_what_fits_nowhere_stays() -> None:
    holders = np.array([0, 0, 0, 1], np.uint16)
    assert move_overflow(holders, np.array([0, 2]), np.ones(4, np.uint32)).tolist() == [0, 0, 1, 1]


@given(st.integers(1, 6), st.integers(0, 300), st.integers(0, 99))
def test_with_room_for_all_each_node_holds_what_fits(nodes: int, blocks: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 100, blocks).astype(np.uint32)
    holders = draw.integers(0, nodes, blocks).astype(np.uint16)
    rooms = np.full(nodes, int(sizes.sum()) // nodes + 101)
    before, found = held_bytes(holders, sizes, nodes), move_overflow(holders, rooms, sizes)
    assert (held_bytes(found, sizes, nodes) <= rooms).all()
    moved = int(sizes[found != holders].sum())
    assert moved <= int(np.maximum(before - rooms, 0).sum()) + 100 * nodes, "and no more than has to"


@given(st.integers(1, 6), st.integers(0, 300), st.integers(0, 99), st.integers(50, 150))
def test_nothing_moves_a_second_time(nodes: int, blocks: int, seed: int, percent: int) -> None:
    """A node that starts gets holders from another one, and fits them to the same rooms again."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 100, blocks).astype(np.uint32)
    holders = draw.integers(0, nodes, blocks).astype(np.uint16)
    rooms = draw.multinomial(int(sizes.sum()) * percent // 100, [1 / nodes] * nodes).astype(np.int64)
    found = move_overflow(holders, rooms, sizes)
    assert (move_overflow(found, rooms, sizes) == found).all()
