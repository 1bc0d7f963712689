"""Nodes join, drain, leave, die and come back: what they keep comes from each other, and not from the origin."""

import os
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from cachefs.cluster_messages import DrainRequest, DrainStatus
from cachefs.messages import Empty, Selection
from cachefs.rpc import CACHED, CLUSTER, DRAIN
from cachefs_bench.cluster.membership_change import homes_by_path
from cachefs_bench.lab.cluster import ssd_blocks
from cachefs_bench.lab.node import LabNode
from cachefs_bench.lab.scratch_node import TierSettings
from tests.cachectl import cachectl as run_cachectl
from tests.cluster.nodes import DATASET, Shape, SmallCluster, shaped_cluster
from tests.servers.s3 import S3Server
from tests.waiting import until

FILES = 60
# Slow enough to look at: what a node of three gives or takes over comes in some 2 s, in several batches.
SLOW = {"bandwidth": 200_000, "grace": 600}


def test_a_node_that_joins_fills_up_from_peers_and_one_that_drains_leaves_nothing_behind(
    tmp_path: Path, rclone: S3Server
) -> None:
    shape = Shape(2, spare=1, source="etcd", files=FILES, keys=SLOW)
    with shaped_cluster(tmp_path, rclone, "join-and-drain", shape) as small:
        one, two, three = small.nodes
        read_at_home(small, [one, two])
        began = small.origin()

        small.start(three)
        until(lambda: len(placed(three)) == 3, "it counts for placement")
        until(lambda: blocks(three) >= share(three, "node3"), "it has filled up")
        assert small.origin() == began

        # It is told to do so more than once.
        said = cachectl(three, "drain", "node1").splitlines()
        assert re.fullmatch(r"still to be taken over: [\d,]+ blocks? \(.*\); waiting for .*", said[0])
        assert (
            said[-1]
            == "node1 holds no block that other nodes need, and has left the cluster; its daemon may be stopped"
        )
        assert cachectl(one, "drain").splitlines() == [said[-1]]
        left = {"node2": "active", "node3": "active"}
        until(lambda: members(two) == members(three) == left, "node1 is no member")
        # It rests: it asks nobody, is refused by nobody, and serves its readers.
        assert members(one) == {"node1": "draining"}
        assert one.log.read_text().count("has left the cluster") == 1
        assert small.wrong(one, list(small.files)[:20]) == []
        one.stop()
        began = small.origin()
        assert small.wrong(two) == []
        assert small.wrong(three) == []
        assert small.origin() == began

        # The last one stays, and says so.
        cachectl(two, "drain", "node3")
        assert "nothing is drained" in cachectl(two, "drain", fails=True)
        until(lambda: members(two) == {"node2": "active"}, "node3 is no member")
        assert small.wrong(two) == []
        # Both come back, and use what they had.
        for node in (one, three):
            node.kill()
            small.start(node)
        until(lambda: members(two) == dict.fromkeys(("node1", "node2", "node3"), "active"), "they are back")
        for node in small.nodes:
            assert small.wrong(node) == []
        assert small.origin() == began


@pytest.mark.soak
def test_a_node_that_dies_comes_back_with_its_ssd_and_gets_the_rest_from_peers(
    tmp_path: Path, rclone: S3Server
) -> None:
    shape = Shape(
        3, files=FILES, size=40_000, keys={"grace": 2}, memory=TierSettings(2 << 20, 1 << 20),
        ssd=TierSettings(64 << 20, 1 << 20),
    )  # fmt: skip
    with shaped_cluster(tmp_path, rclone, "die-and-come-back", shape) as small:
        one, two, three = small.nodes
        read_at_home(small, small.nodes)
        read, part = small.origin(), share(one, "node3")
        assert ssd_blocks(three) > 0
        three.reboot()
        assert small.wrong(one) == []
        assert small.wrong(two) == []
        again = small.origin() - read
        assert again <= part + FILES // 50
        assert small.wrong(one) == small.wrong(two) == []
        assert small.origin() == read + again

        small.start(three)
        assert ssd_blocks(three) > 0
        assert small.wrong(three) == []
        assert small.origin() == read + again, "what peers have comes from them"
        assert hits(three)["hits_ssd"] > 0


@pytest.mark.soak
def test_a_drain_is_given_up_or_cut_short_and_nothing_is_lost_that_another_one_has(
    tmp_path: Path, rclone: S3Server
) -> None:
    shape = Shape(3, source="etcd", files=FILES, keys={**SLOW, "bandwidth": 30_000})
    with shaped_cluster(tmp_path, rclone, "cut-short", shape) as small:
        one, two, three = small.nodes
        read_at_home(small, small.nodes)
        read = small.origin()
        assert not drain(one, "node3").done
        until(lambda: "node3" not in placed(one), "node3 is placed on no more")
        cachectl(two, "drain", "node3", "--undo")
        everybody = dict.fromkeys(("node1", "node2", "node3"), "active")
        until(lambda: members(one) == members(three) == everybody and placed(one) == everybody.keys(), "it stays")
        assert small.wrong(three) == []
        assert small.origin() == read

        part = share(one, "node3")
        until(lambda: drain(one, "node3").blocks > 0, "it drains again, and is not done")
        three.reboot()
        for node in (one, two):
            assert small.wrong(node) == []
        again = small.origin() - read
        assert again <= part + FILES // 50
        small.start(three)
        until(lambda: members(one) == members(three) == everybody, "it is back, and drains no more")
        for node in small.nodes:
            assert small.wrong(node) == []
        assert small.origin() == read + again


def cachectl(node: LabNode, *words: str, fails: bool = False) -> str:
    """What it says."""
    done = run_cachectl(node.socket, *words)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr + done.stdout


def drain(node: LabNode, name: str) -> DrainStatus:
    return node.client.call(DRAIN, DrainRequest(node=name))


def members(node: LabNode) -> dict[str, str]:
    return {one.name: one.state for one in node.client.call(CLUSTER, Empty()).members}


def placed(node: LabNode) -> set[str]:
    return {one.name for one in node.client.call(CLUSTER, Empty()).members if one.placing}


def blocks(node: LabNode) -> int:
    """That its tiers have of the dataset."""
    pages = node.client.stream_responses(CACHED, Selection(dataset=DATASET))
    return sum(any(file.cached) for page in pages for file in page.files)


def share(node: LabNode, name: str) -> int:
    """Blocks whose home is the node called that, as *node* sees it."""
    return Counter(homes_by_path(node, DATASET).values())[name]


def read_at_home(small: SmallCluster, nodes: Sequence[LabNode]) -> None:
    """Each block is on one node, and nowhere else."""
    until(lambda: all(len(placed(node)) == len(nodes) for node in nodes), "all nodes count for placement")
    homes = list(homes_by_path(nodes[0], DATASET).items())
    random.Random(1).shuffle(homes)
    for node in nodes:
        assert small.wrong(node, [os.fsdecode(path) for path, home in homes if home == node.name]) == []
    # A reader gets its bytes before they are in a tier.
    until(lambda: sum(map(blocks, nodes)) >= len(small.files), "the last blocks are in a tier")
    assert sum(map(blocks, nodes)) == len(small.files)


def hits(node: LabNode) -> Counter[str]:
    found: Counter[str] = Counter()
    for mount in node.status().mounts:
        found.update(mount.counters)
    return found
