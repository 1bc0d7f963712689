"""Messages about the daemon's cluster (see cachefs.messages for the rules)."""

from typing import Final

import msgspec

from cachefs.messages import Message, WarmupProgress

MAX_RECEIVED_NODES: Final = 64


class RailTraffic(Message, frozen=True):
    """Blocks received over one rail of another node: one of its addresses."""

    # HOST:PORT.
    address: str
    # The network card of this node that the blocks arrive through; "" before the first connection.
    card: str = ""
    bytes_in: int = 0
    # Reason why the rail is not used now; "" where it is.
    problem: str = ""


class PeerTraffic(Message, frozen=True):
    """Blocks exchanged between this node and one other since this daemon started."""

    # Blocks and bytes received from the other node.
    blocks_in: int = 0
    bytes_in: int = 0
    # Blocks and bytes sent to it.
    blocks_out: int = 0
    bytes_out: int = 0
    # Requests to it that failed; requests that it was too busy for; blocks from it with wrong bytes.
    failures: int = 0
    busy: int = 0
    wrong: int = 0
    # Median seconds of recent requests for a block; 0 without any.
    seconds: float = 0.0
    # Whether requests to it are suspended for a while, since it did not answer.
    cooling: bool = False
    # By rail; empty for a node with one address, and before the first request to it.
    rails: list[RailTraffic] = msgspec.field(default_factory=list)


class TierUse(Message, frozen=True, array_like=True):
    name: str
    # Bytes that the tier may hold now, and bytes that it holds.
    limit: int
    used: int


class NodeCounters(Message, frozen=True):
    """A node's own report of its state."""

    # Reason why nothing is known; "" where the other fields are set.
    problem: str = ""
    # Seconds since its daemon started.
    uptime: float = 0.0
    tiers: list[TierUse] = msgspec.field(default_factory=list)
    # Running jobs that have published on the node, and their consumers.
    jobs: int = 0
    consumers: int = 0
    # Blocks and bytes from origins since the daemon started.
    origin_blocks: int = 0
    origin_bytes: int = 0
    # The node's problems with datasets of the cluster, a line each.
    problems: list[str] = msgspec.field(default_factory=list)
    # Bytes received from other nodes by node id, for the MAX_RECEIVED_NODES that gave most.
    received: dict[str, int] = msgspec.field(default_factory=dict)
    # The node's cluster.replicas and cluster.grace, which should be equal on all nodes; 0 where unknown.
    replicas: int = 0
    grace: float = 0.0


class MemberStatus(Message, frozen=True):
    # Id of the state directory, and of the daemon's last start ("" while unknown): 16 hex digits.
    id: str
    incarnation: str
    name: str
    # Address for other nodes.
    host: str
    data_port: int
    control_port: int
    zone: str
    # joining, active, draining or away.
    state: str
    # Whether the node counts for placement.
    placing: bool
    weight: float
    # The part of all blocks whose home is this node, by its weight: 0 to 1.
    share: float
    # Bytes that the tiers may hold; 0 and 0 while unknown.
    memory: int
    ssd: int
    protocol: int = 0
    traffic: PeerTraffic = PeerTraffic()
    # Further hosts with the same port for blocks, mostly one for each further network card.
    rails: list[str] = msgspec.field(default_factory=list)
    # The node's own report; None where it was not asked.
    counters: NodeCounters | None = None


class ClusterStatus(Message, frozen=True):
    """The cluster as this node knows it."""

    # Name of the cluster; its source is none, static, etcd or kubernetes.
    name: str
    source: str
    # Id of this node; "" where it is in no cluster.
    me: str
    # The ring epoch, which changes with the set of nodes that count for placement.
    epoch: int
    # Seconds since the last change.
    age: float
    # Problem of the source; "" without one.
    problem: str
    remarks: list[str] = msgspec.field(default_factory=list)
    # Most copies that the cluster keeps of a block: of hot datasets.
    replicas: int = 1
    # Seconds until the blocks of a node that is away get other homes.
    grace: float = 0.0
    # Sorted by name, then id.
    members: list[MemberStatus] = msgspec.field(default_factory=list)
    # The warmups of the cluster that run or wait, oldest first.
    warmups: list[WarmupProgress] = msgspec.field(default_factory=list)
    # Names of the datasets that have second copies now.
    hot: list[str] = msgspec.field(default_factory=list)


class DrainRequest(Message, frozen=True):
    """A request to drain a node, or for the state of its drain."""

    # Name or id of the node; "" for the receiver.
    node: str = ""
    # Cancel the drain.
    undo: bool = False


class DrainStatus(Message, frozen=True):
    """The progress of a node's drain."""

    id: str
    name: str
    # Blocks and bytes that other nodes have yet to fetch, as far as they have reported.
    blocks: int = 0
    bytes: int = 0
    # Names of the nodes that have not fetched all yet, or have not reported.
    waiting: list[str] = msgspec.field(default_factory=list)
    # Whether others have all that they take over.
    done: bool = False
    # Whether the node has left the cluster. It remains a member while jobs read on it.
    has_left: bool = False


class ScaleNode(Message, frozen=True):
    name: str
    # Bytes that the tiers have room for, and bytes that they hold.
    capacity: int
    used: int
    # Reason why the node's state is unknown; "" where it is known.
    problem: str = ""


class ScaleOutcome(Message, frozen=True):
    """The forecast for the published jobs with a given number of nodes."""

    nodes: int
    # Bytes that the tiers of these nodes have room for.
    capacity: int
    # The part of the bytes read by jobs that stays in the cluster from one epoch to the next.
    kept: int
    # Bytes from the origins until the jobs end, beyond each block's first fetch; None where the jobs' end is unknown.
    origin_bytes: float | None
    # Bytes per second from the origins, and between nodes, at the present rates of the jobs.
    origin_rate: float
    peer_rate: float


class ScaleStatus(Message, frozen=True):
    """The number of nodes that the published jobs need."""

    nodes: list[ScaleNode]
    # Bytes that jobs read, each block counted once.
    needed: int
    # Number of snapshots that jobs read.
    snapshots: int
    # Number of nodes of average capacity that would hold everything; 0 where nothing is read, or no capacity is known.
    nodes_needed: int
    now: ScaleOutcome
    one_more: ScaleOutcome
    # None for the last node.
    one_fewer: ScaleOutcome | None = None
