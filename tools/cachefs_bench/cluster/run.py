"""A cluster under measurement: nodes on hosts of a network, and a dataset in an S3 server that counts requests.

Results of a scenario are JSON-serialisable documents, with checks of their bounds.
"""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any, Final, TypedDict

from cachefs.errors import CachefsError
from cachefs.messages import Empty, OriginOptions
from cachefs.rpc import DATASET_LIST
from cachefs_bench.lab.bridge import Bridge, bridge_network
from cachefs_bench.lab.cluster import (
    ClusterCounters,
    ClusterSettings,
    LabCluster,
    MembershipSource,
    create_cluster,
    read_counters,
)
from cachefs_bench.lab.host import LOOPBACK, LabHost, wait_for
from cachefs_bench.lab.node import LabNode
from cachefs_bench.lab.reader import EpochResult, ReadProblem, ScriptKind
from cachefs_bench.lab.scratch_node import DATASET, NodeSettings, TierSettings, list_dataset
from cachefs_bench.lab.slow_link import LinkLimits
from cachefs_bench.lab.switch import LabSwitch, switched_network
from cachefs_bench.lab.throttle import ProxyCounters, Throttle, run_throttle
from cachefs_bench.origin_server import BUCKET, run_filled_server
from cachefs_bench.scenario import DatasetShape
from cachefs_bench.training_node import BLOCK_SIZE, MIN_TIER, SEGMENT_SIZE, budget_for
from cachefs_daemon.store.segment_writer import span

# Seconds within which all nodes know a dataset that was added on one.
_KNOWN_SECONDS: Final = 60.0
_ZONES: Final = ("east", "west")
# Words of a line in a daemon's log: see cachefs_cluster.placement.cooperation.
_DISAGREEMENT: Final = "its holders differed here"
# Seconds after which a read ends, with an error at worst.
READ_DEADLINE: Final = 20.0


@dataclass(frozen=True, slots=True)
class JobShape:
    """Size and pace of one job."""

    ranks: int
    rate: float | None = None  # samples per second of each rank; None: that of the load


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """Nodes, dataset, and how much of it the nodes hold."""

    nodes: int = 4
    spare: int = 0  # hosts on which no node runs yet
    files: int = 4000
    size: int = 110_000
    epochs: int = 5
    rate: float = 100.0  # samples per second of each rank
    capacity: float = 1.0  # share of the dataset that the initial nodes hold together, without the slack
    memory: float = 0.5  # the memory tier's share of that
    slack: float = -1.0  # share of a node's part that it holds in addition; below 0: as `moving_share` says
    replicas: int = 1  # copies of each block; with two, the nodes alternate between two zones
    source: MembershipSource = "static"
    network: str = "bridge"  # bridge, switch or loopback
    origin: LinkLimits = field(default_factory=LinkLimits)
    endpoint: str | None = None  # URL of a running S3 server
    connections: int = 0  # of each node to the origin; 0: the daemon's default
    torch: ScriptKind | None = None  # jobs train with torch under `cachefs run`, in this way
    jobs: tuple[JobShape, ...] = ()  # of m1 and m2; empty: one job with a rank on each node

    @property
    def bytes(self) -> int:
        """Bytes of the dataset."""
        return self.files * self.size

    @property
    def held(self) -> int:
        """Number of blocks that the tiers of one node hold."""
        part = self.replicas * self.capacity * self.files / self.nodes
        return round(part * (1 + (moving_share(self.files, self.nodes) if self.slack < 0 else self.slack)))


def moving_share(files: int, nodes: int) -> float:
    """Return the room that a node needs beyond its part of the blocks: one hundredth, and two standard deviations of
    the number of blocks it holds while copies move (docs/benchmarks.md says why)."""
    return 0.01 + 2 / sqrt(files / nodes)


@dataclass(slots=True)
class ClusterRun:
    """The running parts of a cluster."""

    load: ClusterLoad
    cluster: LabCluster
    throttle: Throttle
    network: Bridge | LabSwitch | None
    work: Path
    endpoint: str  # of the origin, as seen from the nodes

    @property
    def nodes(self) -> list[LabNode]:
        """The initial nodes."""
        return list(self.cluster.nodes[: self.load.nodes])

    def origin_counters(self) -> ProxyCounters:
        """Return the origin's counters."""
        return self.throttle.read_counters()

    def read_counters(self, nodes: Iterable[LabNode] | None = None) -> ClusterCounters:
        """Return the counters of *nodes* (None: of all that run and answer) and of the origin."""
        return read_counters(self.cluster.nodes if nodes is None else nodes, self.throttle)

    def count_disagreements(self) -> int:
        """Return how often nodes have adopted another node's holders because their own differed."""
        return sum(node.log.read_text(errors="replace").count(_DISAGREEMENT) for node in self.nodes)

    def mount_dataset(self, node: LabNode) -> None:
        """Mount the dataset on a node, once the node knows it."""
        self.wait_for_dataset(node)
        node.mount(DATASET)

    def wait_for_dataset(self, node: LabNode) -> None:
        """Wait until a node knows the dataset."""
        wait_for(
            lambda: any(one.name == DATASET for one in node.client.call(DATASET_LIST, Empty()).datasets),
            _KNOWN_SECONDS, f"{node.name} knows the dataset that was added on {self.nodes[0].name}",
        )  # fmt: skip


@contextmanager
def run_cluster(load: ClusterLoad, work: Path) -> Iterator[ClusterRun]:
    """Run origin and nodes, with the dataset mounted on each. *work* is an empty directory."""
    shape = DatasetShape(files=load.files, size=load.size)
    with ExitStack() as stack:
        server = stack.enter_context(run_filled_server(work, shape, load.endpoint))
        network, hosts, hub = _network(stack, load)
        listener = stack.enter_context(hub.listen())
        throttle = stack.enter_context(run_throttle(server.endpoint, LinkLimits(), work / "throttle.log", listener))
        zones = _ZONES if load.replicas > 1 else ()
        settings = ClusterSettings(node_settings(load), load.source, {"replicas": load.replicas}, zones)
        cluster = stack.enter_context(create_cluster(work, settings, hosts, hub, server.credentials))
        cluster.start_nodes(range(load.nodes))
        run = ClusterRun(load, cluster, throttle, network, work, throttle.endpoint)
        options = OriginOptions(endpoint_url=throttle.endpoint, region="us-east-1", addressing_style="path")
        for node in run.nodes if load.source == "none" else run.nodes[:1]:
            list_dataset(node.client, f"s3://{BUCKET}", options)
        for node in run.nodes:
            run.mount_dataset(node)
        throttle.set_limits(load.origin)
        yield run


def node_settings(load: ClusterLoad) -> NodeSettings:
    """Return the settings of each node. Raises CachefsError if the daemon would refuse them."""
    if load.size > BLOCK_SIZE:
        raise CachefsError(f"files of {load.size} bytes are more than one block of {BLOCK_SIZE}")
    record = span(load.size)
    in_memory = round(load.memory * load.held)
    memory, ssd = (budget_for(blocks * record) for blocks in (in_memory, load.held - in_memory))
    if memory < MIN_TIER or 0 < ssd < MIN_TIER:
        raise CachefsError("a tier would be smaller than one block; use more files or a larger capacity")
    return NodeSettings(
        TierSettings(memory, SEGMENT_SIZE),
        TierSettings(ssd, SEGMENT_SIZE),
        BLOCK_SIZE,
        read_deadline=READ_DEADLINE,
        max_connections=load.connections,
    )


def _network(stack: ExitStack, load: ClusterLoad) -> tuple[Bridge | LabSwitch | None, list[LabHost], LabHost]:
    """Return the network, its hosts, and the host of the origin."""
    count = load.nodes + load.spare
    if load.network == "loopback":
        return None, [LOOPBACK] * count, LOOPBACK
    made: Bridge | LabSwitch
    if load.network == "bridge":
        made = stack.enter_context(bridge_network(count))
    else:
        made = stack.enter_context(switched_network(count))
    return made, list(made.hosts), made.hub


class BoundCheck(TypedDict):
    """A figure with its bound."""

    what: str
    value: float
    least: float | None  # None: no such bound
    most: float | None
    met: bool


def check_at_most(what: str, value: float, most: float) -> BoundCheck:
    return BoundCheck(what=what, value=value, least=None, most=most, met=value <= most)


def check_at_least(what: str, value: float, least: float) -> BoundCheck:
    return BoundCheck(what=what, value=value, least=least, most=None, met=value >= least)


def document(scenario: str, load: ClusterLoad, checks: Sequence[BoundCheck], **parts: Any) -> dict[str, Any]:
    """Return the document that `cachefs-bench cluster` prints."""
    return {
        "scenario": scenario,
        "load": asdict(load),
        "held_by_node": load.held,
        "checks": list(checks),
        "met": all(check["met"] for check in checks),
        **parts,
    }


def epoch_document(
    load: ClusterLoad, job: str, number: int, grown: ClusterCounters, results: Iterable[EpochResult]
) -> dict[str, Any]:
    """Return the document of one epoch of a job. grown: growth of the counters during the epoch. Bytes and requests of
    the origin, and bytes from peers, are those of all jobs."""
    total, mine = grown.total, [result for result in results if result.epoch == number]
    reads = sum(result.reads for result in mine)
    return {
        "job": job,
        "epoch": number + 1,
        "machine_load": round(os.getloadavg()[0], 1),
        "seconds": round(grown.when, 2),
        "origin_bytes_of_dataset": grown.origin_bytes / load.bytes,
        "origin_requests": grown.origin_requests,
        "peer_bytes_of_dataset": total.peer_bytes / load.bytes,
        "local_share": local_share(grown, job, reads),
        "waited_share": part_of_job(grown, job, total.stalls, "stalls") / reads if reads else 0.0,
        "waited_for_peer_share": waited_for_peer_share(grown, job, reads),
        **read_document(mine),
    }


def read_document(results: Iterable[EpochResult]) -> dict[str, Any]:
    """Return the document of reads. Times in milliseconds; percentiles are the worst of all ranks and epochs."""
    found = list(results)
    return {
        "reads": sum(result.reads for result in found),
        "errors": sum(result.errors for result in found),
        "wrong": sum(result.wrong for result in found),
        "slow": sum(result.slow for result in found),
        "p50_ms": 1e3 * max((result.p50 for result in found), default=0.0),
        "p99_ms": 1e3 * max((result.p99 for result in found), default=0.0),
        "longest_ms": 1e3 * max((result.longest for result in found), default=0.0),
    }


def problem_document(troubles: Iterable[ReadProblem], since: float) -> dict[str, Any]:
    """Return the document of slow and failed reads since a moment, with the first words of each kind of error."""
    found = [trouble for trouble in troubles if trouble.when + trouble.seconds >= since]
    return {
        "errors": sum(trouble.kind == "error" for trouble in found),
        "wrong": sum(trouble.kind == "wrong" for trouble in found),
        "long": sum(trouble.kind == "long" for trouble in found),
        "longest_s": max((trouble.seconds for trouble in found), default=0.0),
        "reasons": sorted({trouble.reason for trouble in found if trouble.reason}),
    }


def local_share(grown: ClusterCounters, job: str, reads: int) -> float:
    """Return the share of a job's *reads* whose block came neither from another node nor from the origin."""
    if not reads:
        return math.nan
    fetched = grown.total.peer_blocks + grown.origin_requests
    return max(0.0, 1 - part_of_job(grown, job, fetched, "fetched") / reads)


def waited_for_peer_share(grown: ClusterCounters, job: str, reads: int) -> float:
    """Return the share of a job's *reads* that waited for another node."""
    return part_of_job(grown, job, grown.total.stalls_peer, "stalls_peer") / reads if reads else 0.0


def part_of_job(grown: ClusterCounters, job: str, total: int, counter: str) -> float:
    """Return a job's part of a *total* of all nodes: divided in the ratio of the jobs' *counter*, as a daemon does not
    know for which job it fetches each block. All of it if there is only one job."""
    counts = {name: getattr(counters, counter) for name, counters in grown.jobs.items()}
    everything = sum(counts.values())
    return total * counts.get(job, 0) / everything if everything else total / max(1, len(counts))
