"""Several nodes that form a cluster: on hosts of a network, or all on loopback.

`run_etcd` runs an etcd of one member for their membership. `ClusterCounters` are counters of the nodes and the origin,
at one moment or between two.
"""

import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from cachefs.block import SSD, TIER_NAMES
from cachefs.errors import CachefsError, DaemonUnavailable
from cachefs.job_messages import JobName
from cachefs.messages import Empty
from cachefs.rpc import CLUSTER, JOB_LIST, STALL_LIST
from cachefs_bench.lab.host import LOOPBACK, LabHost
from cachefs_bench.lab.node import LabNode, create_node
from cachefs_bench.lab.scratch_node import SCRATCH_CREDENTIALS, NodeSettings, S3Credentials
from cachefs_bench.lab.throttle import Throttle
from cachefs_tools.child_programs import KILL_WITH_PARENT, Child, wait_or_kill, wait_until

_READY: Final = b"serving client traffic"
_INSTALL: Final = "etcd is missing; install it with: apt-get install etcd-server"
# Prefix of a stall's cause that was another node.
_PEER: Final = "peer"
# Port of a node's data plane; its control endpoint has the next one.
PORT: Final = 7380
MembershipSource = Literal["none", "static", "etcd"]
_Counters = TypeVar("_Counters", "LabNodeCounters", "LabJobCounters")


class Etcd:
    """A one-member etcd that can be stopped, and restarted with its data."""

    def __init__(self, host: LabHost, work: Path) -> None:
        self._work = work
        self._command = _command(host, work)
        self.endpoint = self._command[self._command.index("--advertise-client-urls") + 1]
        self._process: Child | None = None

    def start(self) -> None:
        """Start etcd, and wait until it responds. Raises CachefsError with the end of its log."""
        log = self._work / "etcd.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*KILL_WITH_PARENT, *self._command], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        wait_until(lambda: _READY in log.read_bytes(), self._process, log)

    def stop(self) -> None:
        """Kill etcd."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            wait_or_kill(self._process)
            self._process = None


@contextmanager
def run_etcd(host: LabHost, work: Path) -> Iterator[Etcd]:
    """Run an etcd on the host; its data is in the new directory *work*."""
    work.mkdir(parents=True, exist_ok=True)
    etcd = Etcd(host, work)
    try:
        etcd.start()
        yield etcd
    finally:
        etcd.stop()


def _command(host: LabHost, work: Path) -> list[str]:
    found = shutil.which("etcd")
    if found is None:
        raise CachefsError(_INSTALL)
    clients, peers = (f"http://{host.address}:{port}" for port in host.free_ports(2))
    return [
        *host.enter_command, found, "--name", "lab", "--data-dir", str(work / "data"),
        "--listen-client-urls", clients, "--advertise-client-urls", clients,
        "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", f"lab={peers}",
        "--logger", "zap", "--log-outputs", "stderr",
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class LabNodeCounters:
    """Counters of one node since its daemon started, or their growth."""

    hits_memory: int = 0  # reads of its mount
    hits_ssd: int = 0
    misses: int = 0
    peer_blocks: int = 0  # received from other nodes
    peer_bytes: int = 0
    given_blocks: int = 0  # sent to other nodes
    given_bytes: int = 0
    stalls: int = 0  # reads that waited
    stalls_peer: int = 0  # those that waited for another node
    given_fetched: int = 0  # those of the given blocks that were fetched from the origin for it
    filled: int = 0  # blocks received to fill the tier, without a reader

    def __sub__(self, before: "LabNodeCounters") -> "LabNodeCounters":
        return _combine(self, before, -1)

    def __add__(self, other: "LabNodeCounters") -> "LabNodeCounters":
        return _combine(self, other, 1)


@dataclass(frozen=True, slots=True)
class LabJobCounters:
    """Counters of one job on all nodes, or their growth. A block that is late counts as fetched twice."""

    fetched: int = 0  # bytes fetched for it from the origin and from other nodes
    stalls: int = 0  # reads that waited
    stalls_peer: int = 0  # those that waited for another node

    def __sub__(self, before: "LabJobCounters") -> "LabJobCounters":
        return _combine(self, before, -1)

    def __add__(self, other: "LabJobCounters") -> "LabJobCounters":
        return _combine(self, other, 1)


@dataclass(frozen=True, slots=True)
class ClusterCounters:
    """The counters of all nodes, of the origin, and of the jobs."""

    when: float
    nodes: dict[str, LabNodeCounters]  # by name
    origin_bytes: int
    origin_requests: int
    jobs: dict[str, LabJobCounters] = field(default_factory=dict)  # by name

    def __sub__(self, before: "ClusterCounters") -> "ClusterCounters":
        return ClusterCounters(
            self.when - before.when, _grown(self.nodes, before.nodes), self.origin_bytes - before.origin_bytes,
            self.origin_requests - before.origin_requests, _grown(self.jobs, before.jobs),
        )  # fmt: skip

    @property
    def total(self) -> LabNodeCounters:
        return sum(self.nodes.values(), LabNodeCounters())


def read_counters(nodes: Iterable[LabNode], throttle: Throttle) -> ClusterCounters:
    """Return the present counters of the nodes that run and respond."""
    proxy = throttle.read_counters()
    found = {}
    jobs: dict[str, LabJobCounters] = {}
    for node in nodes:
        if node.is_running:
            try:
                found[node.name] = node_counters(node)
                for name, counters in _job_counters(node).items():
                    jobs[name] = jobs.get(name, LabJobCounters()) + counters
            except DaemonUnavailable:
                continue
    return ClusterCounters(time.monotonic(), found, proxy.bytes, proxy.requests, jobs)


def node_counters(node: LabNode) -> LabNodeCounters:
    """Return the counters of one node. Raises DaemonUnavailable."""
    status = node.status()
    mounts: Counter[str] = Counter()
    for mount in status.mounts:
        mounts.update(mount.counters)
    traffic = [member.traffic for member in node.client.call(CLUSTER, Empty(), timeout=10).members]
    stalls = node.client.call(STALL_LIST, JobName(job=""), timeout=10).rows
    return LabNodeCounters(
        mounts["hits_memory"], mounts["hits_ssd"], mounts["misses"],
        sum(one.blocks_in for one in traffic), sum(one.bytes_in for one in traffic),
        sum(one.blocks_out for one in traffic), sum(one.bytes_out for one in traffic),
        sum(row.count for row in stalls), sum(row.count for row in stalls if row.source.startswith(_PEER)),
        status.peers.served_fetched, status.peers.filled,
    )  # fmt: skip


def _job_counters(node: LabNode) -> dict[str, LabJobCounters]:
    """Return the counters of each job on a node, by name. Raises DaemonUnavailable."""
    rows = node.client.call(STALL_LIST, JobName(job=""), timeout=10).rows
    return {
        job.job: LabJobCounters(
            job.fetched_bytes + job.peer_bytes,
            sum(row.count for row in rows if row.job == job.job),
            sum(row.count for row in rows if row.job == job.job and row.source.startswith(_PEER)),
        )
        for job in node.client.call(JOB_LIST, Empty(), timeout=10).jobs
    }


def ssd_blocks(node: LabNode) -> int:
    """Return the number of blocks in the SSD tier of a node."""
    return sum(tier.blocks for tier in node.status().tiers if tier.name == TIER_NAMES[SSD])


def _combine(left: _Counters, right: _Counters, sign: int) -> _Counters:
    names: list[Any] = [one.name for one in fields(left)]
    return type(left)(*(getattr(left, name) + sign * getattr(right, name) for name in names))


def _grown(now: Mapping[str, _Counters], before: Mapping[str, _Counters]) -> dict[str, _Counters]:
    """Return the growth of each counter since *before*, by name; all of a counter that was not there."""
    return {name: one - before[name] if name in before else one for name, one in now.items()}


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Settings shared by all nodes."""

    node: NodeSettings
    source: MembershipSource = "static"  # source of the membership; none: each node is alone
    # Further keys of [cluster].
    keys: Mapping[str, object] = field(default_factory=dict)
    # Zones that nodes have in turns; empty: no zones.
    zones: Sequence[str] = ()
    # Weights in a static list by node name; 1 for the others.
    weights: Mapping[str, float] = field(default_factory=dict)


class LabCluster:
    """Nodes, some of which may run, numbered from 0."""

    def __init__(self, nodes: Sequence[LabNode], hub: LabHost, etcd: Etcd | None, settings: ClusterSettings) -> None:
        self.nodes = nodes
        self.hub = hub  # host of shared services
        self.etcd = etcd
        self.settings = settings
        self.listen: Sequence[object] = ()  # [cluster] listen by number of the node; empty: at the host's address
        self._ports = {node.name: _port(node.host) for node in nodes}

    def start_nodes(self, numbers: Iterable[int] | None = None) -> None:
        """Start these nodes (None: all) at once, and wait until they respond. A static list has exactly these."""
        chosen = [self.nodes[number] for number in (range(len(self.nodes)) if numbers is None else numbers)]
        self._members = [self._member_entry(node) for node in chosen]
        for node in chosen:
            node.start_daemon(self.node_settings(node))
        for node in chosen:
            node.wait_ready()

    def _zone(self, node: LabNode) -> str:
        zones = self.settings.zones
        return zones[self.nodes.index(node) % len(zones)] if zones else ""

    def _member_entry(self, node: LabNode) -> str:
        """Return the node's entry of a static list."""
        zone = self._zone(node)
        weight = self.settings.weights.get(node.name)
        line = f"{node.name}={node.host.address}:{self._ports[node.name]}" + (f",zone={zone}" if zone else "")
        return line if weight is None else f"{line},weight={weight:g}"

    def node_settings(self, node: LabNode) -> NodeSettings:
        """Return the settings of a node."""
        if self.settings.source == "none":
            return self.settings.node
        address: object = f"{node.host.address}:{self._ports[node.name]}"
        if self.listen:
            address = self.listen[self.nodes.index(node)]
        section: dict[str, object] = {"membership": self.settings.source, "name": node.name, "listen": address}
        if self.etcd is not None:
            section["etcd"] = [self.etcd.endpoint]
            section["zone"] = self._zone(node)
        else:
            section["nodes"] = self._members
        if node.host.pid:
            section["insecure_peers"] = True
        return replace(self.settings.node, cluster={**section, **self.settings.keys})


@contextmanager
def create_cluster(
    work: Path,
    settings: ClusterSettings,
    hosts: Sequence[LabHost],
    hub: LabHost = LOOPBACK,
    account: S3Credentials = SCRATCH_CREDENTIALS,
) -> Iterator[LabCluster]:
    """Create a node on each host without starting it; etcd runs on the hub if the membership needs it."""
    with ExitStack() as stack:
        etcd = stack.enter_context(run_etcd(hub, work / "etcd")) if settings.source == "etcd" else None
        nodes = [
            stack.enter_context(create_node(f"node{number}", host, work / f"node{number}", account))
            for number, host in enumerate(hosts, 1)
        ]
        yield LabCluster(nodes, hub, etcd, settings)


def _port(host: LabHost) -> int:
    """Return the first of two free ports in a row: any port on a lab's host, a free one on loopback."""
    return PORT if host.pid else host.free_ports(2)[0]
