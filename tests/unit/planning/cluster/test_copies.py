"""How much nodes may hold, and who holds what as members come and go in the middle of a job."""

import math

import numpy as np
import pytest

from cachefs.planning.cluster.copies import capacity_by_node, held_bytes, holders_after_change
from cachefs.planning.cluster.epoch_reads import FirstReads, ScheduledReads
from cachefs.planning.cluster.homes import BlockHomes
from cachefs.planning.cluster.moves import next_holders
from cachefs.planning.cluster.rendezvous import RingMember, mix_bits

SIZE = 100


def scheduled(draw: np.random.Generator, blocks: int, nodes: int, known: int) -> list[ScheduledReads]:
    """Epochs of a sampler that deals a shuffled dataset out to one rank per node."""
    orders = [draw.permutation(blocks).astype(np.int32) for _ in range(known)]
    return [
        ScheduledReads(FirstReads.of(blocks, [(rank, order[rank::nodes]) for rank in range(nodes)]), float(number), 1.0)
        for number, order in enumerate(orders)
    ]


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
        ahead = scheduled(draw, blocks, readers, 4)
        room = capacity_by_node(np.full(len(names), blocks * SIZE * 108 // (100 * len(names))), sizes)
        holders = next_holders(holders, ahead, room, sizes).following
        if epoch % 2:
            shares = held_bytes(holders, sizes, len(names)) / (blocks * SIZE / len(names))
            assert ((shares > 0.9) & (shares < 1.1)).all()
