"""Who holds what from epoch to epoch, beside a model that goes block by block, and the shares that theory gives."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.cluster.copies import (
    WINDOWS,
    FirstReads,
    capacity_by_node,
    held_bytes,
    holders_after_change,
    next_holders,
)
from cachefs.planning.cluster.homes import NO_NODE, BlockHomes
from cachefs.planning.cluster.rendezvous import RingMember, mix_bits

SIZE = 100


def ranks(draw: np.random.Generator, blocks: int, nodes: int) -> FirstReads:
    """An epoch of a sampler that deals a shuffled dataset out to one rank per node."""
    order = draw.permutation(blocks).astype(np.int32)
    return FirstReads.of(blocks, [(rank, order[rank::nodes]) for rank in range(nodes)])


# --- the model --------------------------------------------------------------------------------------------------------


def modelled(
    holders: Sequence[int], epochs: Sequence[FirstReads], room: Sequence[int], sizes: Sequence[int], nodes: int
) -> list[int]:
    """The rule, one block after the other; nodes deny one move at a time, whoever comes first."""
    found = list(holders)
    used = [sum(size for size, who in zip(sizes, holders, strict=True) if who == node) for node in range(nodes)]
    now = epochs[0]
    assert now.positions is not None
    by_window: dict[int, dict[int, list[tuple[float, int]]]] = {}
    for block, (source, target) in enumerate(zip(holders, now.reader.tolist(), strict=True)):
        if target in (source, NO_NODE):
            continue
        for ahead, epoch in enumerate(epochs[1:]):
            assert epoch.positions is not None
            reader = int(epoch.reader[block])
            if reader == source:
                break
            if reader == target:
                window = int(now.positions[block] * np.float32(WINDOWS))
                when = float(np.float32(ahead) + epoch.positions[block])
                by_window.setdefault(window, {}).setdefault(target, []).append((when, block))
                break
    for window in sorted(by_window):
        moves = by_window[window]
        for wanted in moves.values():
            wanted.sort()
        while True:
            for target, wanted in moves.items():
                taken = sum(sizes[block] for _, block in wanted)
                given = sum(sizes[b] for other in moves.values() for _, b in other if found[b] == target)
                if wanted and used[target] + taken - given > room[target]:
                    wanted.pop()
                    break
            else:
                break
        for target, wanted in moves.items():
            for _, block in wanted:
                if found[block] != NO_NODE:
                    used[found[block]] -= sizes[block]
                used[target] += sizes[block]
                found[block] = target
    return found


@st.composite
def clusters(draw: st.DrawFn) -> tuple[int, list[int], list[FirstReads], list[int], list[int]]:
    nodes = draw(st.integers(1, 5))
    blocks = draw(st.integers(0, 40))
    somebody = st.one_of(st.integers(0, nodes - 1), st.just(NO_NODE))
    # Few different places, so that windows have many reads, and some are at the same moment.
    places = st.sampled_from([0.0, 0.004, 0.005, 0.5, 0.505, 0.75, 0.999])

    def epoch() -> FirstReads:
        reader = draw(st.lists(somebody, min_size=blocks, max_size=blocks))
        when = draw(st.lists(places, min_size=blocks, max_size=blocks))
        return FirstReads(np.array(reader, np.uint16), np.array(when, np.float32))

    epochs = [epoch() for _ in range(draw(st.integers(1, 4)))]
    holders = draw(st.lists(somebody, min_size=blocks, max_size=blocks))
    sizes = draw(st.lists(st.integers(1, 9), min_size=blocks, max_size=blocks))
    room = draw(st.lists(st.integers(0, 80), min_size=nodes, max_size=nodes))
    return nodes, holders, epochs, room, sizes


@given(clusters())
def test_holders_are_those_of_the_model(given_: tuple[int, list[int], list[FirstReads], list[int], list[int]]) -> None:
    nodes, holders, epochs, room, sizes = given_
    before = np.array(holders, np.uint16)
    found = next_holders(before, epochs, np.array(room, np.int64), np.array(sizes, np.uint32))
    assert found.tolist() == modelled(holders, epochs, room, sizes, nodes)
    used = held_bytes(before, np.array(sizes, np.uint32), nodes)
    now = held_bytes(found, np.array(sizes, np.uint32), nodes)
    assert (now <= np.maximum(room, used)).all(), "nobody goes above its room, or further above it"
    unread = epochs[0].reader == NO_NODE
    assert (found[unread] == before[unread]).all(), "what is not read stays where it is"


# --- theory -----------------------------------------------------------------------------------------------------------


def local_shares(
    blocks: int, nodes: int, known: int, epochs: int, room: float = 1.01, parts: npt.NDArray[np.float64] | None = None
) -> list[float]:
    """The share of reads of each epoch that are of blocks which their readers hold. known: epochs ahead; room: of all
    nodes together, in datasets."""
    draw = np.random.default_rng(1)
    parts = np.full(nodes, 1 / nodes) if parts is None else parts
    sizes = np.full(blocks, SIZE, np.uint32)
    ahead = [ranks(draw, blocks, nodes) for _ in range(known + 1)]
    holders = draw.choice(nodes, blocks, p=parts).astype(np.uint16)
    found = []
    for _ in range(epochs):
        found.append(float((holders == ahead[0].reader).mean()))
        holders = next_holders(holders, ahead, (parts * room * blocks * SIZE).astype(np.int64), sizes)
        ahead = [*ahead[1:], ranks(draw, blocks, nodes)]
    return found


@pytest.mark.parametrize(
    ("nodes", "known", "share"),
    [(2, 1, 2 / 3), (4, 1, 0.400), (4, 2, 0.445), (4, 4, 0.451), (8, 2, 0.276), (8, 8, 0.309)],
)
def test_the_share_of_local_reads_is_what_theory_says(nodes: int, known: int, share: float) -> None:
    found = local_shares(40_000, nodes, known, 14)
    assert found[0] == pytest.approx(1 / nodes, abs=0.01)
    assert float(np.mean(found[6:])) == pytest.approx(share, abs=0.012)


def test_full_caches_do_not_deny_every_move() -> None:
    """They would, were each move asked for room alone: then the share stays at 1/4."""
    assert float(np.mean(local_shares(40_000, 4, 4, 12, room=1.0)[5:])) > 0.42


def test_nodes_of_different_sizes_gain_too() -> None:
    parts = np.array([0.5] * 4 + [1.5] * 4) / 8
    assert float(np.mean(local_shares(40_000, 8, 8, 12, parts=parts)[5:])) == pytest.approx(0.272, abs=0.012)


def test_where_only_half_has_room_holders_are_who_would_keep_it() -> None:
    """The moves are those of a cluster that has room for all: each node is given in proportion to what it has."""
    blocks, nodes = 40_000, 4
    sizes = np.full(blocks, SIZE, np.uint32)
    capacities = np.array([1, 1, 2, 4]) * blocks * SIZE // 16
    room = capacity_by_node(capacities, sizes)
    assert room / room.sum() == pytest.approx(capacities / capacities.sum())
    assert room.sum() == pytest.approx(1.01 * blocks * SIZE, rel=1e-6)
    assert float(np.mean(local_shares(blocks, nodes, 4, 12, room=room.sum() / (blocks * SIZE))[5:])) > 0.44


def test_some_room_is_left_for_what_is_on_its_way() -> None:
    sizes = np.full(40_000, SIZE, np.uint32)
    total = int(sizes.sum())
    plenty = capacity_by_node(np.full(4, total // 2), sizes)
    assert (plenty == total // 2 - 200 * SIZE).all(), "2 sqrt(40,000 / 4) blocks"
    tight = capacity_by_node(np.full(4, total * 102 // 400), sizes)
    assert total < tight.sum() < total * 1.02, "none of it is free in the end, but moves find room"
    assert (capacity_by_node(np.zeros(4, np.int64), sizes) == 0).all()
    assert (capacity_by_node(np.full(2, 1000), sizes[:0]) == 1000).all()
    with_empty_node = capacity_by_node(np.array([total, 0]), sizes)
    assert with_empty_node[1] == 0
    assert with_empty_node[0] >= total - 400 * SIZE


def test_what_nobody_knows_stays_where_it_is() -> None:
    draw = np.random.default_rng(3)
    epoch, holders = ranks(draw, 1000, 4), np.random.default_rng(4).integers(0, 4, 1000).astype(np.uint16)
    room, sizes = np.full(4, 1 << 40), np.full(1000, SIZE, np.uint32)
    assert (next_holders(holders, [epoch], room, sizes) == holders).all()
    nobody = FirstReads(np.full(1000, NO_NODE, np.uint16), np.full(1000, 2, np.float32))
    assert (next_holders(holders, [nobody, epoch], room, sizes) == holders).all()
    with pytest.raises(ValueError, match="not known"):
        next_holders(holders, [epoch.without_positions()], room, sizes)


def test_epochs_far_ahead_do_without_places() -> None:
    draw = np.random.default_rng(5)
    epochs = [ranks(draw, 2000, 4) for _ in range(4)]
    holders = draw.integers(0, 4, 2000).astype(np.uint16)
    room, sizes = np.full(4, 1 << 40), np.full(2000, SIZE, np.uint32)
    light = [epochs[0], *(one.without_positions() for one in epochs[1:])]
    assert (next_holders(holders, light, room, sizes) == next_holders(holders, epochs, room, sizes)).all()


# --- reads ------------------------------------------------------------------------------------------------------------


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


# --- members come and go in the middle of a job -----------------------------------------------------------------------


def members(*names: str) -> list[RingMember]:
    return [RingMember(name, sum(map(ord, name)) * 0x9E3779B97F4A7C15 % (1 << 64), 1.0) for name in sorted(names)]


def test_what_a_leaver_held_goes_to_its_new_home_and_nothing_else_moves() -> None:
    blocks = 20_000
    homes = BlockHomes(mix_bits(np.arange(blocks, dtype=np.uint64)))
    names = ["a", "b", "c", "d"]
    homes.set_members(members(*names))
    holders = np.random.default_rng(0).integers(0, 4, blocks).astype(np.uint16)
    left = ["a", "c", "d"]
    homes.set_members(members(*left))
    found = holders_after_change(holders, names, left, homes.first)
    stays = holders != 1
    assert (np.array(left)[found[stays]] == np.array(names)[holders[stays]]).all()
    assert (found[~stays] == homes.first[~stays]).all()


def test_who_joins_takes_its_part_and_nothing_else_moves() -> None:
    blocks = 20_000
    homes = BlockHomes(mix_bits(np.arange(blocks, dtype=np.uint64)))
    names, more = ["a", "c", "d"], ["a", "b", "c", "d"]
    homes.set_members(members(*names))
    old = homes.first
    holders = np.random.default_rng(0).integers(0, 3, blocks).astype(np.uint16)
    homes.set_members(members(*more))
    found = holders_after_change(holders, names, more, homes.first, old)
    joined = homes.first == 1
    assert (found[joined] == 1).all()
    assert joined.sum() == pytest.approx(blocks / 4, abs=4 * math.sqrt(blocks / 4))
    assert (np.array(more)[found[~joined]] == np.array(names)[holders[~joined]]).all()
    assert (holders_after_change(holders, names, more, homes.first) != 1).all(), (
        "where it is to get its part by reading"
    )


def test_a_cluster_that_grows_and_shrinks_in_the_middle_of_a_job_keeps_its_shares() -> None:
    """Twelve epochs, a change of members before each second one. What all know is the same; each step is within its
    rooms, or goes back there."""
    blocks, draw = 20_000, np.random.default_rng(7)
    sizes = np.full(blocks, SIZE, np.uint32)
    homes = BlockHomes(mix_bits(np.arange(blocks, dtype=np.uint64)))
    names = ["a", "b", "c", "d"]
    homes.set_members(members(*names))
    holders, readers = homes.first, 4
    changes = {2: ["a", "b", "c", "d", "e"], 4: ["a", "b", "d", "e"], 6: ["a", "d", "e", "f"], 8: ["a", "d"], 10: names}
    for epoch in range(12):
        if epoch in changes:
            old_names, old_homes, old = names, homes.first, holders
            names = changes[epoch]
            homes.set_members(members(*names))
            holders = holders_after_change(holders, old_names, names, homes.first, old_homes)
            same = np.array(names)[holders] == np.array(old_names)[old]
            came, gone = set(names) - set(old_names), set(old_names) - set(names)
            for block in np.flatnonzero(~same).tolist():
                assert old_names[old[block]] in gone or names[holders[block]] in came
            readers = len(names)
        ahead = [ranks(draw, blocks, readers) for _ in range(4)]
        room = capacity_by_node(np.full(len(names), blocks * SIZE * 108 // (100 * len(names))), sizes)
        holders = next_holders(holders, ahead, room, sizes)
        if epoch % 2:
            shares = held_bytes(holders, sizes, len(names)) / (blocks * SIZE / len(names))
            assert ((shares > 0.9) & (shares < 1.1)).all()
