"""What the daemon says of its cluster (see cachefs.messages for the rules)."""

from typing import Final

import msgspec

from cachefs.messages import Message

MOST_GIVERS: Final = 64


class PeerTraffic(Message, frozen=True):
    """What this node and one other have given each other since this daemon started."""

    # Blocks and bytes that came from it.
    blocks_in: int = 0
    bytes_in: int = 0
    # Blocks and bytes that it was given.
    blocks_out: int = 0
    bytes_out: int = 0
    # Requests to it that failed; that it had no time for; blocks whose bytes were wrong.
    failures: int = 0
    busy: int = 0
    wrong: int = 0
    # Seconds in which half of the blocks came that it was asked for of late; 0: none.
    seconds: float = 0.0
    # It is not asked for a while, since it did not answer.
    cooling: bool = False


class TierUse(Message, frozen=True, array_like=True):
    """A tier of a node."""

    name: str
    # Bytes that it may take now, and that it takes.
    limit: int
    used: int


class NodeCounters(Message, frozen=True):
    """How a node is, as it says itself when it is asked."""

    # Why nothing is known; empty where it is.
    problem: str = ""
    # Seconds since its daemon started.
    uptime: float = 0.0
    tiers: list[TierUse] = msgspec.field(default_factory=list)
    # Running jobs that have published there, and their consumers.
    jobs: int = 0
    consumers: int = 0
    # That came from origins since the daemon started.
    origin_blocks: int = 0
    origin_bytes: int = 0
    # What is wrong there with datasets of the cluster, a line for each.
    problems: list[str] = msgspec.field(default_factory=list)
    # Bytes that it has had from other nodes, by their ids: those that gave most, MOST_GIVERS of them.
    received: dict[str, int] = msgspec.field(default_factory=dict)
    # Its cluster.replicas and cluster.grace, which should be the same on all nodes; 0: it does not say them.
    replicas: int = 0
    grace: float = 0.0


class MemberStatus(Message, frozen=True):
    """A node of the cluster."""

    # 16 hex digits: of its state directory; of its last start (empty: not known yet).
    id: str
    incarnation: str
    name: str
    # Where others reach it.
    host: str
    data_port: int
    control_port: int
    zone: str
    # joining, active, draining or away.
    state: str
    # Does it count for placement?
    placing: bool
    weight: float
    # The part of all blocks whose home it is, by its weight: 0 to 1.
    share: float
    # Bytes that its tiers may take; 0 and 0: not known yet.
    memory: int
    ssd: int
    protocol: int = 0
    traffic: PeerTraffic = PeerTraffic()
    # What it says of itself; None: it was not asked.
    counters: NodeCounters | None = None


class ClusterStatus(Message, frozen=True):
    """The cluster as this node knows it."""

    # Of the cluster; none, static, etcd or kubernetes.
    name: str
    source: str
    # Id of this node; empty where it is in no cluster.
    me: str
    # The ring epoch: another one whenever another set of nodes counts for placement.
    epoch: int
    # Seconds since when it is as it is.
    age: float
    # What is wrong with the source; empty where nothing is.
    problem: str
    remarks: list[str] = msgspec.field(default_factory=list)
    # Copies that the cluster keeps of each block.
    replicas: int = 1
    # Seconds until the blocks of a node that is away have other homes.
    grace: float = 0.0
    # By name, then id.
    members: list[MemberStatus] = msgspec.field(default_factory=list)


class DrainNode(Message, frozen=True):
    """Have a node give away what it holds, or ask how far that is."""

    # Its name or id; empty: the node that is asked.
    node: str = ""
    # It is not to leave after all.
    undo: bool = False


class DrainStatus(Message, frozen=True):
    """How far a node that drains is."""

    id: str
    name: str
    # What other nodes have still to get, as far as they have said.
    blocks: int = 0
    bytes: int = 0
    # Names of the nodes that have not got all yet, or have not said so.
    waiting: list[str] = msgspec.field(default_factory=list)
    # Others have all that they take over.
    done: bool = False
    # It is no member any more. While jobs read on it, it stays one.
    has_left: bool = False


class ScaleNode(Message, frozen=True):
    """A node that keeps blocks."""

    name: str
    # Bytes that its tiers have room for, and that they take.
    capacity: int
    used: int
    # Why it is not known how it is; empty where it is.
    problem: str = ""


class ScaleOutcome(Message, frozen=True):
    """What so many nodes would make of the published jobs."""

    nodes: int
    # Bytes that their tiers have room for.
    capacity: int
    # Of the bytes that jobs read, those that stay in the cluster from one epoch to the next.
    kept: int
    # Bytes from the origins until the jobs end, beyond what comes for the first time; None: nobody knows how long they
    # read.
    origin_bytes: float | None
    # Bytes in a second from the origins, and from node to node, as the jobs read now.
    origin_rate: float
    peer_rate: float


class ScaleStatus(Message, frozen=True):
    """How many nodes the published jobs need."""

    nodes: list[ScaleNode]
    # Bytes that jobs read, each block counted once.
    needed: int
    # Snapshots that they read.
    snapshots: int
    # Nodes of average capacity that would keep all of it; 0: nothing is read, or no capacity is known.
    nodes_needed: int
    now: ScaleOutcome
    one_more: ScaleOutcome
    # None for the last node.
    one_fewer: ScaleOutcome | None = None
