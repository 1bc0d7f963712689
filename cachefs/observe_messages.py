"""Messages between nodes and schedulers: what a node reports about itself, and what a scheduler may command.

Packed by msgpack, over the control endpoint. See cachefs.messages for the rules.
"""

from enum import StrEnum
from typing import Annotated, Final

import msgspec

from cachefs.messages import Message

# Header with the caller's name, in `[cluster] observers` or `[cluster] schedulers` of the daemon, without TLS.
OBSERVER_HEADER: Final = "Cachefs-Observer"

MEMBERS_PATH: Final = "/observe/cluster"
REPORT_PATH: Final = "/observe/node"
COMMAND_PATH: Final = "/observe/order"
# Prefix of the paths that observers may request.
OBSERVE_PREFIX: Final = "/observe/"

# Minimum seconds between two responses to one observer, and maximum seconds that a poll waits for news.
MIN_PAUSE_SECONDS: Final = 1.0
MAX_WAIT_SECONDS: Final = 60.0
# Maximum size of one report in bytes, and number of snapshots in it.
MAX_REPORT_BYTES: Final = 8 << 20
MAX_SNAPSHOTS: Final = 2048
MAX_MEMBERS: Final = 16384
# Maximum plausible rate in bytes per second.
MAX_RATE: Final = 1e15
# A healthy daemon sends no value outside these ranges, which would spoil every later sum.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Rate = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_RATE)]
# Names appear in the log of the receiver.
_ONE_LINE: Final = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z"


class ClusterMember(Message, frozen=True):
    """A node of the cluster."""

    id: str
    name: str
    host: str
    control_port: int
    zone: str = ""
    # joining, active, draining or away.
    state: str = ""


class ClusterMembers(Message, frozen=True):
    """The nodes of the cluster, as known to the responding node."""

    cluster: str
    # Id of the responding node.
    me: str
    members: Annotated[list[ClusterMember], msgspec.Meta(max_length=MAX_MEMBERS)]


class SnapshotReport(Message, frozen=True):
    """The parts of a snapshot that a node holds."""

    id: str
    # Bytes and blocks of the whole snapshot, whether held or not.
    total: Count
    blocks: Count
    # Datasets of which it is the current snapshot.
    datasets: list[str] = msgspec.field(default_factory=list)
    # Bytes of the snapshot in each tier.
    memory: Count = 0
    ssd: Count = 0
    # For each of 256 shards, the part that the node holds, from 0 to 255; empty if it holds or tracks nothing.
    shards: Annotated[bytes, msgspec.Meta(max_length=256)] = b""
    # Whether the whole snapshot is pinned.
    pinned: bool = False
    # Checks since the daemon started, some seconds apart, that found reads of a mount with the snapshot's dataset.
    reads: Count = 0


class RunningJob(Message, frozen=True, array_like=True):
    """A job that has published on the node."""

    name: str
    snapshot: str
    # Consumers of the job on the node, and their total bytes per second.
    ranks: Count
    rate: Rate


class CommandedWarmup(Message, frozen=True, array_like=True):
    """The progress of a warmup that a scheduler has ordered."""

    # Id of the order.
    id: str
    state: str
    blocks: Count
    total: Count
    bytes: Count
    # Blocks that no tier admits, and blocks that could not be fetched.
    skipped: Count = 0
    failed: Count = 0
    message: str = ""


class NodeLoad(Message, frozen=True):
    """Rates in bytes per second: the recent maximum, and the present ones."""

    # Maximum rates from origins, and from other nodes; 0 before the first bytes.
    origin_rate: Rate = 0.0
    peer_rate: Rate = 0.0
    # Present rates: from origins; from other nodes; to other nodes; reads of jobs on the node.
    fetched: Rate = 0.0
    received: Rate = 0.0
    given: Rate = 0.0
    demand: Rate = 0.0


class NodeReport(Message, frozen=True):
    """A node's report, complete or since an earlier version."""

    id: str
    name: str
    # Changes with each start of the daemon. Versions are only comparable within one start.
    instance: str
    # Version to send as `after` in the next poll.
    version: int
    # Whether all snapshots are listed; else only those changed since `after`.
    full: bool
    zone: str = ""
    state: str = ""
    # Bytes that all tiers together may hold, and bytes that they hold.
    capacity: Count = 0
    used: Count = 0
    snapshots: Annotated[list[SnapshotReport], msgspec.Meta(max_length=MAX_SNAPSHOTS)] = msgspec.field(
        default_factory=list
    )
    jobs: Annotated[list[RunningJob], msgspec.Meta(max_length=4096)] = msgspec.field(default_factory=list)
    warmups: Annotated[list[CommandedWarmup], msgspec.Meta(max_length=256)] = msgspec.field(default_factory=list)
    load: NodeLoad = NodeLoad()


class CommandKind(StrEnum):
    """A command from a scheduler to a node."""

    WARM = "warm"
    STOP = "stop"
    PIN = "pin"
    UNPIN = "unpin"
    LIMIT = "limit"
    EVICT = "evict"
    DRAIN = "drain"


class NodeCommand(Message, frozen=True):
    """A request to carry out a command on a dataset of this node."""

    kind: CommandKind
    # Id of a warmup, so that a repeated order is carried out once, and a warmup can be stopped.
    id: Annotated[str, msgspec.Meta(max_length=128, pattern=_ONE_LINE)] = ""
    dataset: Annotated[str, msgspec.Meta(max_length=256, pattern=_ONE_LINE)] = ""
    # Shards of a warmup to fetch, one bit each, 32 bytes, lowest bit first; empty for all.
    shards: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    # Job whose order of reads the warmup follows, if it has published here; else the warmup follows the listing.
    job: Annotated[str, msgspec.Meta(max_length=512)] = ""
    # For a limit: part of each tier, and seconds that blocks stay after their last read (0 for no limit).
    share: float | None = None
    ttl: float | None = None


class NodeCommandResult(Message, frozen=True):
    """The result of an order; for a warmup, that it has begun."""

    blocks: int = 0
    bytes: int = 0
