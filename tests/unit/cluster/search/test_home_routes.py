"""The home of one block, computed as for whole snapshots; homes before a change of the cluster."""

from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import xxhash

from cachefs.planning.cluster.homes import BlockHomes
from cachefs.planning.cluster.rendezvous import RingMember, key_hashes, rank_members
from cachefs_cluster.membership.view import ClusterView, NodeRecord
from cachefs_cluster.search import home_routes, missing_snapshots
from cachefs_cluster.search.home_routes import BlockRoute, HomeRoutes
from cachefs_cluster.search.missing_snapshots import MissingSnapshots
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.origin.base import ObjectRange, Origin
from tests import virtual_time
from tests.peering import KnownMembership, record, view_of

COUNT = 300
KEYS = np.random.default_rng(0).integers(0, 256, (COUNT, 20), np.uint8)


def source(number: int) -> BlockSource:
    return BlockSource(KEYS[number].tobytes(), cast(Origin, None), ObjectRange(b"", b"", 1, 0, 1), "snapshot")


def homes(nodes: list[NodeRecord]) -> list[list[str]]:
    """Of each block: all nodes in order, the home first."""
    members = [RingMember(one.id, xxhash.xxh3_64_intdigest(one.id.encode()), one.weight) for one in nodes]
    found = BlockHomes(key_hashes(KEYS))
    found.set_members(members)
    order = rank_members(key_hashes(KEYS), members)
    assert [members[first].id for first in found.first] == [members[row[0]].id for row in order]
    return [[members[number].id for number in row] for row in order]


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 2.0, 0.5, 7.0], [1.0] * 40, [3.0]])
def test_each_block_is_asked_of_its_home_then_of_the_next_one(weights: list[float]) -> None:
    nodes = [record(number, 1000 + number, weight=weight) for number, weight in enumerate(weights, 1)]
    me = nodes[0].id
    routes = HomeRoutes(KnownMembership(view_of(me, nodes)), MissingSnapshots())
    for number, (home, *others) in enumerate(homes(nodes)):
        found = routes.find_route(source(number))
        if home == me:
            assert found is None
        else:
            assert found is not None
            assert found.fetching_node is not None
            assert (found.fetching_node.id, found.possible_holders) == (home, ())
            assert (found.stand_in_node.id if found.stand_in_node is not None else me) == others[0]


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 2.0, 0.5, 7.0], [1.0] * 40])
def test_nodes_that_lack_the_snapshot_are_passed_over_by_all_alike(weights: list[float]) -> None:
    nodes = [record(number, 1000 + number, weight=weight) for number, weight in enumerate(weights, 1)]
    lacking = {one.id for one in nodes[1::2]}
    readers = [one for one in nodes if one.id not in lacking]

    async def look() -> None:
        lacks = MissingSnapshots()
        for one in lacking:
            lacks.note_missing("snapshot", one)
        routes = {one.id: HomeRoutes(KnownMembership(view_of(one.id, nodes)), lacks) for one in readers}
        for number, order in enumerate(homes(nodes)):
            first, second, *_ = [*(node for node in order if node not in lacking), "", ""]
            for reader, found in ((one.id, routes[one.id].find_route(source(number))) for one in readers):
                brings = found.fetching_node.id if found is not None and found.fetching_node is not None else ""
                assert brings == ("" if reader == first else first)
                if brings and second not in ("", reader):
                    assert found is not None
                    assert found.stand_in_node is not None
                    assert found.stand_in_node.id == second
        # Of another snapshot nothing is known.
        other = HomeRoutes(KnownMembership(view_of(nodes[0].id, nodes)), lacks)
        assert other.find_route(replace(source(0), snapshot="another")) == HomeRoutes(
            KnownMembership(view_of(nodes[0].id, nodes)), MissingSnapshots()
        ).find_route(source(0))

    virtual_time.run(look())


def test_the_origin_is_asked_after_those_that_read_a_block_while_this_node_lacked_the_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = [record(number, 1000 + number) for number in range(1, 9)]
    me, readers = nodes[0].id, {one.id for one in nodes[1:7]}

    async def look() -> None:
        lacks = MissingSnapshots()
        routes = HomeRoutes(KnownMembership(view_of(me, nodes)), lacks)
        for one in readers:
            lacks.note_reading_node("snapshot", one)
        for number, (home, *others) in enumerate(homes(nodes)):
            found = routes.find_route(source(number))
            assert found is not None
            reading = [one for one in (home, *others) if one in readers][:4]
            if home != me:
                assert (found.fetching_node and found.fetching_node.id, found.possible_holders) == (home, ())
                assert [one.id for one in found.peers_before_origin] == reading
            else:
                stood_in = [one.id for one in found.possible_holders]
                assert (found.fetching_node, stood_in) == (None, others[:1])
                assert [one.id for one in found.peers_before_origin] == [one for one in reading if one not in stood_in]
        monkeypatch.setattr(missing_snapshots, "REMEMBERED_SECONDS", 0.0)
        assert lacks.nodes_reading("snapshot") == frozenset()
        monkeypatch.setattr(missing_snapshots, "REMEMBERED_SECONDS", 60.0)
        monkeypatch.setattr(missing_snapshots, "MAX_SNAPSHOTS", 2)
        monkeypatch.setattr(missing_snapshots, "MAX_READING_NODES", 1)
        for name in ("a", "b", "a", "c"):
            lacks.note_reading_node(name, nodes[1].id)
            lacks.note_reading_node(name, nodes[2].id)
        assert [set(lacks.nodes_reading(name)) for name in ("a", "b", "c")] == [{nodes[2].id}, set(), {nodes[2].id}]

    virtual_time.run(look())


def test_where_all_others_lack_the_snapshot_the_origin_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [record(number, 1000 + number) for number in (1, 2, 3)]

    async def look() -> None:
        lacks = MissingSnapshots()
        routes = HomeRoutes(KnownMembership(view_of(nodes[0].id, nodes)), lacks)
        for one in nodes[1:]:
            lacks.note_missing("snapshot", one.id)
        assert {routes.find_route(source(number)) for number in range(COUNT)} == {None}
        monkeypatch.setattr(missing_snapshots, "MISSING_SECONDS", 0.0)
        for one in nodes[1:]:
            lacks.note_missing("snapshot", one.id)
        assert lacks.nodes_without("snapshot") == frozenset()
        monkeypatch.setattr(missing_snapshots, "MAX_SNAPSHOTS", 2)
        monkeypatch.setattr(missing_snapshots, "MISSING_SECONDS", 60.0)
        for name in ("a", "b", "c"):
            lacks.note_missing(name, nodes[1].id)
        assert [bool(lacks.nodes_without(name)) for name in ("a", "b", "c")] == [False, True, True]

    virtual_time.run(look())


def test_the_former_home_is_looked_at_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = (record(number, 1000 + number) for number in (1, 2, 3))
    membership = KnownMembership(view_of(one.id, [one, two]))
    routes = HomeRoutes(membership, MissingSnapshots())
    assert all(routes.find_route(source(number)) in (None, BlockRoute(fetching_node=two)) for number in range(COUNT))
    membership.set(view_of(one.id, [one, two, three]))
    before, after = homes([one, two]), homes([one, two, three])
    for number in range(COUNT):
        found = routes.find_route(source(number))
        if after[number][0] == three.id and before[number][0] == two.id:
            assert found is not None
            assert (found.possible_holders, found.fetching_node) == ((three, two), three)
        elif after[number][0] == three.id:
            assert found is not None
            assert (found.possible_holders, found.fetching_node) == ((), three)
    monkeypatch.setattr(home_routes, "FORMER_HOME_SECONDS", -1.0)
    assert all(
        (found := routes.find_route(source(number))) is None or not found.possible_holders for number in range(COUNT)
    )


def test_blocks_of_a_node_that_drains_are_looked_for_there_and_those_of_one_that_is_away_are_not() -> None:
    one, two = record(1, 1001), record(2, 1002)
    membership = KnownMembership(view_of(one.id, [one, two]))
    routes = HomeRoutes(membership, MissingSnapshots())
    twos = [number for number, (home, _) in enumerate(homes([one, two])) if home == two.id]
    for state, found in (
        ("draining", BlockRoute((replace(two, state="draining"),), is_kept_here=True)),
        ("away", None),
    ):
        members = (one, replace(two, state=state))  # type: ignore[arg-type]
        membership.set(ClusterView(8, one.id, members, (one.id,), "etcd"))
        assert [routes.find_route(source(number)) for number in twos] == [found] * len(twos)
        membership.set(view_of(one.id, [one, two]))


def test_where_no_node_is_known_nobody_is_asked() -> None:
    assert HomeRoutes(KnownMembership(ClusterView()), MissingSnapshots()).find_route(source(0)) is None


@pytest.mark.parametrize("zones", [["x", "x", "y", "y"], ["x", "x", "x", ""], ["x"] * 4, ["", "", "x", "y"]])
def test_the_node_with_the_second_copy_stands_in_and_is_looked_at_when_the_home_has_gone(zones: list[str]) -> None:
    nodes = [record(number, 1000 + number, zone=zone) for number, zone in enumerate(zones, 1)]
    members = [RingMember(one.id, xxhash.xxh3_64_intdigest(one.id.encode()), one.weight, one.zone) for one in nodes]
    found = BlockHomes(key_hashes(KEYS), 2)
    found.set_members(members)
    outside = "f" * 16  # who asks is none of them
    membership = KnownMembership(view_of(outside, nodes))
    routes = HomeRoutes(membership, MissingSnapshots(), 2)
    for number in range(COUNT):
        route = routes.find_route(source(number))
        assert route is not None
        assert (route.fetching_node, route.stand_in_node) == (nodes[found.first[number]], nodes[found.second[number]])
    gone, left = nodes[0], nodes[1:]
    membership.set(view_of(outside, left, 8))
    after = BlockHomes(key_hashes(KEYS), 2)
    after.set_members(members[1:])
    for number in np.flatnonzero(found.first == 0):
        route = routes.find_route(source(int(number)))
        assert route is not None
        home, had = left[after.first[number]], nodes[found.second[number]]
        assert route.fetching_node == home
        assert had == home or had in route.possible_holders
        assert gone not in route.possible_holders


def test_while_this_node_fills_up_the_one_that_stood_in_for_it_is_asked() -> None:
    nodes = [record(number, 1000 + number) for number in (1, 2, 3)]
    routes = HomeRoutes(KnownMembership(view_of(nodes[0].id, nodes)), MissingSnapshots())
    mine = [(number, after) for number, (home, after, _) in enumerate(homes(nodes)) if home == nodes[0].id]
    assert all(routes.find_route(source(number)) is None for number, _ in mine)
    routes.follow_rebalance(lambda snapshot: True)
    for number, after in mine:
        route = routes.find_route(source(number))
        assert route is not None
        assert ([one.id for one in route.possible_holders], route.fetching_node, route.is_kept_here) == (
            [after],
            None,
            True,
        )


def test_of_two_copies_each_is_asked_for_before_the_origin() -> None:
    nodes = [record(number, 1000 + number) for number in (1, 2, 3)]
    routes = HomeRoutes(KnownMembership(view_of(nodes[0].id, nodes)), MissingSnapshots(), 2)
    for number, (home, after, _) in enumerate(homes(nodes)):
        route = routes.find_route(source(number))
        assert route is not None
        asked = [one.id for one in route.possible_holders]
        # A home that the node with the second copy asks is asked once: to bring it, if need be.
        assert asked == ([] if after == nodes[0].id else [one for one in (home, after) if one != nodes[0].id])
        assert route.is_kept_here == (home == nodes[0].id), "second copies are made of hot snapshots only"
