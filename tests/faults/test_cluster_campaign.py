"""The fault campaign of a cluster: daemons die, drain at once, lose each other; datasets change; readers only wait.

Promise 3: nothing wrong is read, nothing hangs, and the cluster is whole again after each event. `make soak` runs it
for an hour ($CACHEFS_CAMPAIGN_SECONDS is another length), every test run a few events once. $CACHEFS_CAMPAIGN names a
directory for the log.
"""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from cachefs.cluster_messages import DrainRequest, DrainStatus
from cachefs.errors import CachefsError
from cachefs.messages import DatasetName, Selection
from cachefs.rpc import DATASET_REFRESH, DATASET_REMOVE, DRAIN, EVICT
from cachefs_bench.lab.node import LabNode
from tests.faults.campaign_cluster import DATASET, SETTLED, CampaignCluster, campaign_cluster
from tests.servers.s3 import S3Server

SOAK_SECONDS: Final = float(os.environ.get("CACHEFS_CAMPAIGN_SECONDS", "3600"))
# Events of the short campaign: one of each kind.
FEW: Final = ("kill_daemon", "drain_all_at_once", "partition")
# What happens (nothing: all events), seconds of the campaign, and the longest that anything is stopped or cut off.
LENGTHS: Final = [
    pytest.param(FEW, 0.0, 0.5, id="small"),
    pytest.param((), SOAK_SECONDS, 20.0, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(SOAK_SECONDS + 1800)]),
]
EXTRA: Final = "extra"


class ClusterCampaign:
    """What may happen. Each event ends with everything in place again, but for what the cluster mends by itself."""

    def __init__(self, cluster: CampaignCluster, rng: random.Random, longest: float) -> None:
        self._cluster = cluster
        self._rng = rng
        self._longest = longest
        self._refreshed = 0

    @property
    def events(self) -> list[Callable[[], None]]:
        return [
            self.kill_daemon, self.kill_two_daemons, self.stop_daemon, self.drain, self.drain_two_at_once,
            self.drain_all_at_once, self.drain_and_undo, self.kill_a_daemon_that_drains, self.partition,
            self.cut_off_everything, self.etcd_away, self.refresh, self.add_and_remove,
            self.add_at_once_and_remove, self.evict,
        ]  # fmt: skip

    def pass_time(self, seconds: float) -> None:
        """Watch the readers meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._cluster.check()
            time.sleep(0.05)

    # --- daemons --------------------------------------------------------------------------------------------------

    def kill_daemon(self) -> None:
        self._restart(self._some_node())

    def kill_two_daemons(self) -> None:
        self._restart(*self._rng.sample(self._cluster.nodes, 2))

    def stop_daemon(self) -> None:
        node = self._some_node()
        node.suspend()
        try:
            self.pass_time(self._some())
        finally:
            node.resume()

    # --- drains ---------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """One node leaves, and is started anew."""
        node = self._some_node()
        self._drain_at_once(node)
        self._wait_until_left(node)
        self._restart(node)

    def drain_two_at_once(self) -> None:
        nodes = self._rng.sample(self._cluster.nodes, 2)
        self._drain_at_once(*nodes)
        for node in nodes:
            self._wait_until_left(node)
        self._restart(*nodes)

    def drain_all_at_once(self) -> None:
        """All but one leave."""
        nodes = self._cluster.nodes
        self._drain_at_once(*nodes)
        until = time.monotonic() + SETTLED
        left: list[LabNode] = []
        while len(left) < len(nodes) - 1:
            self._cluster.check()
            left = [node for node in nodes if (said := self._told_to_drain(node)) is not None and said.has_left]
            assert time.monotonic() < until, f"only {[node.name for node in left]} have left"
            time.sleep(0.1)
        self.pass_time(1.0)
        stays = [node for node in nodes if node not in left]
        said = self._told_to_drain(stays[0])
        assert said is None, f"the last node has left: {said}"
        self._restart(*left)

    def drain_and_undo(self) -> None:
        node, other = self._rng.sample(self._cluster.nodes, 2)
        self._drain_at_once(node)
        self.pass_time(self._some() / 10)
        with suppress(CachefsError):  # it may have left by now
            other.client.call(DRAIN, DrainRequest(node=node.name, undo=True), timeout=30)
        said = self._cluster.status(node)
        if said is None or [one.state for one in said.members] != ["active"] * len(self._cluster.nodes):
            self._restart(node)

    def kill_a_daemon_that_drains(self) -> None:
        node = self._some_node()
        self._drain_at_once(node)
        self._restart(node)

    # --- the network ----------------------------------------------------------------------------------------------

    def partition(self) -> None:
        """A node reaches no other node, but etcd and the origin."""
        self._cut(hub=False)

    def cut_off_everything(self) -> None:
        self._cut(hub=True)

    def etcd_away(self) -> None:
        """Nothing says who is a member, while a daemon is started anew."""
        etcd = self._cluster.cluster.etcd
        assert etcd is not None
        etcd.stop()
        try:
            self._restart(self._some_node())
        finally:
            etcd.start()

    # --- datasets -------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """There are more files, and mounts stay with those that they have."""
        self._refreshed += 1
        cluster = self._cluster
        cluster.server.put(cluster.bucket, {f"more/{self._refreshed}.bin": b"more"})
        for _ in self._some_node().client.stream_responses(DATASET_REFRESH, DatasetName(name=DATASET), timeout=SETTLED):
            cluster.check()

    def add_and_remove(self) -> None:
        self._add_and_remove(self._some_node())

    def add_at_once_and_remove(self) -> None:
        """Two nodes have the same name at once; it is one dataset then."""
        self._add_and_remove(*self._rng.sample(self._cluster.nodes, 2))

    def evict(self) -> None:
        with suppress(CachefsError):
            self._some_node().client.call(EVICT, Selection(dataset=DATASET), timeout=60)

    # --- how ------------------------------------------------------------------------------------------------------

    def _some(self) -> float:
        return self._rng.uniform(self._longest / 10, self._longest)

    def _some_node(self) -> LabNode:
        return self._rng.choice(self._cluster.nodes)

    def _restart(self, *nodes: LabNode) -> None:
        for node in nodes:
            node.kill_daemon()
        self.pass_time(self._some() / 3)
        self._cluster.restart(*nodes)

    def _cut(self, *, hub: bool) -> None:
        self._cluster.bridge.cut_host(self._rng.randrange(len(self._cluster.nodes)), hub=hub)
        try:
            self.pass_time(self._some())
        finally:
            self._cluster.bridge.restore_links()

    def _told_to_drain(self, node: LabNode) -> DrainStatus | None:
        """Tell a node to drain. None: it says no."""
        try:
            return node.client.call(DRAIN, DrainRequest(node=""), timeout=30)
        except CachefsError:
            return None

    def _drain_at_once(self, *nodes: LabNode) -> None:
        gate = threading.Barrier(len(nodes))

        def go(node: LabNode) -> None:
            gate.wait()
            self._told_to_drain(node)

        threads = [threading.Thread(target=go, args=(node,)) for node in nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    def _wait_until_left(self, node: LabNode) -> None:
        self._cluster.wait(
            lambda: (said := self._told_to_drain(node)) is not None and said.has_left, f"{node.name} has left"
        )

    def _add_and_remove(self, *nodes: LabNode) -> None:
        cluster = self._cluster
        threads = [threading.Thread(target=cluster.add, args=(node, EXTRA)) for node in nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SETTLED)
        for node in cluster.nodes:
            cluster.wait(lambda node=node: cluster.knows(node, EXTRA), f"{node.name} knows what was added")
        self._some_node().client.call(DATASET_REMOVE, DatasetName(name=EXTRA), timeout=60)
        for node in cluster.nodes:
            cluster.wait(lambda node=node: not cluster.knows(node, EXTRA), f"{node.name} knows what was removed")


@pytest.fixture
def cluster(tmp_path: Path, rclone: S3Server, request: pytest.FixtureRequest) -> Iterator[CampaignCluster]:
    # In the short campaign a read is always under way or begins soon, and few processors are shared with other tests.
    bucket, pause = ("campaign-soak", 0.01) if "soak" in request.node.name else ("campaign-small", 0.05)
    with campaign_cluster(tmp_path, rclone, bucket, 26, pause) as made:
        yield made


@pytest.mark.parametrize(("few", "seconds", "longest"), LENGTHS)
def test_readers_of_a_cluster_only_wait(
    cluster: CampaignCluster, tmp_path: Path, few: Sequence[str], seconds: float, longest: float
) -> None:
    rng = random.Random(int(seconds))
    campaign = ClusterCampaign(cluster, rng, longest)
    kept = Path(os.environ.get("CACHEFS_CAMPAIGN", tmp_path))
    kept.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    waiting = [event for event in rng.sample(campaign.events, len(campaign.events)) if not few or event.__name__ in few]
    with (kept / "cluster-campaign.log").open("w", buffering=1) as log:
        while waiting or time.monotonic() - began < seconds:
            event = waiting.pop() if waiting else rng.choice(campaign.events)
            log.write(f"{time.monotonic() - began:7.1f} {event.__name__} {_shown(cluster)}\n")
            event()
            cluster.settle()
            campaign.pass_time(rng.uniform(0, longest / 4))
        log.write(f"{time.monotonic() - began:7.1f} over {_shown(cluster)}\n")
    assert not [node.name for node in cluster.nodes if cluster.knows(node, EXTRA)]
    for node in cluster.nodes:
        said = node.log.read_text(errors="replace")
        assert "Traceback" not in said, said[said.index("Traceback") - 500 :][:3000]


def _shown(cluster: CampaignCluster) -> str:
    return " ".join(f"{one.node.name}: {one.right} reads, longest {one.longest:.1f} s;" for one in cluster.readers)
