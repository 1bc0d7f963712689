"""Records of nodes, and what follows from them for one node."""

import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.cluster_messages import NodeCounters
from cachefs.planning.requests.rails import MAX_RAILS
from cachefs_cluster.membership.status import cluster_brief, cluster_status, no_traffic
from cachefs_cluster.membership.view import MAX_RECORD, PROTOCOL, ClusterView, NodeRecord, decode_record, encode_record
from cachefs_cluster.section import ClusterSection
from tests.members import member_id, member_record

ids = st.text("0123456789abcdef", min_size=16, max_size=16)
names = st.text("abcXYZ089.-_:", min_size=1, max_size=60)
records = st.builds(
    NodeRecord, ids, ids | st.just(""), names, names, st.integers(1, 65535), st.integers(1, 65535), names | st.just(""),
    st.floats(0.001, 1e6), st.integers(0, 1 << 50), st.integers(0, 1 << 50), st.integers(0, 9),
    st.sampled_from(["joining", "active", "draining", "away"]), st.just("c"),
    st.lists(names, max_size=MAX_RAILS - 1).map(tuple),
)  # fmt: skip


@given(records)
def test_records_are_written_and_read(record: NodeRecord) -> None:
    assert decode_record(encode_record(record)) == record


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": "x"}, {"id": "A" * 16}, {"incarnation": "1"}, {"name": ""}, {"name": "a\nb"}, {"name": "x" * 300},
        {"host": ""}, {"host": "a b"}, {"zone": "\x1b[2J"}, {"data_port": 0}, {"control_port": 65536}, {"weight": 0.0},
        {"weight": 1e300}, {"memory": -1}, {"ssd": 1 << 62}, {"state": "dead"}, {"id": 5}, {"weight": "heavy"},
        {"rails": ["a b"]}, {"rails": [""]}, {"rails": ["h"] * MAX_RAILS}, {"rails": "h"}, {"rails": ["x" * 300]},
    ],
)  # fmt: skip
def test_nonsense_is_no_record(wrong: dict[str, Any]) -> None:
    values = {**msgspec.to_builtins(member_record(1)), **wrong}
    with pytest.raises(ValueError, match=r"\w"):
        decode_record(msgspec.json.encode(values))


@given(st.binary(max_size=100))
def test_no_bytes_do_more_than_raise(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        decode_record(data)


def test_a_record_has_a_limit() -> None:
    with pytest.raises(ValueError, match="at most 4,096"):
        decode_record(encode_record(member_record(1)) + b" " * MAX_RECORD)


def test_a_newer_node_may_say_more() -> None:
    values = {**msgspec.to_builtins(member_record(1)), "gpu": True}
    assert decode_record(msgspec.json.encode(values)) == member_record(1)


def test_the_longest_record_is_within_the_limit() -> None:
    long = "x" * 253
    record = dataclasses.replace(
        member_record(1), name=long, host=long, zone=long, cluster=long, rails=(long,) * (MAX_RAILS - 1)
    )
    assert decode_record(encode_record(record)) == record


def test_a_node_of_the_last_release_takes_the_first_address_alone() -> None:
    """It skips what it does not know, and its own record has no rails."""
    record = dataclasses.replace(member_record(1), rails=("10.0.1.1",))
    fields = [(each.name, each.type) for each in dataclasses.fields(NodeRecord) if each.name != "rails"]
    older = dataclasses.make_dataclass("OlderRecord", [(name, Any) for name, _ in fields])
    known = msgspec.json.decode(encode_record(record), type=older)
    assert (known.host, known.data_port) == (record.host, record.data_port)
    assert decode_record(msgspec.json.encode(known)) == member_record(1)
    assert decode_record(msgspec.json.encode(known)).hosts == (record.host,)


def test_each_address_is_one_rail_once() -> None:
    record = dataclasses.replace(member_record(1), host="10.0.0.1", rails=("10.0.1.1", "10.0.0.1", "10.0.1.1"))
    assert record.hosts == ("10.0.0.1", "10.0.1.1")
    assert record.at("10.0.1.1").hosts == ("10.0.1.1",)


def view(*found: NodeRecord) -> ClusterView:
    return ClusterView(5, member_id(1), found, tuple(each.id for each in found), "etcd", "", 0.0)


def test_others_and_who_can_be_asked() -> None:
    away = dataclasses.replace(member_record(3), state="away")
    found = view(member_record(1), member_record(2), away)
    assert found.own_record == member_record(1)
    assert found.others == (member_record(2), away)
    assert found.reachable == (member_record(2),)
    assert ClusterView().own_record is None


def test_who_reaches_fewer_than_half_takes_itself_for_cut_off() -> None:
    away = [dataclasses.replace(member_record(number), state="away") for number in (2, 3)]
    assert view(member_record(1), away[0]).available_members == (member_record(1),)
    assert view(member_record(1), member_record(4), *away).available_members == (member_record(1), member_record(4))
    cut_off = view(member_record(1), *away)
    assert cut_off.available_members == cut_off.placed_members


def test_what_is_hardly_meant() -> None:
    twin = dataclasses.replace(member_record(2), name="node1", protocol=PROTOCOL + 1)
    third = dataclasses.replace(member_record(3), data_port=twin.data_port)
    rail = dataclasses.replace(member_record(4), host="h", data_port=twin.data_port, rails=(twin.host,))
    assert any("(node1, node4)" in line for line in view(twin, rail).remarks())
    assert list(view(member_record(1), twin, third).remarks()) == [
        f"2 nodes are called node1 (ids {member_id(1)}, {member_id(2)}); give each its own [cluster] name",
        "2 nodes publish the address 127.0.0.1:7020 (node1, node3); a stale record expires within seconds",
        f"1 nodes speak protocol {PROTOCOL + 1}, this one {PROTOCOL}: they do not exchange blocks",
    ]


def test_what_cachectl_is_told() -> None:
    found = view(member_record(1), member_record(2))
    section = ClusterSection(membership="etcd", etcd=("http://127.0.0.1:1",), cluster="c")
    status = cluster_status(found, section, no_traffic, {})
    mine = {"replicas": section.replicas, "grace": section.grace}
    same = {record.id: NodeCounters(**mine) for record in found.others}  # type: ignore[arg-type]
    assert cluster_status(found, section, no_traffic, same).remarks == status.remarks
    unsaid = dict.fromkeys(same, NodeCounters())
    assert cluster_status(found, section, no_traffic, unsaid).remarks == status.remarks
    other = dict.fromkeys(same, NodeCounters(replicas=section.replicas + 1, grace=section.grace))
    said = cluster_status(found, section, no_traffic, other).remarks[len(status.remarks) :]
    assert [one.partition(" on ")[0] for one in said] == [
        f"cluster.replicas is {section.replicas} here, and {section.replicas + 1}"
    ]
    assert (status.name, status.source, status.epoch, status.me) == ("c", "etcd", 5, member_id(1))
    assert [(each.name, each.share, each.placing) for each in status.members] == [
        ("node1", pytest.approx(1 / 3), True), ("node2", pytest.approx(2 / 3), True),
    ]  # fmt: skip
    assert cluster_brief(found, section).states == {"joining": 2}
    nothing = cluster_status(ClusterView(), ClusterSection(), no_traffic, {})
    assert (nothing.source, nothing.name, nothing.members) == ("none", "", [])
