"""What is known about nodes, snapshots and jobs, as plain records. What comes from outside is checked here, and only
here: a record that exists makes sense."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

# Parts that each snapshot is looked at in, whatever its size: blocks with neighbouring numbers. 256 bytes say which
# parts of a snapshot a node has, and tell two nodes with the same half from two that complement each other.
SHARDS: Final = 256
# The number that stands for the whole of a shard.
WHOLE: Final = 255

# Of each shard, the part of its bytes that is there: 0 (none) to 255 (all). Shape (SHARDS,), uint8.
Shards = npt.NDArray[np.uint8]
# Of each rank, the part of its reads that is in each shard; each row adds up to 1. Shape (ranks, SHARDS), float32.
Order = npt.NDArray[np.float32]

# "up": takes jobs and keeps blocks; "draining": gives its blocks away; "away": its daemon does not answer, or has left.
State = Literal["up", "draining", "away"]

# Most of what one answer may be made of. What is larger is refused, so that no request costs others their patience.
MOST_NODES: Final = 20_000
MOST_SNAPSHOTS: Final = 2_048
MOST_RANKS: Final = 16_384
_MOST_TEXT: Final = 512


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """What a node has of a snapshot."""

    # Bytes in each of its tiers.
    memory: int
    ssd: int
    # Which: see Shards. None: as if spread evenly.
    shards: Shards | None = None
    # Seconds since anybody there has read it: what is read least recently is evicted first.
    idle: float = 0.0
    # Is it pinned there?
    pinned: bool = False

    def __post_init__(self) -> None:
        _at_least_zero(memory=self.memory, ssd=self.ssd, idle=self.idle)
        if self.shards is not None and (self.shards.shape != (SHARDS,) or self.shards.dtype != np.uint8):
            raise ValueError(f"shards are {SHARDS} numbers of type uint8, not {self.shards.shape} {self.shards.dtype}")

    @property
    def bytes(self) -> int:
        return self.memory + self.ssd


@dataclass(frozen=True, slots=True, eq=False)
class NodeFacts:
    """What a node said of itself. Rates are in bytes/s; 0 is for one that nobody has measured or set."""

    name: str
    # Where it is, as the scheduler's administrator calls it; "" is unknown, and counts as one zone (region) too.
    zone: str = ""
    region: str = ""
    state: State = "up"
    # Bytes that its tiers have room for; how many of these in memory; and bytes in them.
    capacity: int = 0
    memory: int = 0
    used: int = 0
    # Bytes of these that make room for nothing else: pinned, or read again by jobs that run. At least what `copies`
    # says of snapshots in `jobs`, and of pinned ones.
    needed: int = 0
    # What it can get from origins; what its network link carries, in each direction; what its SSD tier
    # delivers (memory is never the limit).
    origin_rate: float = 0.0
    peer_rate: float = 0.0
    tier_rate: float = 0.0
    # What its readers take of its SSD tier now; what it gets over the network (origins and nodes), what of that from
    # origins; and what it gives to other nodes.
    demand: float = 0.0
    received: float = 0.0
    fetched: float = 0.0
    given: float = 0.0
    # Seconds since it was heard.
    age: float = 0.0
    # By snapshot id, what is in its tiers.
    copies: Mapping[str, Copy] = field(default_factory=dict)
    # By snapshot id, how many jobs read it on this node now.
    jobs: Mapping[str, int] = field(default_factory=dict)
    # By snapshot id, the names of these jobs, which are the same on all nodes of a job.
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > _MOST_TEXT:
            raise ValueError(f"a node's name has 1 to {_MOST_TEXT} characters, not {len(self.name)}")
        _at_least_zero(capacity=self.capacity, memory=self.memory, used=self.used, needed=self.needed, age=self.age)
        _at_least_zero(origin_rate=self.origin_rate, peer_rate=self.peer_rate, tier_rate=self.tier_rate)
        _at_least_zero(demand=self.demand, received=self.received, fetched=self.fetched, given=self.given)
        if len(self.copies) > MOST_SNAPSHOTS or len(self.jobs) > MOST_SNAPSHOTS:
            raise ValueError(
                f"node {self.name} names more than {MOST_SNAPSHOTS:,} snapshots; those with most bytes are enough"
            )


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """What is to be read."""

    id: str
    bytes: int
    blocks: int

    def __post_init__(self) -> None:
        _at_least_zero(bytes=self.bytes, blocks=self.blocks)


@dataclass(frozen=True, slots=True)
class Links:
    """What nodes share. Bytes/s; 0: nobody knows, so it limits nothing."""

    # What all nodes together can get from origins.
    origin: float = 0.0
    # What all nodes of one zone together can get from nodes of other zones, and of one region from other regions.
    zone: float = 0.0
    region: float = 0.0

    def __post_init__(self) -> None:
        _at_least_zero(origin=self.origin, zone=self.zone, region=self.region)


@dataclass(frozen=True, slots=True, eq=False)
class JobAsk:
    """A job that is to run."""

    id: str
    # The id of the snapshot that it reads.
    snapshot: str
    # Readers, each of which the scheduler places on a node, and which share the snapshot out among them in each epoch.
    ranks: int = 1
    # Bytes/s that each rank reads if it never waits; 0: unknown, then it is as fast as its data come.
    rate: float = 0.0
    # Epochs that it will read; 0: unknown.
    epochs: int = 0
    # Where each rank reads, if known; None: everywhere alike, as a shuffled sampler does.
    order: Order | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MOST_RANKS:
            raise ValueError(f"job {self.id} has {self.ranks:,} ranks; 1 to {MOST_RANKS:,} are possible")
        _at_least_zero(rate=self.rate, epochs=self.epochs)
        if self.order is not None and self.order.shape != (self.ranks, SHARDS):
            raise ValueError(f"job {self.id}: its order has the shape {self.order.shape}, not {(self.ranks, SHARDS)}")


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one rank would meet on one node."""

    # Seconds that it waits in its first epoch, and in each later one.
    first: float
    later: float
    # Bytes of its first epoch, by where they would come from: this node; others of its zone; others of its region; any
    # other node; an origin.
    local: int
    zone: int
    region: int
    elsewhere: int
    origin: int
    # How much of what this node said still counts: 1 (all of it) to 0, by its age.
    trust: float


def shards_of(blocks: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> Shards:
    """Which part of each shard the *blocks* are. Shape (SHARDS,), uint8, rounded down, so WHOLE means all of it.

    blocks: numbers of blocks that are there, each once; sizes: bytes of all blocks of the snapshot, shape (blocks,).
    A snapshot with fewer blocks than shards has some blocks in several shards.
    """
    total = len(sizes)
    if not total:
        return np.full(SHARDS, WHOLE, np.uint8)
    if total < SHARDS:
        there = np.zeros(total, np.bool_)
        there[blocks] = True
        return np.where(there[np.arange(SHARDS) * total // SHARDS], WHOLE, 0).astype(np.uint8)
    of_all = np.bincount(np.arange(total) * SHARDS // total, sizes, SHARDS)
    of_these = np.bincount(blocks.astype(np.int64) * SHARDS // total, sizes[blocks], SHARDS)
    # A shard of empty files has no bytes, and lacks none.
    part = np.divide(of_these * WHOLE, of_all, out=np.full(SHARDS, float(WHOLE)), where=of_all > 0)
    found: Shards = np.floor(part).astype(np.uint8)
    return found


def _at_least_zero(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value}; it is a number, 0 or more")
