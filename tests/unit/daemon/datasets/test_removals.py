"""What was removed stays removed, however much was removed while a node was away."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cachefs_cluster.directory.dataset_merge import is_added, is_same, resolve
from cachefs_cluster.sharing.sections import DATASETS, SharedDataset
from cachefs_daemon.datasets import stamps
from cachefs_daemon.datasets.stamps import (
    MAX_ADDS,
    MAX_REMOVALS,
    MAX_REMOVED,
    ChangeStamp,
    Removals,
    StampClock,
    compact,
    is_floor,
    is_removed_by,
    joined_adds,
)

NODE = st.integers(0, 3)
NAME = st.sampled_from("xyz")
STEP = st.one_of(
    st.tuples(st.just("add"), NODE, NAME),
    st.tuples(st.just("remove"), NODE, NAME),
    st.tuples(st.just("churn"), NODE, NAME),  # one name, added and removed again and again
    st.tuples(st.just("wander"), NODE, st.just("")),  # many names, each added and removed
    st.tuples(st.just("restart"), NODE, st.just("")),
    st.tuples(st.just("hear"), NODE, NODE),
)


class Node:
    """What one node knows, as the catalog and the shared datasets have it."""

    def __init__(self, number: int) -> None:
        self.id = f"{number:016x}"
        self.has: dict[str, SharedDataset] = {}
        self.removals = Removals()
        self.restart()

    def restart(self) -> None:
        self.clock = StampClock(self.id)
        for name in self.names():
            self.see(self.own(name))
        self.clock.see(self.removals.forgotten)

    def names(self) -> list[str]:
        return sorted({*self.has, *self.removals.names})

    def own(self, name: str) -> SharedDataset:
        gone = self.removals.names.get(name, [])
        return msgspec.structs.replace(self.has.get(name, SharedDataset()), gone=list(gone))

    def see(self, value: SharedDataset) -> None:
        self.clock.see([*value.gone, *value.added, value.listed])

    def add(self, name: str) -> ChangeStamp | None:
        if name in self.has:
            return None
        stamp = self.clock.tick()
        self.has[name] = SharedDataset(
            added=[stamp], url=f"s3://{name}", listed=stamp, snapshot="0" * 32, file_size=1, block_size=1
        )
        return stamp

    def remove(self, name: str, others: "list[Node]") -> list[ChangeStamp]:
        value = self.has.pop(name, None)
        if value is None:
            return []
        self.removals = self.removals.with_removal(name, value.added, lambda: self.elsewhere(others))
        return value.added

    def elsewhere(self, others: "list[Node]") -> Iterator[tuple[str, ChangeStamp]]:
        for other in others:
            for name, value in other.has.items():
                own = self.own(name).added
                yield from ((name, stamp) for stamp in value.added if not is_added(own, stamp))

    def hear(self, other: "Node") -> None:
        for name in sorted({*self.names(), *other.names()}):
            own, said = self.own(name), other.own(name)
            DATASETS.decode(name, DATASETS.encode(said))
            self.see(said)
            wanted = resolve(own, [said], self.removals.is_forgotten).value
            if wanted.gone != own.gone:
                self.removals = self.removals.with_removal(name, wanted.gone, lambda: self.elsewhere([other]))
            if own.added and not (wanted.added and is_same(own, wanted)):
                self.remove(name, [other])
            elif wanted.added:
                self.has[name] = msgspec.structs.replace(wanted, gone=[])


class Cluster:
    """Nodes that hear of each other when a test says so."""

    def __init__(self) -> None:
        self.nodes = [Node(number) for number in range(4)]
        self.made: set[ChangeStamp] = set()
        self.removed: set[ChangeStamp] = set()
        self.joined: list[set[ChangeStamp]] = []  # adds that were one dataset on any node at any time
        self.count = 0

    def do(self, what: str, number: int, argument: Any) -> None:
        node = self.nodes[number]
        if what == "hear":
            self.hear(node, self.nodes[argument])
        elif what == "restart":
            node.restart()
        elif what == "add":
            self.add(node, argument)
        elif what == "remove":
            self.remove(node, argument)
        elif what == "churn":
            for _ in range(6):
                self.add(node, argument)
                self.remove(node, argument)
        else:
            for _ in range(6):
                self.count += 1
                self.add(node, f"n{self.count}")
                self.remove(node, f"n{self.count}")

    def add(self, node: Node, name: str) -> None:
        self.made.update({stamp} if (stamp := node.add(name)) is not None else ())

    def remove(self, node: Node, name: str) -> None:
        self.removed.update(node.remove(name, []))

    def hear(self, node: Node, other: Node) -> None:
        if node is not other:
            node.hear(other)
            self.joined += [set(value.added) for value in node.has.values()]

    def settle(self) -> None:
        for _ in range(6):
            for node in self.nodes:
                for other in self.nodes:
                    self.hear(node, other)

    def gone(self) -> set[ChangeStamp]:
        """What was removed, and what was one dataset with it."""
        gone = {stamp for stamp in self.removed if not is_floor(stamp)}
        while more := {stamp for adds in self.joined if adds & gone for stamp in adds if not is_floor(stamp)} - gone:
            gone |= more
        return gone


# Two full lists of names, and a third node that has yet to hear of an earlier removal.
TWO_FULL_LISTS = [
    *[("add", 2, "y"), ("hear", 0, 2), ("remove", 2, "y"), ("hear", 3, 0), ("remove", 3, "y")],
    *[("wander", 2, ""), ("wander", 3, "")],
]
# The stamp of a later removal stands for that of an earlier one when the name is forgotten.
MANY_REMOVALS = [("add", 0, "x"), ("hear", 1, 0), ("churn", 0, "x"), ("wander", 1, "")]


@example(TWO_FULL_LISTS)
@example(MANY_REMOVALS)
@given(st.lists(STEP, max_size=40))
def test_random_histories_converge_and_nothing_removed_comes_back(steps: list[Any]) -> None:
    cluster = Cluster()
    with (
        patch.object(stamps, "MAX_REMOVED", 4),
        patch.object(stamps, "MAX_REMOVALS", 5),
        patch.object(stamps, "MAX_ADDS", 3),
    ):
        for step in steps:
            cluster.do(*step)
        cluster.settle()
    first, *others = [{name: value.added for name, value in node.has.items()} for node in cluster.nodes]
    assert all(first == other for other in others)
    left = {stamp for adds in first.values() for stamp in adds if not is_floor(stamp)}
    gone = cluster.gone()
    assert not left & gone
    # Nothing else is lost, but where so many runs of nodes have added a name that a stamp stands for all of them.
    known = [node.removals.names.values() for node in cluster.nodes]
    floors = [one for names in known for gone_ in names for one in gone_ if is_floor(one)]
    floors += [one for adds in first.values() for one in adds if is_floor(one)]
    for stamp in cluster.made - gone - left:
        assert is_removed_by(floors, stamp)


@pytest.mark.parametrize("times", [MAX_REMOVALS + 1, 1000])
def test_a_node_that_was_away_while_a_name_was_removed_many_times(times: int) -> None:
    here, away = Node(1), Node(2)
    away.add("tmp")
    here.hear(away)
    assert here.remove("tmp", [])
    for _ in range(times):
        here.add("tmp")
        here.remove("tmp", [])
    assert len(here.removals.names["tmp"]) <= MAX_REMOVALS
    for _ in range(2):
        here.hear(away)
        away.hear(here)
    assert not here.has
    assert not away.has


def test_a_node_that_was_away_while_many_names_were_removed() -> None:
    here, away = Node(1), Node(2)
    for name in ("old", "kept"):
        away.add(name)
    here.hear(away)
    here.remove("old", [])
    for number in range(MAX_REMOVED + 1):
        here.add(f"n{number}")
        here.remove(f"n{number}", [])
    away.add("new")
    assert "old" not in here.removals.names
    assert len(here.removals.names) <= MAX_REMOVED
    for _ in range(2):
        here.hear(away)
        away.hear(here)
    assert sorted(here.has) == sorted(away.has) == ["kept", "new"]


def test_many_nodes_have_added_the_same_before_they_saw_each_other() -> None:
    nodes = [Node(number) for number in range(MAX_ADDS + 8)]
    for node in nodes:
        node.add("set")
    *together, away = nodes
    for node in together[1:]:
        together[0].hear(node)
    added = together[0].has["set"].added
    assert len(added) == MAX_ADDS
    assert is_removed_by(added, ChangeStamp(1, "f" * 16, 7))
    together[0].remove("set", [])
    for _ in range(2):
        together[0].hear(away)
        away.hear(together[0])
    assert not together[0].has
    assert not away.has
    # It may be added again.
    away.add("set")
    together[0].hear(away)
    assert "set" in together[0].has


def test_a_dataset_that_this_node_alone_cannot_have_is_no_removed_one() -> None:
    """As with a block size of its own: when the names that were removed are too many, that one is not among them."""
    here, other = Node(1), Node(2)
    other.add("strange")
    strange = other.has["strange"].added
    with patch.object(stamps, "MAX_REMOVED", 2):
        for number in range(5):
            other.add(f"n{number}")
            here.hear(other)
            here.has.pop("strange")  # it was heard, and is not taken
            here.remove(f"n{number}", [other])
            other.hear(here)
    assert not here.removals.is_forgotten(strange[0])
    here.hear(other)
    assert here.has["strange"].added == strange
    # The same where a node lets go of one alone, outside of the cluster.
    assert (
        not Removals(forgotten=[ChangeStamp(9, "a" * 16, 1)])
        .with_spared([ChangeStamp(3, "a" * 16, 1)])
        .is_forgotten(ChangeStamp(3, "a" * 16, 1))
    )


@given(st.lists(st.builds(ChangeStamp, st.integers(1, 200), st.sampled_from(["", *"abcdefgh"]), st.integers(0, 9))))
def test_compacted_removals_cover_all_that_was_removed(removed: list[ChangeStamp]) -> None:
    found = compact(removed)
    assert len(found) <= MAX_REMOVALS
    assert found == sorted(set(found))
    assert all(is_removed_by(found, one) for one in removed)
    adds = joined_adds(removed)
    assert len(adds) <= MAX_ADDS
    assert adds == sorted(set(adds))
    assert all(one in adds or is_removed_by(adds, one) for one in removed)
