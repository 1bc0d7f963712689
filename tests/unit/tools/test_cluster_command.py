"""What cachectl says of a cluster, on a terminal of 80 columns."""

import io

import msgspec
from cachefs_tools.cachectl.cluster import brief, describe
from rich.console import Console

from cachefs.cluster_messages import ClusterStatus, MemberStatus, NodeCounters, PeerTraffic, TierUse
from cachefs.messages import ClusterBrief


def shown(found: ClusterStatus) -> str:
    screen = io.StringIO()
    Console(file=screen, width=80, markup=False, highlight=False).print(*describe(found), sep="\n")
    return screen.getvalue()


def member(number: int, traffic: PeerTraffic = PeerTraffic(), *, placing: bool = True) -> MemberStatus:  # noqa: B008
    return MemberStatus(
        id=f"{number:016x}", incarnation="", name=f"gpu-node-{number:03}", host=f"10.77.0.{number}", data_port=7380,
        control_port=7381, zone="rack-12", state="active" if placing else "draining", placing=placing, weight=1536.25,
        share=0.1234, memory=1 << 40, ssd=4 << 40, traffic=traffic,
    )  # fmt: skip


def status(*members: MemberStatus, problem: str = "") -> ClusterStatus:
    return ClusterStatus(
        name="training", source="etcd", me=f"{1:016x}", epoch=123456, age=3725.0, problem=problem,
        members=list(members), remarks=["2 nodes are called x"],
    )  # fmt: skip


def test_a_cluster_fits_80_columns() -> None:
    busy = PeerTraffic(bytes_in=999 << 30, bytes_out=123 << 30, failures=3, busy=12_345, wrong=1, cooling=True)
    text = shown(status(member(1), member(22, busy), member(123, placing=False), problem="etcd does not answer"))
    assert [line for line in text.splitlines() if len(line) > 80] == []
    for said in (
        "cluster training, known from etcd; ring epoch 123456", "problem: etcd does not answer", "gpu-node-001*",
        "12.3 %", "999 GiB", "123 GiB", "draining", "10.77.0.22:7380", "note: 2 nodes are called x",
        "gpu-node-022: does not answer, and is not asked for a while, 3 requests failed,",
    ):  # fmt: skip
        assert said in text, text


def test_what_nodes_say_of_themselves_fits_too() -> None:
    tiers = [TierUse("memory", 1023 << 30, 999 << 30), TierUse("ssd", 1023 << 40, 999 << 40)]
    said = NodeCounters(tiers=tiers, jobs=3, consumers=24, origin_bytes=999 << 40, problems=["dataset x: s3://a here"])
    first, second, third = member(1), member(22), member(123)
    found = status(
        msgspec.structs.replace(first, counters=msgspec.structs.replace(said, received={second.id: 77 << 30})),
        msgspec.structs.replace(second, counters=said),
        msgspec.structs.replace(third, counters=NodeCounters(problem="no answer within 2 s")),
    )
    text = shown(found)
    assert [line for line in text.splitlines() if len(line) > 80] == []
    for expected in (
        "999 GiB / 0.999 TiB", "999 TiB / 1023 TiB", "77 GiB", "from each other", "gpu-node-022: dataset x: s3://a",
        "gpu-node-123 says nothing of itself: no answer within 2 s",
    ):  # fmt: skip
        assert expected in text, text


def test_no_cluster() -> None:
    nothing = ClusterStatus(name="", source="none", me="", epoch=0, age=0.0, problem="")
    assert shown(nothing) == "this node is in no cluster; see [cluster] in its configuration\n"
    assert list(brief(ClusterBrief())) == []


def test_a_line_of_status() -> None:
    found = ClusterBrief(name="c", source="etcd", epoch=7, states={"away": 1, "active": 3}, problem="etcd is away")
    assert list(brief(found)) == [
        "cluster    c, from etcd: 3 active, 1 away; ring epoch 7",
        "           etcd is away",
    ]
