"""What `cachectl scale-hint` says of nodes and jobs."""

import math

import numpy as np
import pytest
from rich.console import Console

from cachefs.cluster_messages import NodeCounters, ScaleNode, ScaleStatus, TierUse
from cachefs.planning.cluster.scale import SnapshotDemand
from cachefs.planning.sequences.plan import Plan
from cachefs_cluster.membership.status import scaled_nodes
from cachefs_cluster.membership.view import ClusterView, NodeRecord
from cachefs_daemon.reporting.scaling import planned_demands, scale_status
from cachefs_tools.cachectl.cluster import describe_scale
from tests.simulated import space_of

GIB = 1 << 30
TWO = [ScaleNode("a", 60 * GIB, 50 * GIB), ScaleNode("b", 60 * GIB, 40 * GIB)]


def text(found: ScaleStatus) -> str:
    console = Console(width=200, color_system=None)
    with console.capture() as captured:
        console.print(*describe_scale(found), sep="\n")
    return captured.get()


def test_what_is_lacking_is_told_with_one_more_and_one_fewer() -> None:
    found = scale_status(TWO, [SnapshotDemand(180 * GIB, 9, 600.0)])
    assert (found.needed, found.nodes_needed, found.snapshots) == (180 * GIB, 4, 1)
    assert found.one_more.kept == 180 * GIB
    said = text(found)
    assert "2 nodes with room for 120 GiB, of which 90 GiB are taken" in said
    assert "published jobs read 180 GiB of 1 snapshot; to keep all of it takes 4 nodes, 2 more" in said
    rows = [line.split() for line in said.splitlines() if line.strip()[:1].isdigit()][1:]
    assert [row[0] for row in rows] == ["1", "2*", "3"]


def test_what_nobody_knows_is_no_number() -> None:
    found = scale_status([ScaleNode("a", 0, 0, "it does not answer"), *TWO], [SnapshotDemand(300 * GIB, math.inf, 0.0)])
    assert found.now.capacity == 180 * GIB, "one that does not answer counts as the others"
    assert found.now.origin_bytes is None
    said = text(found)
    assert "?" in said
    assert "the state of a is unknown: it does not answer" in said


@pytest.mark.parametrize(
    ("needed", "words"), [(0, "nothing is needed"), (10, "1 node would be enough"), (110, "all of it fits\n")]
)
def test_enough_is_said_so(needed: int, words: str) -> None:
    assert words in text(scale_status(TWO, [SnapshotDemand(needed * GIB, 2, 1.0)]))


def test_without_any_capacity_nothing_can_be_said() -> None:
    assert "is not known" in text(scale_status([ScaleNode("a", 0, 0, "starting")], [SnapshotDemand(GIB, 1, 1.0)]))


def test_nodes_are_those_that_place() -> None:
    records = tuple(
        NodeRecord(f"{number:016x}", "", f"node-{number}", "h", 1, 2, memory=GIB, ssd=GIB) for number in range(3)
    )
    view = ClusterView(1, records[0].id, records, (records[0].id, records[1].id), "etcd", "")
    said = {records[0].id: NodeCounters(tiers=[TierUse("memory", 5 * GIB, 4 * GIB), TierUse("ssd", GIB, 1)])}
    first, second = scaled_nodes(view, said)
    assert (first.name, first.capacity, first.used, first.problem) == ("node-0", 6 * GIB, 4 * GIB + 1, "")
    assert (second.capacity, second.used, second.problem) == (2 * GIB, 0, "it was not queried")


def test_a_node_alone_knows_what_its_own_consumers_read() -> None:
    plan = Plan()
    plan.add_space(space_of([100] * 1000))
    assert planned_demands(plan) == []
    plan.set_epoch("one", "space", 0, np.arange(500))
    plan.set_epoch("two", "space", 3, np.arange(250, 750))
    plan.set_progress("one", 0, 100, 50.0)
    (demand,) = planned_demands(plan)
    assert demand == SnapshotDemand(750 * 100, math.inf, 0.5)
