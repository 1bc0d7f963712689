"""Several nodes that form a cluster: on hosts of a network, or all on loopback."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from cachefs_tools.lab.etcd import Etcd, running_etcd
from cachefs_tools.lab.host import LOOPBACK, Host
from cachefs_tools.lab.node import Node, made_node
from cachefs_tools.scratch_config import NodeSettings
from cachefs_tools.scratch_node import SCRATCH, Account

# Port of a node's data plane; its control endpoint has the next one.
PORT: Final = 7380
Source = Literal["none", "static", "etcd"]


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Settings shared by all nodes."""

    node: NodeSettings
    source: Source = "static"  # source of the membership; none: each node is alone
    # Further keys of [cluster].
    keys: Mapping[str, object] = field(default_factory=dict)
    # Zones that nodes have in turns; empty: no zones.
    zones: Sequence[str] = ()
    # Weights in a static list by node name; 1 for the others.
    weights: Mapping[str, float] = field(default_factory=dict)


class Cluster:
    """Nodes, some of which may run, numbered from 0."""

    def __init__(self, nodes: Sequence[Node], hub: Host, etcd: Etcd | None, settings: ClusterSettings) -> None:
        self.nodes = nodes
        self.hub = hub  # host of shared services
        self.etcd = etcd
        self.settings = settings
        self._ports = {node.name: _port(node.host) for node in nodes}

    def start(self, numbers: Iterable[int] | None = None) -> None:
        """Start these nodes (None: all) at once, and wait until they respond. A static list has exactly these."""
        chosen = [self.nodes[number] for number in (range(len(self.nodes)) if numbers is None else numbers)]
        self._members = [self._listed(node) for node in chosen]
        for node in chosen:
            node.spawn(self.settings_of(node))
        for node in chosen:
            node.ready()

    def _zone(self, node: Node) -> str:
        zones = self.settings.zones
        return zones[self.nodes.index(node) % len(zones)] if zones else ""

    def _listed(self, node: Node) -> str:
        """Return the node's entry of a static list."""
        zone = self._zone(node)
        weight = self.settings.weights.get(node.name)
        line = f"{node.name}={node.host.address}:{self._ports[node.name]}" + (f",zone={zone}" if zone else "")
        return line if weight is None else f"{line},weight={weight:g}"

    def settings_of(self, node: Node) -> NodeSettings:
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
def made_cluster(
    work: Path, settings: ClusterSettings, hosts: Sequence[Host], hub: Host = LOOPBACK, account: Account = SCRATCH
) -> Iterator[Cluster]:
    """Create a node on each host without starting it; etcd runs on the hub if the membership needs it."""
    with ExitStack() as stack:
        etcd = stack.enter_context(running_etcd(hub, work / "etcd")) if settings.source == "etcd" else None
        nodes = [
            stack.enter_context(made_node(f"node{number}", host, work / f"node{number}", account))
            for number, host in enumerate(hosts, 1)
        ]
        yield Cluster(nodes, hub, etcd, settings)


def _port(host: Host) -> int:
    """Return the first of two free ports in a row: any port on a lab's host, a free one on loopback."""
    return PORT if host.pid else host.free_ports(2)[0]
