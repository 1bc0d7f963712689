"""Nodes with two network cards each, on two bridges: blocks come through both cards, and through one while the other is
dead, whatever the membership."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachefs.cluster_messages import MemberStatus
from cachefs.messages import DatasetAddRequest, Empty
from cachefs.rpc import CLUSTER, DATASET_ADD
from cachefs_bench.lab.bridge import Bridge, bridge_network
from cachefs_bench.lab.cluster import PORT, ClusterSettings, LabCluster, MembershipSource, create_cluster
from cachefs_bench.lab.node import LabNode
from cachefs_bench.lab.scratch_node import NodeSettings, TierSettings
from cachefs_tools.cachectl.cluster import describe
from tests.cluster.nodes import DATASET, knows
from tests.waiting import until

SIZE, FILES = 256 << 10, 160
TOTAL = SIZE * FILES
MEGABITS = 200


@contextmanager
def two_rails(
    work: Path, source: MembershipSource, listens: Sequence[object] = ()
) -> Iterator[tuple[Bridge, LabCluster, Path]]:
    """Two nodes, with two links each, and a dataset of which the first node is the home. listens: [cluster] listen of
    each node, where it is not both of its addresses."""
    files = work / "files"
    files.mkdir()
    for number in range(FILES):
        (files / f"{number:03}").write_bytes(os.urandom(SIZE))
    tier = TierSettings(2 * TOTAL, 8 << 20)
    settings = ClusterSettings(
        NodeSettings(tier, tier, 4 << 20, read_deadline=30, guess=False), source, weights={"node1": 1e6, "node2": 1e-3}
    )
    with bridge_network(2, rails=2) as bridge:
        for rail in range(2):
            bridge.limit_bandwidth(1, MEGABITS, rail=rail)
        with create_cluster(work, settings, bridge.hosts, bridge.hub) as cluster:
            cluster.listen = listens or [
                [f"{bridge.address(number, rail)}:{PORT}" for rail in range(2)] for number in range(2)
            ]
            cluster.start_nodes()
            first, second = cluster.nodes
            add = DatasetAddRequest(name=DATASET, url=f"file://{files}")
            for _ in first.client.stream_responses(DATASET_ADD, add, timeout=60):
                pass
            for node in cluster.nodes:
                until(lambda node=node: knows(node), f"{node.name} knows the dataset")  # type: ignore[misc]
                node.mount(DATASET)
            assert read_all(first, files) == []
            until(lambda: member(second, first).state == "active", "both are active")
            yield bridge, cluster, files


def member(node: LabNode, other: LabNode) -> MemberStatus:
    """What the node knows of the other one."""
    members = node.client.call(CLUSTER, Empty(), timeout=10).members
    return next(one for one in members if one.name == other.name)


def read_all(node: LabNode, files: Path, numbers: Sequence[int] = range(FILES)) -> list[str]:
    """Read files through a node: those that are wrong, or cannot be read."""
    wrong = []
    for name in (f"{number:03}" for number in numbers):
        try:
            if (node.dataset_path / name).read_bytes() != (files / name).read_bytes():
                wrong.append(name)
        except OSError as error:
            wrong.append(f"{name}: {error}")
    return wrong


def text(lines: object) -> str:
    return "\n".join(str(line) for line in lines)  # type: ignore[attr-defined]


def test_blocks_come_through_both_cards_and_through_one_while_the_other_is_dead(tmp_path: Path) -> None:
    with two_rails(tmp_path, "static") as (bridge, cluster, files):
        first, second = cluster.nodes
        until(lambda: member(second, first).rails == [bridge.address(0, 1)], "the node tells its second address")
        before = [bridge.received_bytes(1, rail) for rail in range(2)]
        half = range(FILES // 2)
        assert read_all(second, files, half) == []
        came = [bridge.received_bytes(1, rail) - before[rail] for rail in range(2)]
        assert sum(came) >= TOTAL / 2
        assert min(came) >= TOTAL / 2 / 4, "each of two equal links has its part"
        traffic = member(second, first).traffic
        assert {rail.card for rail in traffic.rails} == {"eth0", "eth1"}
        assert sum(rail.bytes_in for rail in traffic.rails) == traffic.bytes_in
        assert second.status().peers.cards.keys() == {"eth0", "eth1"}

        bridge.set_cable(1, 1, plugged=False)
        assert read_all(second, files, range(FILES // 2, FILES)) == []
        until(lambda: second.status().peers.rails_down == 1, "the dead rail is noticed")
        traffic = member(second, first).traffic
        assert (traffic.failures, traffic.cooling) == (0, False)
        assert [bool(rail.problem) for rail in traffic.rails] == [False, True]
        shown = second.client.call(CLUSTER, Empty(), timeout=10)
        assert f"node1: not used: node node1 at {bridge.address(0, 1)}:{PORT}" in text(describe(shown))

        bridge.set_cable(1, 1, plugged=True)
        until(lambda: second.status().peers.rails_down == 0, "the rail is used again", seconds=60)


def test_a_node_whose_first_card_is_dead_is_alive_and_gives_blocks(tmp_path: Path) -> None:
    """Its control endpoint is at the first address, so that only blocks are left."""
    with two_rails(tmp_path, "static") as (bridge, cluster, files):
        first, second = cluster.nodes
        until(lambda: member(second, first).rails == [bridge.address(0, 1)], "the node tells its second address")
        bridge.set_cable(0, 0, plugged=False)
        before = member(second, first).traffic.bytes_in
        assert read_all(second, files) == []
        until(lambda: second.status().peers.rails_down == 1, "the dead rail is noticed")
        until(lambda: "does not answer polls" in second.log.read_text(), "the control endpoint is missed")
        assert member(second, first).state == "active"
        assert member(second, first).traffic.bytes_in - before >= TOTAL // 2, "most did not come from the origin"


@pytest.mark.parametrize("alone", [0, 1])
def test_a_node_with_one_card_works_with_a_node_that_has_two(tmp_path: Path, alone: int) -> None:
    """As a node of the last release does, which knows one address."""
    listens: list[object] = [[f"10.77.{rail}.{number + 1}:{PORT}" for rail in range(2)] for number in range(2)]
    listens[alone] = f"10.77.0.{alone + 1}:{PORT}"
    with two_rails(tmp_path, "etcd", listens) as (_, cluster, files):
        first, second = cluster.nodes
        assert member(second, first).rails == ([] if alone == 0 else ["10.77.1.1"])
        assert read_all(second, files) == []
        assert member(second, first).traffic.failures == 0
