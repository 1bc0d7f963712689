"""The ring follows the records: a simulation of nodes that join, drain, die, come back and are cut off, and a store."""

import dataclasses
from typing import Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from cachefs_cluster.membership.ring import MAX_NODES, Ring, RingPlanner, decode_ring, ring_nodes
from cachefs_cluster.membership.view import NodeRecord, State
from tests.members import member_id, member_record

GRACE: Final = 30.0
NODES: Final = range(1, 7)
numbers = st.sampled_from(NODES)


def active(number: int, state: State = "active") -> NodeRecord:
    return dataclasses.replace(member_record(number), state=state)


def roster(*records: NodeRecord, ring: tuple[int, ...] = (), now: float = 0.0) -> RingPlanner:
    found = RingPlanner(member_id(1), GRACE)
    nodes = ring_nodes(active(number) for number in ring)
    found.update({each.id: each for each in records}, Ring(1, nodes), now)
    return found


def wanted(found: RingPlanner, now: float) -> list[int]:
    return [int(node.id, 16) for node in found.wanted_nodes(now)]


def test_active_nodes_are_in_the_ring_and_others_are_not() -> None:
    found = roster(active(1), active(2, "joining"), active(3, "draining"), active(4), ring=(1, 3))
    assert wanted(found, 0) == [1, 4]
    assert [node.state for node in found.make_view("etcd", "").placed_members] == ["active", "draining"]


def test_a_node_that_is_away_keeps_its_place_for_the_time_of_grace() -> None:
    found = roster(active(1), ring=(1, 2))
    assert found.make_view("etcd", "").get(member_id(2)) == dataclasses.replace(
        member_record(2), incarnation="", state="away"
    )
    assert found.seconds_to_next_change(10) == pytest.approx(GRACE - 10)
    assert wanted(found, GRACE - 1) == [1, 2]
    assert wanted(found, GRACE) == [1]
    # It has begun again, and is not ready: the time goes on.
    found.update({each.id: each for each in (active(1), active(2, "joining"))}, found.ring, 20)
    assert wanted(found, GRACE - 1) == [1, 2]
    assert wanted(found, GRACE) == [1]
    found.update({each.id: each for each in (active(1), active(2))}, found.ring, 25)
    assert wanted(found, GRACE * 2) == [1, 2]
    assert found.seconds_to_next_change(25) is None


def test_rails_change_no_ring_and_are_in_the_view() -> None:
    """Nodes of the last release would write a ring without them, and both would be changed endlessly."""
    found = roster(active(1), dataclasses.replace(active(2), rails=("10.0.1.2",)), ring=(1, 2))
    assert found.wanted_nodes(0) == found.ring.nodes
    assert [node.rails for node in found.make_view("etcd", "").placed_members] == [(), ("10.0.1.2",)]


def test_views_compute_with_what_the_ring_says() -> None:
    heavier = dataclasses.replace(active(2), weight=9.0, memory=5, zone="b")
    found = roster(active(1), heavier, ring=(1, 2))
    (mine, other) = found.make_view("etcd", "").placed_members
    assert (mine.weight, other.weight, other.memory, other.zone) == (1.0, 2.0, 1 << 30, "")
    assert found.wanted_nodes(0)[1].weight == 9.0
    assert found.make_view("etcd", "").home_shares() == {
        member_id(1): pytest.approx(1 / 3),
        member_id(2): pytest.approx(2 / 3),
    }


def test_an_emptied_store_is_filled_from_what_is_known() -> None:
    found = roster(active(1), ring=(1, 2))
    found.update({member_id(1): active(1)}, None, 1)
    assert (found.ring.epoch, wanted(found, 1)) == (1, [1, 2])


def test_rings_are_written_and_read() -> None:
    ring = Ring(7, ring_nodes(active(number) for number in NODES))
    assert decode_ring(ring.encode(), 7) == ring
    twice = Ring(0, (*ring.nodes, ring.nodes[0]))
    many = Ring(0, ring_nodes(active(number) for number in range(MAX_NODES + 1)))
    for wrong in (b"", b"{}", b"[1]", b"[" * 10_000, twice.encode(), many.encode(), b" " * (5 << 20)):
        with pytest.raises(ValueError, match=r"\w"):
            decode_ring(wrong, 1)


class Cluster(RuleBasedStateMachine):
    """Rosters of some nodes, and a store with a ring that is changed by compare-and-swap."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.records: dict[str, NodeRecord] = {}
        self.ring: Ring | None = None
        self.revision = 0
        self.rosters: dict[int, RingPlanner] = {}
        self.cut_off: set[int] = set()
        self.history: dict[int, tuple[NodeRecord, ...]] = {}

    def _tell(self) -> None:
        for number, each in self.rosters.items():
            if number not in self.cut_off:
                each.update(dict(self.records), self.ring, self.now)

    @rule(number=numbers, state=st.sampled_from(["joining", "active", "draining"]), weight=st.sampled_from([1.0, 2.0]))
    def put(self, number: int, state: State, weight: float) -> None:
        self.rosters.setdefault(number, RingPlanner(member_id(number), GRACE))
        self.cut_off.discard(number)
        self.records[member_id(number)] = dataclasses.replace(active(number, state), weight=weight)
        self._tell()

    @rule(number=numbers)
    def die(self, number: int) -> None:
        self.rosters.pop(number, None)
        self.records.pop(member_id(number), None)
        self._tell()

    @rule(number=numbers)
    def lose_touch(self, number: int) -> None:
        """Its record ends, and it sees nothing of what happens from now on."""
        if number in self.rosters:
            self.cut_off.add(number)
            self.records.pop(member_id(number), None)
            self._tell()

    @rule(seconds=st.floats(0.1, 40))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def empty_the_ring(self) -> None:
        self.ring = None
        self._tell()

    @rule(number=numbers)
    def propose(self, number: int) -> None:
        """One that is cut off cannot, and one with an old ring is refused."""
        each = self.rosters.get(number)
        if each is None or number in self.cut_off:
            return
        nodes = each.wanted_nodes(self.now)
        has_ring = self.ring is not None
        if (nodes != each.ring.nodes or not has_ring) and (not has_ring or each.ring.epoch == self.ring.epoch):  # type: ignore[union-attr]
            self.revision += 1
            self.ring = Ring(self.revision, nodes)
            self.history[self.revision] = nodes
            self._tell()

    @invariant()
    def an_epoch_means_the_same_everywhere(self) -> None:
        for each in self.rosters.values():
            if each.ring.epoch:
                assert each.ring.nodes == self.history[each.ring.epoch]
                placing = each.make_view("etcd", "").placed_members
                kept = [(node.id, node.weight, node.zone, node.memory) for node in placing]
                assert kept == [(node.id, node.weight, node.zone, node.memory) for node in each.ring.nodes]

    def teardown(self) -> None:
        """Everything heals: soon all have the ring of those that are active."""
        for number in list(self.rosters):
            self.put(number, "active", 1.0)
        self.wait(GRACE + 1)
        for number in [*NODES, *NODES]:
            self.propose(number)
        for each in self.rosters.values():
            assert {int(node.id, 16) for node in each.ring.nodes} == set(self.rosters)
            assert each.leader_rank() == sum(1 for number in self.rosters if member_id(number) < each.me)


def test_a_cluster_agrees_whatever_happens() -> None:
    run_state_machine_as_test(Cluster, settings=settings(stateful_step_count=40))
