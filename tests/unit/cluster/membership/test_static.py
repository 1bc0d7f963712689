"""A list of nodes: the same ids and epoch everywhere, and nodes that nobody reaches do not count after a while."""

import dataclasses
from typing import Any

import pytest

from cachefs_cluster.membership.open_membership import open_membership
from cachefs_cluster.membership.static import StaticMembership, list_epoch, listed_id
from cachefs_cluster.membership.view import ClusterView
from cachefs_cluster.section import ClusterSection
from tests.members import member_record, on_virtual_time

NODES = ("a=127.0.0.1:7000", "b=127.0.0.1:7100, zone=r1, weight=2", "c=127.0.0.1:7200")


def section(name: str = "a", nodes: tuple[str, ...] = NODES, **more: Any) -> ClusterSection:
    return ClusterSection(membership="static", name=name, nodes=nodes, grace=10, **more)


def membership(name: str = "a") -> StaticMembership:
    return StaticMembership(section(name), member_record(1))


def placing(view: ClusterView) -> list[str]:
    return [node.name for node in sorted(view.placed_members, key=lambda node: node.name)]


def id_of(name: str) -> str:
    return listed_id("default", name)


@on_virtual_time
async def test_all_nodes_of_a_list_place_alike_from_the_first_moment() -> None:
    found = {name: membership(name) for name in "abc"}
    for each in found.values():
        await each.announce("active")
    views = {name: each.view for name, each in found.items()}
    assert len({view.epoch for view in views.values()}) == 1
    assert 0 < views["a"].epoch < 1 << 48
    assert len({view.ring for view in views.values()}) == 1
    assert [view.me for view in views.values()] == [id_of(name) for name in views]
    assert views["a"].get(id_of("b")) == dataclasses.replace(
        member_record(2), id=id_of("b"), incarnation="", name="b", data_port=7100, control_port=7101, zone="r1",
        weight=2.0, memory=0, state="active",
    )  # fmt: skip


def test_a_list_that_differs_is_another_epoch() -> None:
    same = section(nodes=tuple(reversed(NODES)))
    assert list_epoch(same) == list_epoch(section("b"))
    for other in (NODES[:2], (*NODES[:2], "c=127.0.0.1:7201"), (*NODES[:2], "c=127.0.0.1:7200, weight=3")):
        assert list_epoch(section(nodes=other)) != list_epoch(same)
    assert list_epoch(section(cluster="other")) != list_epoch(same)


@on_virtual_time
async def test_a_node_tells_its_other_addresses_and_the_epoch_stays() -> None:
    found = membership()
    epoch = found.view.epoch
    found.note_record(dataclasses.replace(member_record(2), id=id_of("b"), host="10.0.0.2", rails=("10.0.1.2",)))
    known = found.view.get(id_of("b"))
    assert known is not None
    assert known.hosts == ("127.0.0.1", "10.0.1.2"), "the first address is that of the list"
    assert found.view.epoch == epoch
    mine = StaticMembership(section(), dataclasses.replace(member_record(1), rails=("10.0.1.1",))).view.own_record
    assert mine is not None
    assert mine.rails == ("10.0.1.1",)


@on_virtual_time
async def test_a_node_whose_first_address_is_silent_is_asked_at_the_others_before_it_counts_as_away() -> None:
    found, probed = membership(), list[str]()
    found.probe = probed.append
    found.note_record(dataclasses.replace(member_record(2), id=id_of("b"), rails=("10.0.1.2",)))
    for name in "bc":
        found.note_silence(id_of(name))
    since = max(found._silent_since.values())
    found.expire(since + 1)
    assert probed == [id_of("b")], "c has one address"
    found.note_response(id_of("b"))
    found.expire(since + 6)
    assert [node.name for node in found.view.reachable] == ["b"]


@on_virtual_time
async def test_a_node_that_nobody_reaches_stops_counting_here_and_comes_back() -> None:
    found, seen = membership(), list[ClusterView]()
    found.add_listener(seen.append)
    await found.announce("active")
    found.note_silence(id_of("b"))
    found.note_silence(id_of("b"))
    found.note_silence("0" * 16)  # of no node
    since = found._silent_since[id_of("b")]
    found.expire(since + 4.9)
    assert seen[-1].get(id_of("b")).state != "away"  # type: ignore[union-attr]
    found.expire(since + 9.9)
    assert placing(found.view) == ["a", "b", "c"]
    assert [node.name for node in found.view.available_members] == ["a", "c"]
    found.note_response(id_of("b"))
    assert [node.name for node in found.view.available_members] == ["a", "b", "c"]
    found.note_silence(id_of("b"))
    since = found._silent_since[id_of("b")]
    found.expire(since + 5)
    assert [node.name for node in found.view.reachable] == ["c"]
    found.expire(since + 10)
    assert placing(found.view) == ["a", "c"]
    assert [node.name for node in found.view.reachable] == ["c"]
    assert found.view.epoch == seen[0].epoch
    found.note_response(id_of("b"), "f" * 16)
    assert placing(found.view) == ["a", "b", "c"]
    assert found.view.get(id_of("b")).incarnation == "f" * 16  # type: ignore[union-attr]
    count = len(seen)
    found.note_response(id_of("b"), "f" * 16)
    assert len(seen) == count


@on_virtual_time
async def test_what_a_peer_says_of_itself_is_learned_but_not_its_place() -> None:
    found = membership()
    said = dataclasses.replace(
        member_record(2), id=id_of("b"), weight=50.0, host="10.0.0.1", memory=5, ssd=6, state="draining"
    )
    found.note_record(said)
    known = found.view.get(id_of("b"))
    assert known is not None
    assert (known.memory, known.ssd, known.incarnation, known.state) == (5, 6, said.incarnation, "draining")
    assert (known.weight, known.host) == (2.0, "127.0.0.1")
    assert "b" not in placing(found.view)
    found.note_record(dataclasses.replace(said, state="joining"))  # it has begun again: nothing moves for that
    assert "b" in placing(found.view)
    found.note_record(dataclasses.replace(said, id=found.view.me))  # nobody tells a node who it is
    assert found.view.own_record is not None
    assert found.view.own_record.memory == 1 << 30


@on_virtual_time
async def test_it_starts_and_stops() -> None:
    found = membership()
    await found.start()
    await found.refresh()
    await found.stop()
    await found.stop()


def test_opening_a_list(tmp_path: Any) -> None:
    found = open_membership(section("c"), tmp_path, 3 << 30, 0)
    assert found.view.own_record is not None
    assert (found.view.own_record.name, found.view.own_record.memory) == ("c", 3 << 30)
    with pytest.raises(KeyError):
        StaticMembership(section("z"), member_record(1))  # the configuration is checked before
