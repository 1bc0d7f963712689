"""Where second copies are, as copies change hands."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.cluster.copies import (
    AWAY_SECONDS,
    holders_after_change,
    is_hot,
    missing_second_copies,
    second_copy_room,
    second_keepers,
)
from cachefs.planning.cluster.homes import NO_NODE, BlockHomes
from cachefs.planning.cluster.rendezvous import RingMember, mix_bits

BLOCKS = 500
HASHES = mix_bits(np.arange(1, BLOCKS + 1, dtype=np.uint64))


def members(zones: Sequence[str]) -> list[RingMember]:
    return [RingMember(f"{number:02}", 977 * number + 1, 1.0, zone) for number, zone in enumerate(zones)]


@given(st.lists(st.sampled_from(["", "x", "y", "z"]), min_size=2, max_size=9), st.integers(0, 1 << 30))
def test_wherever_a_block_is_held_its_second_copy_is_on_another_node_and_in_another_zone(
    zones: list[str], seed: int
) -> None:
    homes = BlockHomes(HASHES, 2)
    homes.set_members(members(zones))
    holders = np.random.default_rng(seed).integers(0, len(zones), BLOCKS).astype(np.uint16)
    keepers = second_keepers(holders, homes.first, homes.second, homes.zones)
    assert (keepers != NO_NODE).all()
    assert (keepers != holders).all()
    if len(set(zones)) > 1:
        named = [zone or f"none {number}" for number, zone in enumerate(zones)]
        assert all(named[one] != named[other] for one, other in zip(holders, keepers, strict=True))
    # While blocks are at home, it is with the second home.
    assert (second_keepers(homes.first, homes.first, homes.second, homes.zones) == homes.second).all()


def test_with_one_copy_or_one_node_there_is_no_second_one() -> None:
    for zones, replicas in ((["x", "y"], 1), (["x"], 2)):
        homes = BlockHomes(HASHES, replicas)
        homes.set_members(members(zones))
        assert (second_keepers(homes.first, homes.first, homes.second, homes.zones) == NO_NODE).all()


def test_what_a_lost_node_held_is_held_by_who_has_the_second_copy() -> None:
    everybody = members(["x", "x", "y", "y"])
    homes = BlockHomes(HASHES, 2)
    homes.set_members(everybody)
    ids = [one.id for one in everybody]
    holders = np.random.default_rng(1).integers(0, 4, BLOCKS).astype(np.uint16)
    second = second_keepers(holders, homes.first, homes.second, homes.zones)
    homes.set_members(everybody[1:])
    found = holders_after_change(holders, ids, ids[1:], homes.first, second=second)
    names = np.array([*ids[1:], "nobody"])
    kept = np.where(holders == 0, second, holders)
    assert names[found].tolist() == np.array(ids)[kept].tolist()


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=30))
def test_a_snapshot_is_hot_while_half_of_its_blocks_are_read_in_an_hour_and_does_not_flap(
    parts: list[float | None],
) -> None:
    hot = False
    for part in parts:
        before, hot = hot, is_hot(None if part is None else part / AWAY_SECONDS, hot)
        if part is None or 0.26 < part < 0.49:
            assert hot == before
        elif not 0.24 < part < 0.51:
            assert hot == (part > 0.5)


@given(st.integers(0, 1 << 30), st.integers(0, 60_000))
def test_second_copies_take_no_more_than_the_room_that_blocks_to_keep_and_reads_leave(seed: int, capacity: int) -> None:
    chances = np.random.default_rng(seed)
    sizes = chances.integers(1, 1000, 100).astype(np.uint32)
    owned, second, present, soon = chances.random((4, 100)) < 0.4
    second &= ~owned
    free = capacity - int(sizes[present].sum())
    room = free + second_copy_room(owned, second, present, soon, sizes)
    found = missing_second_copies(second, present, sizes, room)
    assert second[found].all()
    assert not present[found].any()
    if len(found):
        to_keep = owned | (present & (second | (soon & ~owned)))
        to_keep[found] = True
        assert sizes[to_keep].sum() <= capacity
