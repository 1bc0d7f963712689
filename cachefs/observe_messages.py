"""What a node tells of itself to those who place jobs, and what they may order (see cachefs.messages for the rules).

Packed by msgpack, over the control endpoint.
"""

from enum import StrEnum
from typing import Annotated, Final

import msgspec

from cachefs.messages import Message

# Who asks: a name in `[cluster] observers` or `[cluster] schedulers` of the daemon, if there is no TLS.
OBSERVER: Final = "Cachefs-Observer"

MEMBERS_PATH: Final = "/observe/cluster"
REPORT_PATH: Final = "/observe/node"
ORDER_PATH: Final = "/observe/order"
# Part of the path of all that observers may ask.
OBSERVE: Final = "/observe/"

# Seconds between two answers to the same observer, and that a poll waits for news at most.
LEAST_PAUSE: Final = 1.0
MOST_WAIT: Final = 60.0
# Bytes of one report, and snapshots in it, at most.
MOST_REPORT: Final = 8 << 20
MOST_SNAPSHOTS: Final = 2048
MOST_MEMBERS: Final = 16384
# Bytes in a second that are believed.
MOST_RATE: Final = 1e15
# What is none of these is not said by a daemon that is well, and would be in every sum from then on.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Rate = Annotated[float, msgspec.Meta(ge=0.0, le=MOST_RATE)]
# Names go into the log of whoever is asked.
_ONE_LINE: Final = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z"


class Member(Message, frozen=True):
    """A node of the cluster."""

    id: str
    name: str
    host: str
    control_port: int
    zone: str = ""
    # joining, active, draining or away.
    state: str = ""


class Members(Message, frozen=True):
    """Nodes of the cluster, as the one that answers knows them."""

    cluster: str
    # Id of the one that answers.
    me: str
    members: Annotated[list[Member], msgspec.Meta(max_length=MOST_MEMBERS)]


class SnapshotReport(Message, frozen=True):
    """What a node has of a snapshot."""

    id: str
    # Bytes and blocks of all of it, here or not.
    total: Count
    blocks: Count
    # Of which it is the current one.
    datasets: list[str] = msgspec.field(default_factory=list)
    # Bytes of it in each tier.
    memory: Count = 0
    ssd: Count = 0
    # Of each of 256 shards, the part that is here: 0 to 255 each. Empty: nothing is, or it is not followed.
    shards: Annotated[bytes, msgspec.Meta(max_length=256)] = b""
    # Is all of it pinned?
    pinned: bool = False
    # Looks since the daemon started, some seconds apart, that found reads of a mount which shows a dataset of it.
    reads: Count = 0


class RunningJob(Message, frozen=True, array_like=True):
    """A job that has published here."""

    name: str
    snapshot: str
    # Its consumers here, and bytes in a second that they read together.
    ranks: Count
    rate: Rate


class OrderedWarmup(Message, frozen=True, array_like=True):
    """How far a warm-up is that was ordered."""

    # As in the order.
    id: str
    state: str
    blocks: Count
    total: Count
    bytes: Count
    # Blocks that no tier takes, and that could not be fetched.
    skipped: Count = 0
    failed: Count = 0
    message: str = ""


class Load(Message, frozen=True):
    """Bytes in a second: what of late was the most that came in a second, and what comes and goes now."""

    # The most that origins gave, that other nodes gave; 0: nothing came yet.
    origin_rate: Rate = 0.0
    peer_rate: Rate = 0.0
    # Now: from origins; from other nodes; to other nodes; what jobs here read.
    fetched: Rate = 0.0
    received: Rate = 0.0
    given: Rate = 0.0
    demand: Rate = 0.0


class NodeReport(Message, frozen=True):
    """News of a node."""

    id: str
    name: str
    # Changes with each start of its daemon. Versions of two starts have nothing to do with each other.
    instance: str
    # What the next poll gives as `after`.
    version: int
    # Does it name all snapshots? Else only those that have changed since `after`.
    full: bool
    zone: str = ""
    state: str = ""
    # Bytes that all tiers may take, and that they take.
    capacity: Count = 0
    used: Count = 0
    snapshots: Annotated[list[SnapshotReport], msgspec.Meta(max_length=MOST_SNAPSHOTS)] = msgspec.field(
        default_factory=list
    )
    jobs: Annotated[list[RunningJob], msgspec.Meta(max_length=4096)] = msgspec.field(default_factory=list)
    warmups: Annotated[list[OrderedWarmup], msgspec.Meta(max_length=256)] = msgspec.field(default_factory=list)
    load: Load = Load()


class OrderKind(StrEnum):
    """What a scheduler may have a node do."""

    WARM = "warm"
    STOP = "stop"
    PIN = "pin"
    UNPIN = "unpin"
    LIMIT = "limit"
    EVICT = "evict"
    DRAIN = "drain"


class Order(Message, frozen=True):
    """Do something with a dataset on this node."""

    kind: OrderKind
    # Of a warm-up: names it, so that an order that comes twice is carried out once, and that it can be stopped.
    id: Annotated[str, msgspec.Meta(max_length=128, pattern=_ONE_LINE)] = ""
    dataset: Annotated[str, msgspec.Meta(max_length=256, pattern=_ONE_LINE)] = ""
    # Of a warm-up: the shards to bring, a bit each, 32 bytes, lowest bit first; empty: all.
    shards: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    # The warm-up goes in the order in which this job reads, where it has published here; else in the listing's.
    job: Annotated[str, msgspec.Meta(max_length=512)] = ""
    # Of a limit: part of each tier, and seconds that blocks stay after their last read (0: no limit).
    share: float | None = None
    ttl: float | None = None


class OrderDone(Message, frozen=True):
    """What has become of an order; of a warm-up, that it has begun."""

    blocks: int = 0
    bytes: int = 0
