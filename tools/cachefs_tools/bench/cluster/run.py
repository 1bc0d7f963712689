"""A cluster under measurement: nodes on hosts of a network, and a dataset in an S3 server whose requests are
counted."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Final

from cachefs_daemon.store.segment_writer import span

from cachefs.errors import CachefsError
from cachefs.messages import Empty, OriginOptions
from cachefs.rpc import DATASET_LIST
from cachefs_tools.bench.directory_node import DATASET, list_dataset
from cachefs_tools.bench.origin_server import BUCKET, filled_server
from cachefs_tools.bench.scenario import Shape
from cachefs_tools.bench.training_node import BLOCK_SIZE, LEAST_TIER, SEGMENT_SIZE, budget_for
from cachefs_tools.lab.bridge import Bridge, bridge_network
from cachefs_tools.lab.cluster import Cluster, ClusterSettings, Source, made_cluster
from cachefs_tools.lab.counters import Moment, take
from cachefs_tools.lab.host import LOOPBACK, Host, until
from cachefs_tools.lab.node import Node
from cachefs_tools.lab.reader import Script
from cachefs_tools.lab.slow_link import Limits
from cachefs_tools.lab.switch import Switch, switched_network
from cachefs_tools.lab.throttle import ProxyCounters, Throttle, throttled
from cachefs_tools.scratch_config import NodeSettings, TierSettings

# Seconds within which all nodes know a dataset that was added on one.
_KNOWN_SECONDS: Final = 60.0
_ZONES: Final = ("east", "west")
# Seconds after which a read ends, with an error at worst.
READ_DEADLINE: Final = 20.0


@dataclass(frozen=True, slots=True)
class Load:
    """Nodes, dataset, and how much of it the nodes hold."""

    nodes: int = 4
    spare: int = 0  # hosts on which no node runs yet
    files: int = 4000
    size: int = 110_000
    epochs: int = 5
    rate: float = 100.0  # samples per second of each rank
    capacity: float = 1.0  # share of the dataset that the initial nodes hold together, without the slack
    memory: float = 0.5  # the memory tier's share of that
    slack: float = -1.0  # share of a node's part that it holds in addition; below 0: as `room_to_move` says
    replicas: int = 1  # copies of each block; with two, the nodes alternate between two zones
    source: Source = "static"
    network: str = "bridge"  # bridge, switch or loopback
    origin: Limits = field(default_factory=Limits)
    endpoint: str | None = None  # URL of a running S3 server
    torch: Script | None = None  # jobs train with torch under `cachefs run`, in this way

    @property
    def bytes(self) -> int:
        """Bytes of the dataset."""
        return self.files * self.size

    @property
    def held(self) -> int:
        """Number of blocks that the tiers of one node hold."""
        part = self.replicas * self.capacity * self.files / self.nodes
        return round(part * (1 + (room_to_move(self.files, self.nodes) if self.slack < 0 else self.slack)))


def room_to_move(files: int, nodes: int) -> float:
    """Return the room that a node needs beyond its part of the blocks: one hundredth, and two standard deviations of
    the number of blocks it holds while copies move (docs/benchmarks.md says why)."""
    return 0.01 + 2 / sqrt(files / nodes)


@dataclass(slots=True)
class Run:
    """The running parts of a cluster."""

    load: Load
    cluster: Cluster
    throttle: Throttle
    network: Bridge | Switch | None
    work: Path
    endpoint: str  # of the origin, as seen from the nodes

    @property
    def nodes(self) -> list[Node]:
        """The initial nodes."""
        return list(self.cluster.nodes[: self.load.nodes])

    def origin(self) -> ProxyCounters:
        """Return the origin's counters."""
        return self.throttle.counters()

    def take(self, nodes: Iterable[Node] | None = None) -> Moment:
        """Return the counters of *nodes* (None: of all that run and answer) and of the origin."""
        return take(self.cluster.nodes if nodes is None else nodes, self.throttle)

    def mount(self, node: Node) -> None:
        """Mount the dataset on a node, once the node knows it."""
        self.until_known(node)
        node.mount(DATASET)

    def until_known(self, node: Node) -> None:
        """Wait until a node knows the dataset."""
        until(
            lambda: any(one.name == DATASET for one in node.client.call(DATASET_LIST, Empty()).datasets),
            _KNOWN_SECONDS, f"{node.name} knows the dataset that was added on {self.nodes[0].name}",
        )  # fmt: skip


@contextmanager
def running(load: Load, work: Path) -> Iterator[Run]:
    """Run origin and nodes, with the dataset mounted on each. *work* is an empty directory."""
    shape = Shape(files=load.files, size=load.size)
    with ExitStack() as stack:
        server = stack.enter_context(filled_server(work, shape, load.endpoint))
        network, hosts, hub = _network(stack, load)
        listener = stack.enter_context(hub.listen())
        throttle = stack.enter_context(throttled(server.endpoint, Limits(), work / "throttle.log", listener))
        zones = _ZONES if load.replicas > 1 else ()
        settings = ClusterSettings(node_settings(load), load.source, {"replicas": load.replicas}, zones)
        cluster = stack.enter_context(made_cluster(work, settings, hosts, hub, server.account))
        cluster.start(range(load.nodes))
        run = Run(load, cluster, throttle, network, work, throttle.endpoint)
        options = OriginOptions(endpoint_url=throttle.endpoint, region="us-east-1", addressing_style="path")
        for node in run.nodes if load.source == "none" else run.nodes[:1]:
            list_dataset(node.client, f"s3://{BUCKET}", options)
        for node in run.nodes:
            run.mount(node)
        throttle.limit(load.origin)
        yield run


def node_settings(load: Load) -> NodeSettings:
    """Return the settings of each node. Raises CachefsError if the daemon would refuse them."""
    if load.size > BLOCK_SIZE:
        raise CachefsError(f"files of {load.size} bytes are more than one block of {BLOCK_SIZE}")
    record = span(load.size)
    in_memory = round(load.memory * load.held)
    memory, ssd = (budget_for(blocks * record) for blocks in (in_memory, load.held - in_memory))
    if memory < LEAST_TIER or 0 < ssd < LEAST_TIER:
        raise CachefsError("a tier would be smaller than one block; use more files or a larger capacity")
    return NodeSettings(
        TierSettings(memory, SEGMENT_SIZE), TierSettings(ssd, SEGMENT_SIZE), BLOCK_SIZE, read_deadline=READ_DEADLINE
    )


def _network(stack: ExitStack, load: Load) -> tuple[Bridge | Switch | None, list[Host], Host]:
    """Return the network, its hosts, and the host of the origin."""
    count = load.nodes + load.spare
    if load.network == "loopback":
        return None, [LOOPBACK] * count, LOOPBACK
    made: Bridge | Switch
    if load.network == "bridge":
        made = stack.enter_context(bridge_network(count))
    else:
        made = stack.enter_context(switched_network(count))
    return made, list(made.hosts), made.hub
