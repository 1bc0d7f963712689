"""Homes, beside a model that asks every member for every block."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from cachefs.planning.cluster.homes import NO_NODE, BlockHomes, reindex_nodes
from cachefs.planning.cluster.rendezvous import RingMember, mix_bits, scores

BLOCKS = 20_000
HASHES = mix_bits(np.arange(1, BLOCKS + 1, dtype=np.uint64))
FEW = HASHES[:60]


def member(name: str, weight: float = 1.0, zone: str = "") -> RingMember:
    return RingMember(name, xxh3_64_intdigest(name.encode()), weight, zone)


def expected(members: list[RingMember], hashes: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> list[tuple[str, str]]:
    """(home, second) of each block, by asking all."""
    table = {one.id: scores(hashes, one) for one in members}
    found = []
    for block in range(len(hashes)):
        order = sorted(members, key=lambda one: (-table[one.id][block], one.id))
        first = order[0] if order else None
        apart = [one for one in order[1:] if first is not None and (one.zone != first.zone or not one.zone)]
        if first is not None and len({one.zone for one in members}) == 1:
            apart = order[1:]
        found.append((first.id if first else "", apart[0].id if apart else ""))
    return found


def as_named(homes: BlockHomes) -> list[tuple[str, str]]:
    names = {number: one.id for number, one in enumerate(homes.members)} | {NO_NODE: ""}
    return [(names[a], names[b]) for a, b in zip(homes.first.tolist(), homes.second.tolist(), strict=True)]


MEMBERS = st.lists(
    st.builds(
        member,
        st.sampled_from([f"node-{number}" for number in range(9)]),
        st.sampled_from([0.5, 1.0, 1.0, 1.0, 2.5]),
        st.sampled_from(["", "east", "west", "north"]),
    ),
    max_size=7,
    unique_by=lambda one: one.id,
)


@given(st.lists(MEMBERS, min_size=1, max_size=5))
def test_homes_are_those_of_the_model_however_members_came_and_went(history: list[list[RingMember]]) -> None:
    homes = BlockHomes(FEW, replicas=2)
    before = as_named(homes)
    for members in history:
        changed = homes.set_members(members)
        assert list(homes.members) == sorted(members, key=lambda one: one.id)
        now = as_named(homes)
        assert now == expected(members, FEW)
        moved = [block for block, (old, new) in enumerate(zip(before, now, strict=True)) if old[0] != new[0]]
        assert moved == changed.tolist(), "what has another home is told"
        before = now


@given(MEMBERS, MEMBERS)
def test_without_seconds_the_homes_are_the_same(one: list[RingMember], two: list[RingMember]) -> None:
    homes = BlockHomes(FEW)
    homes.set_members(one)
    homes.set_members(two)
    assert [first for first, _ in as_named(homes)] == [first for first, _ in expected(two, FEW)]
    assert (homes.second == NO_NODE).all()


def test_a_block_goes_to_who_joins_or_comes_from_who_leaves_and_no_other_moves() -> None:
    members = [member(f"node-{number}") for number in range(8)]
    homes = BlockHomes(HASHES)
    homes.set_members(members)
    before = homes.first
    joined = member("node-35")  # in the middle of the list, so that all behind it have other numbers
    changed = homes.set_members([*members, joined])
    place = [one.id for one in homes.members].index("node-35")
    assert (np.flatnonzero(homes.first == place) == changed).all()
    assert len(changed) == pytest.approx(BLOCKS / 9, abs=4 * math.sqrt(BLOCKS / 9))
    back = homes.set_members(members)
    assert (back == changed).all()
    assert (homes.first == before).all()
    left = homes.set_members([one for one in members if one.id != "node-3"])
    assert (left == np.flatnonzero(before == 3)).all()


def test_shares_are_in_proportion_to_weights() -> None:
    weights = {"a": 0.5, "b": 1.0, "c": 1.0, "d": 2.0, "e": 3.5}
    homes = BlockHomes(HASHES)
    homes.set_members([member(name, weight) for name, weight in weights.items()])
    counts = np.bincount(homes.first, minlength=5)
    for count, weight in zip(counts.tolist(), weights.values(), strict=True):
        ideal = BLOCKS * weight / 8
        assert count == pytest.approx(ideal, abs=4 * math.sqrt(ideal))


def test_a_long_history_of_joins_and_leaves_moves_the_least_possible() -> None:
    """Each step moves the share of who comes or goes, and the end is as if everybody had come at once."""
    draw = np.random.default_rng(0)
    here = {f"node-{number:02}": member(f"node-{number:02}", 1.0 + number % 3) for number in range(12)}
    homes = BlockHomes(HASHES)
    homes.set_members(list(here.values()))
    moved, least = 0, 0.0
    for step in range(40):
        total = sum(one.weight for one in here.values())
        if step % 2:
            gone = here.pop(sorted(here)[draw.integers(len(here))])
            least += BLOCKS * gone.weight / total
        else:
            new = member(f"late-{step:02}", 1.0 + step % 3)
            here[new.id] = new
            least += BLOCKS * new.weight / (total + new.weight)
        moved += len(homes.set_members(list(here.values())))
    assert moved == pytest.approx(least, rel=0.03)
    afresh = BlockHomes(HASHES)
    afresh.set_members(list(here.values()))
    assert (homes.first == afresh.first).all()
    counts = np.bincount(homes.first, minlength=len(here))
    ideal = BLOCKS * np.array([one.weight for one in homes.members]) / sum(one.weight for one in homes.members)
    assert (np.abs(counts - ideal) < 4 * np.sqrt(ideal)).all()


def test_another_weight_moves_blocks_of_that_member_only() -> None:
    members = [member(f"node-{number}") for number in range(5)]
    homes = BlockHomes(HASHES)
    homes.set_members(members)
    before = homes.first
    changed = homes.set_members([replace(members[0], weight=2.0), *members[1:]])
    really = np.flatnonzero(homes.first != before)
    assert (homes.first[really] == 0).all()
    assert (really == changed).all()


def test_members_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="2 members"):
        BlockHomes(FEW).set_members([member("a"), member("a", 2.0)])


def test_an_empty_snapshot_and_a_cluster_without_members_are_no_trouble() -> None:
    nothing = BlockHomes(HASHES[:0], replicas=2)
    assert len(nothing.set_members([member("a"), member("b")])) == 0
    homes = BlockHomes(FEW, replicas=2)
    homes.set_members([member("a")])
    assert (homes.first == 0).all()
    assert (homes.second == NO_NODE).all()
    homes.set_members([])
    assert (homes.first == NO_NODE).all()


def test_numbers_of_members_are_translated_when_the_list_changes() -> None:
    nodes = np.array([0, 1, 2, NO_NODE, 1], np.uint16)
    assert reindex_nodes(nodes, ["a", "b", "c"], ["0", "a", "c"]).tolist() == [1, NO_NODE, 2, NO_NODE, NO_NODE]
    assert reindex_nodes(nodes, ["a", "b", "c"], []).tolist() == [NO_NODE] * 5
