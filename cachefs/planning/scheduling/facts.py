"""The facts about nodes, snapshots and jobs, as plain records. External input is checked here, and only here: a record
that exists is valid."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

# Parts into which each snapshot is divided, whatever its size: ranges of block numbers. 256 bytes then tell which parts
# of a snapshot a node has, and distinguish two nodes with the same half from two with complementary halves.
SHARDS: Final = 256
# The number for a complete shard.
WHOLE: Final = 255

# Per shard, the part of its bytes that is present: 0 (none) to 255 (all). Shape (SHARDS,), uint8.
Shards = npt.NDArray[np.uint8]
# Per rank, the part of its reads in each shard; each row adds up to 1. Shape (ranks, SHARDS), float32.
ReadDistribution = npt.NDArray[np.float32]

# "up": takes jobs and keeps blocks; "draining": gives its blocks away; "away": its daemon does not answer, or has left.
NodeCondition = Literal["up", "draining", "away"]

# Limits of one request. Larger ones are refused, so that no request delays others.
MAX_NODES: Final = 20_000
MAX_SNAPSHOTS: Final = 2_048
MAX_RANKS: Final = 16_384
_MAX_NAME_LENGTH: Final = 512


@dataclass(frozen=True, slots=True, eq=False)
class NodeCopy:
    """A node's copy of a snapshot, or of a part of it."""

    # Bytes in each of its tiers.
    memory: int
    ssd: int
    # Parts of shards; None: spread evenly.
    shards: Shards | None = None
    # Seconds since the last read there: the data read least recently are evicted first.
    idle: float = 0.0
    # Whether it is pinned there.
    pinned: bool = False

    def __post_init__(self) -> None:
        _check_not_negative(memory=self.memory, ssd=self.ssd, idle=self.idle)
        if self.shards is not None and (self.shards.shape != (SHARDS,) or self.shards.dtype != np.uint8):
            raise ValueError(f"shards are {SHARDS} numbers of type uint8, not {self.shards.shape} {self.shards.dtype}")

    @property
    def bytes(self) -> int:
        return self.memory + self.ssd


@dataclass(frozen=True, slots=True, eq=False)
class NodeFacts:
    """The report of a node. Rates are in bytes/s; 0: neither measured nor set."""

    name: str
    # Location, as named by the scheduler's administrator; "": unknown, which counts as one zone (region) too.
    zone: str = ""
    region: str = ""
    state: NodeCondition = "up"
    # Room of its tiers in bytes; the part of it in memory; bytes in use.
    capacity: int = 0
    memory: int = 0
    used: int = 0
    # Bytes in use that cannot make room: pinned, or read again by running jobs. At least what `copies` has of snapshots
    # in `jobs`, and of pinned ones.
    needed: int = 0
    # Rate from origins; rate of its network link, in each direction; rate of its SSD tier (memory is never the limit).
    origin_rate: float = 0.0
    peer_rate: float = 0.0
    tier_rate: float = 0.0
    # Present load: reads from its SSD tier; bytes received over the network (origins and nodes), and from origins
    # alone; bytes given to other nodes.
    demand: float = 0.0
    received: float = 0.0
    fetched: float = 0.0
    given: float = 0.0
    # Seconds since the report.
    age: float = 0.0
    # Snapshot id -> data in its tiers.
    copies: Mapping[str, NodeCopy] = field(default_factory=dict)
    # Snapshot id -> number of jobs that read it on this node now.
    jobs: Mapping[str, int] = field(default_factory=dict)
    # Snapshot id -> names of these jobs, which are the same on all nodes of a job.
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > _MAX_NAME_LENGTH:
            raise ValueError(f"a node's name has 1 to {_MAX_NAME_LENGTH} characters, not {len(self.name)}")
        _check_not_negative(
            capacity=self.capacity, memory=self.memory, used=self.used, needed=self.needed, age=self.age
        )
        _check_not_negative(origin_rate=self.origin_rate, peer_rate=self.peer_rate, tier_rate=self.tier_rate)
        _check_not_negative(demand=self.demand, received=self.received, fetched=self.fetched, given=self.given)
        if len(self.copies) > MAX_SNAPSHOTS or len(self.jobs) > MAX_SNAPSHOTS:
            raise ValueError(
                f"node {self.name} names more than {MAX_SNAPSHOTS:,} snapshots; those with most bytes are enough"
            )


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """The size of a snapshot."""

    id: str
    bytes: int
    blocks: int

    def __post_init__(self) -> None:
        _check_not_negative(bytes=self.bytes, blocks=self.blocks)


@dataclass(frozen=True, slots=True)
class Links:
    """The shared links. Bytes/s; 0: unknown, and no limit."""

    # From origins to all nodes together.
    origin: float = 0.0
    # From other zones to all nodes of one zone together, and from other regions to all of one region.
    zone: float = 0.0
    region: float = 0.0

    def __post_init__(self) -> None:
        _check_not_negative(origin=self.origin, zone=self.zone, region=self.region)


@dataclass(frozen=True, slots=True, eq=False)
class JobRequest:
    """A job that is to run."""

    id: str
    # Id of the snapshot that it reads.
    snapshot: str
    # Readers, each placed on a node by the scheduler, which share out the snapshot among them in each epoch.
    ranks: int = 1
    # Bytes/s that each rank reads without waiting; 0: unknown, it is then as fast as its data arrive.
    rate: float = 0.0
    # Epochs that it will read; 0: unknown.
    epochs: int = 0
    # Distribution of each rank's reads, if known; None: uniform, as with a shuffled sampler.
    distribution: ReadDistribution | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ValueError(f"job {self.id} has {self.ranks:,} ranks; 1 to {MAX_RANKS:,} are possible")
        _check_not_negative(rate=self.rate, epochs=self.epochs)
        if self.distribution is not None and self.distribution.shape != (self.ranks, SHARDS):
            raise ValueError(
                f"job {self.id}: its order has the shape {self.distribution.shape}, not {(self.ranks, SHARDS)}"
            )


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate for one rank on one node."""

    # Seconds that it waits in its first epoch, and in each later one.
    first: float
    later: float
    # Bytes of its first epoch by source: this node; others of its zone; others of its region; any other node; an
    # origin.
    local: int
    zone: int
    region: int
    elsewhere: int
    origin: int
    # How much this node's report still counts, by its age: 1 (fully) to 0.
    trust: float


def shards_of(blocks: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> Shards:
    """Return the part of each shard that the *blocks* are. Shape (SHARDS,), uint8, rounded down, so WHOLE means all of
    it.

    blocks: numbers of the blocks present, each once; sizes: bytes of all blocks of the snapshot, shape (blocks,). In a
    snapshot with fewer blocks than shards, a block belongs to several shards.
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
    # A shard of empty files has no bytes, and is complete.
    part = np.divide(of_these * WHOLE, of_all, out=np.full(SHARDS, float(WHOLE)), where=of_all > 0)
    found: Shards = np.floor(part).astype(np.uint8)
    return found


def _check_not_negative(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value}; it is a number, 0 or more")
