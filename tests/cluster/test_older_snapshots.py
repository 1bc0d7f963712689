"""A job goes on with the snapshot that it began with, while its dataset is refreshed and nodes join and leave."""

from pathlib import Path

import pytest

from cachefs.messages import DatasetName, DatasetView, Empty
from cachefs.rpc import CLUSTER, DATASET_LIST, DATASET_REFRESH
from cachefs_bench.lab.job import JobSettings, LabJob, start_job
from cachefs_bench.lab.node import LabNode
from cachefs_bench.lab.scratch_node import TierSettings
from cachefs_cluster.search.fetches_for_peers import AWAITED_SECONDS
from tests.cachectl import cachectl as run_cachectl
from tests.cluster.nodes import DATASET, SECONDS, Shape, SmallCluster, knows, shaped_cluster
from tests.servers.s3 import S3Server
from tests.waiting import until

FILES, SIZE = 300, 20_000
# Of each node: four of them hold the dataset once and a half, two do not hold it.
BUDGET = int(0.42 * FILES * 24_576)
# Requests of one epoch that may go to the origin: a block is evicted now and then that another node was to take.
FEW = FILES // 20
# Epochs within which these become few.
MOST_EPOCHS = 10


@pytest.mark.soak
def test_a_job_reads_an_older_snapshot_as_before_while_datasets_and_members_change(
    tmp_path: Path, rclone: S3Server
) -> None:
    tier, none = TierSettings(BUDGET, 1 << 20), TierSettings(0)
    shape = Shape(
        4, spare=1, source="etcd", keys={"grace": 600}, files=FILES, size=SIZE, memory=tier, ssd=none, mounted=(2, 3),
        samples=True,
    )  # fmt: skip
    with shaped_cluster(tmp_path, rclone, "older-snapshots", shape) as small:
        one, two, three, four, five = small.nodes
        read = current(three)
        with start_job(JobSettings("train", DATASET, FILES, 4 * MOST_EPOCHS, rate=100.0), [three, four]) as job:
            assert settles(small, job)
            for number in range(3):
                rclone.put("older-snapshots", {f"new/{number}": b"new"})
                *_, last = one.client.stream_responses(DATASET_REFRESH, DatasetName(name=DATASET), timeout=SECONDS)
                behind = {(mount.node, mount.mountpoint) for mount in last.behind_elsewhere}
                assert behind == {(node.name, str(node.mountpoint)) for node in (three, four)}
                fresh = current(one).snapshot
                until(lambda: {current(node).snapshot for node in small.nodes[:4]} == {fresh}, "all follow")  # noqa: B023
            assert all(has(node, read) for node in small.nodes[:4])
            assert settles(small, job)

            five.start(small.cluster.node_settings(five))
            until(lambda: knows(five) and has(five, read), "the node that joins has the older snapshot")
            assert settles(small, job)

            cachectl(two, "drain")
            two.stop()
            assert settles(small, job)

            results = job.results()
            assert sum(result.errors + result.wrong for result in results) == 0
            assert max(result.longest for result in results) < AWAITED_SECONDS
            assert "is not on this node" not in told(one)
            refused = cachectl(one, "dataset", "rm", DATASET, "--yes", fails=True)
            assert "is mounted at" in refused


def settles(small: SmallCluster, job: LabJob) -> bool:
    """Do two epochs in a row cost the origin few requests, sooner or later? A busy machine makes a node late now and
    then. Where nodes had forgotten the snapshot, no epoch cost less than a tenth of its reads."""
    few = 0
    for _ in range(MOST_EPOCHS):
        began, number = small.origin(), 1 + max((result.epoch for result in job.results()), default=-1)
        job.run_epoch(number, 3 * SECONDS)
        few = few + 1 if small.origin() - began <= FEW else 0
        if few == 2:
            return True
    return False


def current(node: LabNode) -> DatasetView:
    return next(one for one in node.client.call(DATASET_LIST, Empty()).datasets if one.name == DATASET)


def has(node: LabNode, view: DatasetView) -> bool:
    return (node.work / "state" / "snapshots" / f"{view.snapshot}.snapshot").exists()


def told(node: LabNode) -> str:
    """What all nodes say that is wrong."""
    members = node.client.call(CLUSTER, Empty()).members
    return "\n".join(line for one in members if one.counters is not None for line in one.counters.problems)


def cachectl(node: LabNode, *words: str, fails: bool = False) -> str:
    done = run_cachectl(node.socket, *words)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr if fails else done.stdout
