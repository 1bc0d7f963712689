"""Small clusters for tests: on loopback, with a dataset in a real S3 server whose requests are counted."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cachefs_tools.lab.cluster import Cluster, ClusterSettings, made_cluster
from cachefs_tools.lab.host import LOOPBACK, until
from cachefs_tools.lab.node import Node
from cachefs_tools.lab.slow_link import Limits
from cachefs_tools.lab.throttle import Throttle, throttled
from cachefs_tools.scratch_config import NodeSettings, TierSettings
from cachefs_tools.scratch_node import Account

from cachefs.messages import DatasetAdd, Empty, OriginOptions
from cachefs.rpc import DATASET_ADD, DATASET_LIST
from tests.servers.s3 import S3Server

DATASET = "set"
SECONDS = 60.0
_ROOM = 32 << 20


@dataclass(frozen=True)
class SmallCluster:
    """Nodes that run, with the dataset mounted on each."""

    cluster: Cluster
    throttle: Throttle
    files: Mapping[str, bytes]

    @property
    def nodes(self) -> Sequence[Node]:
        return self.cluster.nodes

    def wrong(self, node: Node) -> list[str]:
        """Read all files through a node, and not out of the page cache: those that are wrong, or cannot be read."""
        found = []
        for name, content in self.files.items():
            try:
                file = os.open(node.mountpoint / name, os.O_RDONLY)
                try:
                    if os.read(file, len(content) + 1) != content:
                        found.append(name)
                    with suppress(OSError):
                        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(file)
            except OSError as error:
                found.append(f"{name}: {error}")
        return found


@contextmanager
def small_cluster(
    work: Path, server: S3Server, bucket: str, count: int, keys: Mapping[str, object]
) -> Iterator[SmallCluster]:
    """So many nodes that have each other in a list. keys: further ones of [cluster]."""
    files = {f"class{number % 3}/{number:03}.bin": os.urandom(20_000 + number) for number in range(48)}
    server.create_bucket(bucket)
    server.put(bucket, files)
    settings = ClusterSettings(NodeSettings(TierSettings(_ROOM), TierSettings(_ROOM), read_deadline=20), keys=keys)
    with ExitStack() as stack:
        throttle = stack.enter_context(throttled(server.endpoint, Limits(), work / "throttle.log"))
        account = Account(server.access_key, server.secret_key)
        cluster = stack.enter_context(made_cluster(work, settings, [LOOPBACK] * count, LOOPBACK, account))
        cluster.start()
        options = OriginOptions(endpoint_url=throttle.endpoint, region=server.region, addressing_style="path")
        add = DatasetAdd(name=DATASET, url=f"s3://{bucket}", options=options)
        for _ in cluster.nodes[0].client.stream(DATASET_ADD, add, timeout=SECONDS):
            pass
        for node in cluster.nodes:
            until(lambda node=node: knows(node), SECONDS, f"{node.name} knows the dataset")  # type: ignore[misc]
            node.mount(DATASET)
        yield SmallCluster(cluster, throttle, files)


def knows(node: Node) -> bool:
    """Has it heard of the dataset?"""
    return any(one.name == DATASET for one in node.client.call(DATASET_LIST, Empty()).datasets)
