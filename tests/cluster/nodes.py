"""Small clusters for tests: on loopback, with a dataset in a real S3 server whose requests are counted."""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cachefs.messages import DatasetAddRequest, Empty, OriginOptions
from cachefs.rpc import DATASET_ADD, DATASET_LIST
from cachefs_bench.lab.cluster import ClusterSettings, LabCluster, MembershipSource, create_cluster
from cachefs_bench.lab.host import LOOPBACK, LabHost
from cachefs_bench.lab.node import LabNode
from cachefs_bench.lab.scratch_node import NodeSettings, S3Credentials, TierSettings
from cachefs_bench.lab.slow_link import LinkLimits
from cachefs_bench.lab.throttle import Throttle, run_throttle
from cachefs_bench.sample_data import sample_name, write_samples
from cachefs_tools.child_programs import KILL_WITH_PARENT
from tests import daemon, mounting
from tests.servers.s3 import S3Server
from tests.waiting import until
from tests.warm_python import warm

DATASET = "set"
MODULES = {"cachefsd": daemon.MODULES, "mount.cachefs": mounting.MODULES}
SECONDS = 60.0
_ROOM = 32 << 20
_BLOCK, _SEGMENT = 128 << 10, 1 << 20
_TIER = TierSettings(_ROOM, _SEGMENT)


class WarmHost(LabHost):
    """This machine, where daemons and mounts are forked from processes that have their modules."""

    def start(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> "subprocess.Popen[Any]":
        server = warm(*MODULES[Path(command[0]).name])
        with log.open("ab") as output:
            return server.start(
                [*KILL_WITH_PARENT, sys.executable, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=environment,
            )  # fmt: skip


WARM_LOOPBACK = WarmHost(LOOPBACK.name, LOOPBACK.address)


@dataclass(frozen=True)
class SmallCluster:
    """Nodes that run, with the dataset mounted on each."""

    cluster: LabCluster
    throttle: Throttle
    files: Mapping[str, bytes]

    @property
    def nodes(self) -> Sequence[LabNode]:
        return self.cluster.nodes

    def mount(self, node: LabNode) -> None:
        """Mount the dataset, once the node knows it."""
        until(lambda: knows(node), f"{node.name} knows the dataset")
        node.mount(DATASET)

    def start(self, node: LabNode) -> None:
        """Start a node (again), with the dataset mounted."""
        node.start(self.cluster.node_settings(node))
        self.mount(node)

    def origin(self) -> int:
        """Requests to the origin by now."""
        return self.throttle.read_counters().requests

    def wrong(self, node: LabNode, names: Iterable[str] | None = None) -> list[str]:
        """Read files (None: all) through a node, and not out of the page cache: those that are wrong, or cannot be
        read."""
        found = []
        for name in self.files if names is None else names:
            content = self.files[name]
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


@dataclass(frozen=True)
class Shape:
    """What a small cluster is like."""

    nodes: int
    # Nodes that do not run yet.
    spare: int = 0
    source: MembershipSource = "static"
    # Further keys of [cluster], of all nodes.
    keys: Mapping[str, object] = field(default_factory=dict)
    # Files, and bytes of each; the budgets of a node's tiers.
    files: int = 48
    size: int = 20_000
    memory: TierSettings = _TIER
    ssd: TierSettings = _TIER
    policy: str = ""  # empty: the daemon's default
    # Numbers of the nodes that have the dataset mounted; None: all that run.
    mounted: Sequence[int] | None = None
    # Are the files samples, as jobs of the lab read them? They have *size* bytes each.
    samples: bool = False


@contextmanager
def small_cluster(
    work: Path, server: S3Server, bucket: str, count: int, keys: Mapping[str, object]
) -> Iterator[SmallCluster]:
    """So many nodes that have each other in a list. keys: further ones of [cluster]."""
    with shaped_cluster(work, server, bucket, Shape(count, keys=keys)) as small:
        yield small


@contextmanager
def shaped_cluster(work: Path, server: S3Server, bucket: str, shape: Shape) -> Iterator[SmallCluster]:
    """All but the spare nodes run."""
    files = _samples(work, shape) if shape.samples else _random_files(shape)
    server.create_bucket(bucket)
    server.put(bucket, files)
    settings = ClusterSettings(
        NodeSettings(shape.memory, shape.ssd, _BLOCK, shape.policy, read_deadline=20, guess=False),
        shape.source,
        shape.keys,
    )
    with ExitStack() as stack:
        throttle = stack.enter_context(run_throttle(server.endpoint, LinkLimits(), work / "throttle.log"))
        account = S3Credentials(server.access_key, server.secret_key)
        hosts = [WARM_LOOPBACK] * (shape.nodes + shape.spare)
        cluster = stack.enter_context(create_cluster(work, settings, hosts, LOOPBACK, account))
        cluster.start_nodes(range(shape.nodes))
        small = SmallCluster(cluster, throttle, files)
        options = OriginOptions(endpoint_url=throttle.endpoint, region=server.region, addressing_style="path")
        add = DatasetAddRequest(name=DATASET, url=f"s3://{bucket}", options=options)
        for _ in cluster.nodes[0].client.stream_responses(DATASET_ADD, add, timeout=SECONDS):
            pass
        for number in range(shape.nodes) if shape.mounted is None else shape.mounted:
            small.mount(cluster.nodes[number])
        yield small


def _random_files(shape: Shape) -> dict[str, bytes]:
    return {f"class{number % 3}/{number:03}.bin": os.urandom(shape.size + number) for number in range(shape.files)}


def _samples(work: Path, shape: Shape) -> dict[str, bytes]:
    write_samples(work / "samples", shape.files, shape.size)
    return {sample_name(one): (work / "samples" / sample_name(one)).read_bytes() for one in range(shape.files)}


def knows(node: LabNode) -> bool:
    """Has it heard of the dataset?"""
    return any(one.name == DATASET for one in node.client.call(DATASET_LIST, Empty()).datasets)
