"""Several nodes that form a cluster: on hosts of a network, or all on loopback."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from cachefs_bench.lab.etcd import Etcd, run_etcd
from cachefs_bench.lab.host import LOOPBACK, LabHost
from cachefs_bench.lab.node import LabNode, create_node
from cachefs_bench.lab.scratch_config import NodeSettings
from cachefs_bench.lab.scratch_node import SCRATCH_CREDENTIALS, S3Credentials

# Port of a node's data plane; its control endpoint has the next one.
PORT: Final = 7380
MembershipSource = Literal["none", "static", "etcd"]


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
        address = f"{node.host.address}:{self._ports[node.name]}"
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
