"""What cachectl says of a cluster, on a terminal of 80 columns."""

import io
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from cachefs.cluster_messages import ClusterStatus, MemberStatus, NodeCounters, PeerTraffic, RailTraffic, TierUse
from cachefs.messages import ClusterBrief
from cachefs_tools.cachectl.cluster import cluster_facts, describe, describe_traffic


def shown(lines: Iterable[str | Table]) -> str:
    screen = io.StringIO()
    Console(file=screen, width=80, markup=False, highlight=False).print(*lines, sep="\n")
    return screen.getvalue()


def member(number: int, *, placing: bool = True, **more: Any) -> MemberStatus:
    return MemberStatus(
        id=f"{number:016x}", incarnation="", name=f"gpu-{number:03}", host=f"10.77.0.{number}", data_port=7380,
        control_port=7381, zone=more.pop("zone", ""), state="active" if placing else "draining", placing=placing,
        weight=1536.25, share=0.1234, memory=1 << 40, ssd=4 << 40, **more,
    )  # fmt: skip


def status(*members: MemberStatus, problem: str = "") -> ClusterStatus:
    return ClusterStatus(
        name="training", source="etcd", me=f"{1:016x}", epoch=123456, age=3725.0, problem=problem,
        members=list(members), remarks=["2 nodes are called x"],
    )  # fmt: skip


def counted(*received: tuple[int, int]) -> NodeCounters:
    """received: bytes from the nodes of some numbers."""
    tiers = [TierUse("memory", 1 << 40, 200 << 30), TierUse("ssd", 4 << 40, 300 << 30)]
    return NodeCounters(
        tiers=tiers, origin_bytes=999 << 30, received={f"{number:016x}": count for number, count in received}
    )


def test_a_cluster_fits_80_columns() -> None:
    busy = PeerTraffic(
        bytes_in=999 << 30, bytes_out=123 << 30, failures=3, busy=12_345, wrong=1, cooling=True, seconds=0.5
    )
    fast = PeerTraffic(seconds=0.02)
    found = status(
        member(1, counters=counted()), member(22, traffic=busy), member(123, placing=False, traffic=fast),
        member(4, traffic=fast, counters=NodeCounters(problem="it does not answer")), problem="etcd does not answer",
    )  # fmt: skip
    text = shown(describe(found))
    assert [line for line in text.splitlines() if len(line) > 80] == []
    for said in (
        "cluster training, from etcd; ring epoch 123456", "problem: etcd does not answer", "gpu-001*",
        "12.3 %", "999 GiB", "500 GiB", "123 GiB", "draining", "10.77.0.22:7380", "note: 2 nodes are called x",
        "gpu-022: does not answer, and gets no requests for a while, slow: a block takes ", "500 ms, from others 20,",
        "gpu-004: it does not answer",
    ):  # fmt: skip
        assert said in text, text
    assert "ZONE" not in text
    assert "rack-1" in shown(describe(status(member(1, zone="rack-1"))))


def test_who_has_had_how_much_from_whom() -> None:
    few = status(*(member(number, counters=counted((1, number << 30), (99, 5))) for number in range(1, 7)))
    text = shown(describe_traffic(few))
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert text.splitlines()[6].split() == ["gpu-006", "6", "GiB", *["0", "B"] * 4, "-"]
    many = status(*(member(number, counters=counted((1, number << 30))) for number in range(1, 100)))
    lines = shown(describe_traffic(many)).splitlines()
    assert len(lines) == 41
    assert lines[1].split() == ["gpu-099", "gpu-001", "99", "GiB"]
    assert shown(describe_traffic(status(member(1)))) == "no node has received a block from another node\n"


def test_which_address_of_a_node_is_used_and_why_not() -> None:
    dead = "node gpu-002 at 10.78.0.2:7380 cannot be reached: No route to host"
    rails = [
        RailTraffic(address="10.77.0.2:7380", card="eth0", bytes_in=3 << 30),
        RailTraffic(address="10.78.0.2:7380", problem=dead),
    ]
    alive = member(2, rails=["10.78.0.2"], traffic=PeerTraffic(bytes_in=3 << 30, rails=rails))
    text = shown(describe(status(member(1), alive)))
    assert "10.77.0.2:7380 +1" in text
    assert f"gpu-002: not used: {dead}" in " ".join(text.split())
    lines = shown(describe_traffic(status(member(1), alive))).splitlines()
    assert lines[-2].split() == ["gpu-002", "10.77.0.2:7380", "eth0", "3", "GiB", "used"]
    assert lines[-1].split() == ["gpu-002", "10.78.0.2:7380", "-", "0", "B", "not", "used"]
    away = member(3, traffic=PeerTraffic(cooling=True, rails=rails))
    assert "not used" not in shown(describe(status(member(1), away))), "it does not answer at all"


def test_no_cluster() -> None:
    nothing = ClusterStatus(name="", source="none", me="", epoch=0, age=0.0, problem="")
    for lines in (describe(nothing), describe_traffic(nothing)):
        assert shown(lines) == "this node is in no cluster; see [cluster] in its configuration\n"
    assert list(cluster_facts(ClusterBrief())) == []


def test_a_line_of_status() -> None:
    found = ClusterBrief(name="c", source="etcd", epoch=7, states={"away": 1, "active": 3}, problem="etcd is away")
    assert list(cluster_facts(found)) == [
        ("cluster", "c: 3 active, 1 away; ring epoch 7"), ("", "etcd is away"),
    ]  # fmt: skip
