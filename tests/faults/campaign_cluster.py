"""The cluster of the fault campaign: three daemons on hosts of a network, with a reader of random files on each."""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cachefs.cluster_messages import ClusterStatus
from cachefs.errors import CachefsError
from cachefs.messages import DatasetAddRequest, Empty, OriginOptions
from cachefs.rpc import CLUSTER, DATASET_ADD, DATASET_LIST
from cachefs_bench.lab.bridge import Bridge, bridge_network
from cachefs_bench.lab.cluster import ClusterSettings, LabCluster, create_cluster
from cachefs_bench.lab.node import LabNode
from cachefs_bench.lab.scratch_node import NodeSettings, S3Credentials, TierSettings
from cachefs_bench.lab.slow_link import LinkLimits
from cachefs_bench.lab.throttle import run_throttle
from tests.servers.s3 import S3Server
from tests.waiting import until

NODES: Final = 3
FILES: Final = 120
READ_DEADLINE: Final = 60.0
# Seconds after which a read hangs, and after which the cluster should be as before an event.
HANGS: Final = READ_DEADLINE + 30.0
SETTLED: Final = 180.0
DATASET: Final = "set"
_BLOCK: Final = 128 << 10
_TIER: Final = TierSettings(2 << 20, 1 << 20)  # less than all files have


@dataclass(slots=True)
class NodeReader:
    """A thread that reads random files through the mount of a node, and compares each byte."""

    node: LabNode
    files: dict[str, bytes]
    rng: random.Random
    pause: float  # seconds between two reads
    right: int = 0
    longest: float = 0.0
    # What was wrong: it stops there.
    problem: str = ""
    _began: float = 0.0  # monotonic seconds when the read under way began; 0: there is none
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"reader of {self.node.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()

    def check(self) -> None:
        """Fail where something wrong was read, or a read hangs."""
        assert not self.problem, f"{self.node.name}: {self.problem}"
        began = self._began
        waited = time.monotonic() - began if began else 0.0
        assert waited < HANGS, f"{self.node.name}: a read hangs ({waited:.0f} s)"

    def _run(self) -> None:
        names = sorted(self.files)
        while not self._ended.wait(self.pause):
            name = self.rng.choice(names)
            self._began = time.monotonic()
            try:
                found = self._read(name)
            except OSError as error:
                if not self._ended.is_set():
                    self.problem = f"{name}: {error} after {time.monotonic() - self._began:.1f} s"
                return
            self.longest = max(self.longest, time.monotonic() - self._began)
            self._began = 0.0
            if found != self.files[name]:
                self.problem = f"{name}: {len(found)} bytes, which are wrong"
                return
            self.right += 1

    def _read(self, name: str) -> bytes:
        content = b""
        file = os.open(self.node.dataset_path / name, os.O_RDONLY)
        try:
            while part := os.read(file, 1 << 20):
                content += part
            with suppress(OSError):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
        return content


@dataclass(slots=True)
class CampaignCluster:
    """What the campaign plays with."""

    bridge: Bridge
    cluster: LabCluster
    server: S3Server
    bucket: str
    options: OriginOptions
    readers: list[NodeReader]

    @property
    def nodes(self) -> list[LabNode]:
        return list(self.cluster.nodes)

    def check(self) -> None:
        """Fail where something wrong was read, something hangs, or a daemon has ended by itself."""
        for reader in self.readers:
            reader.check()

    def restart(self, *nodes: LabNode) -> None:
        """Start daemons that have ended. Raises CachefsError where one does not start."""
        for node in nodes:
            node.start_daemon(self.cluster.node_settings(node))
        for node in nodes:
            node.wait_ready()

    def add(self, node: LabNode, name: str) -> str:
        """Add a dataset by that name on a node. Returns why not; "" where it is added."""
        request = DatasetAddRequest(name=name, url=f"s3://{self.bucket}", options=self.options)
        try:
            for _ in node.client.stream_responses(DATASET_ADD, request, timeout=SETTLED):
                self.check()
        except CachefsError as error:
            return str(error)
        return ""

    def knows(self, node: LabNode, name: str) -> bool:
        """Return whether a node has a dataset of that name."""
        with suppress(CachefsError):
            found = node.client.call(DATASET_LIST, Empty(), timeout=10).datasets
            return any(one.name == name for one in found)
        return False

    def status(self, node: LabNode) -> ClusterStatus | None:
        """Return what a node says of the cluster; None where it says nothing."""
        with suppress(CachefsError):
            return node.client.call(CLUSTER, Empty(), timeout=10)
        return None

    def settle(self) -> None:
        """Wait until each node sees all nodes active, each reader has read again, and no name is left over."""
        self.wait(lambda: all(self._is_complete(node) for node in self.nodes), "the cluster is whole again")
        before = [reader.right for reader in self.readers]
        for reader, right in zip(self.readers, before, strict=True):
            self.wait(lambda reader=reader, right=right: reader.right > right + 5, f"{reader.node.name} reads on")

    def _is_complete(self, node: LabNode) -> bool:
        status = self.status(node)
        members = status.members if status is not None else []
        return [one.state for one in members if one.placing] == ["active"] * NODES == [one.state for one in members]

    def wait(self, reached: Callable[[], object], what: str) -> None:
        """Wait for it, and look after the readers meanwhile."""

        def holds() -> object:
            self.check()
            return reached()

        until(holds, lambda: f"{what}; { {node.name: self.status(node) for node in self.nodes} }", seconds=SETTLED)


@contextmanager
def campaign_cluster(work: Path, server: S3Server, bucket: str, seed: int, pause: float) -> Iterator[CampaignCluster]:
    """Three nodes that know of each other by etcd, and have a dataset mounted, which is read on each.

    pause: seconds between two reads of a node.
    """
    rng = random.Random(seed)
    files = {f"{number % 7}/{number:03}.bin": rng.randbytes(20_000 + 997 * number) for number in range(FILES)}
    server.create_bucket(bucket)
    server.put(bucket, files)
    settings = ClusterSettings(
        NodeSettings(_TIER, TierSettings(4 << 20, 1 << 20), _BLOCK, read_deadline=READ_DEADLINE, guess=False),
        "etcd",
        {"grace": 5},
    )
    with ExitStack() as stack:
        bridge = stack.enter_context(bridge_network(NODES))
        listening = stack.enter_context(bridge.hub.listen())
        throttle = stack.enter_context(run_throttle(server.endpoint, LinkLimits(), work / "throttle.log", listening))
        account = S3Credentials(server.access_key, server.secret_key)
        cluster = stack.enter_context(create_cluster(work, settings, list(bridge.hosts), bridge.hub, account))
        cluster.start_nodes()
        options = OriginOptions(endpoint_url=throttle.endpoint, region=server.region, addressing_style="path")
        readers = [NodeReader(node, files, random.Random(rng.random()), pause) for node in cluster.nodes]
        found = CampaignCluster(bridge, cluster, server, bucket, options, readers)
        assert not found.add(cluster.nodes[0], DATASET)
        for node in cluster.nodes:
            found.wait(lambda node=node: found.knows(node, DATASET), f"{node.name} knows the dataset")
            node.mount(DATASET)
        try:
            for reader in readers:
                reader.start()
            found.settle()
            yield found
        finally:
            bridge.restore_links()
            for reader in readers:
                reader.stop()
            for node in cluster.nodes:
                node.resume()
