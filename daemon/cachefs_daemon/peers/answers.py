"""Requests to a peer for blocks, and their responses."""

from dataclasses import dataclass
from enum import Enum

from cachefs.messages import BlockRef


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block to request from a peer."""

    ref: BlockRef
    key: bytes
    # Length of the block in bytes.
    length: int


@dataclass(frozen=True, slots=True)
class How:
    """Options of a request to a peer."""

    # Deadline, in loop time.
    until: float
    # The peer fetches the block from the origin if it does not have it.
    fetch: bool = False
    # The block is read ahead: no reader waits for it yet.
    ahead: bool = False
    # This node is ready to fetch the block from the origin itself (see TakeIt).
    may_take: bool = False
    # The peer waits a while for a snapshot that is on its way to it.
    await_snapshot: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class PeerBlock:
    """A whole, verified block."""

    # Release the view soon: its memory belongs to a connection, which reuses it once no view is left.
    data: memoryview
    # Checksums of all pieces, 8 bytes each.
    checksums: bytes
    # MEMORY or SSD: the peer's tier that held the block; None if it was in none (just fetched from the origin).
    tier: int | None


@dataclass(frozen=True, slots=True)
class NotHere:
    """The peer does not have the block."""


@dataclass(frozen=True, slots=True)
class LacksSnapshot:
    """The peer neither has the block nor can fetch it, as it lacks the snapshot."""


@dataclass(frozen=True, slots=True)
class TakeIt:
    """The peer tells this node to fetch the block from the origin itself."""


@dataclass(frozen=True, slots=True)
class Busy:
    """The peer is alive but overloaded: ask other peers, or this one later."""


class Why(Enum):
    """Kinds of failures."""

    # The block did not arrive by the deadline.
    LATE = "late"
    # The peer is unreachable or silent. No request is sent to it for a while.
    AWAY = "away"
    # One of the two nodes has an older ring epoch than the other (see Failed.epoch).
    EPOCH = "epoch"
    # Another node, another run of the node's daemon or another cluster answers at the peer's address.
    STRANGER = "stranger"
    # One of the two nodes does not accept the other as a member, or they speak different protocol versions.
    REFUSED = "refused"
    # The peer sent other bytes than those of the block, twice.
    WRONG = "wrong"
    # The peer tried and reports why it failed.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that failed."""

    # One line, which names the peer.
    reason: str
    why: Why = Why.FAILED
    # The peer's ring epoch, if `why` is EPOCH.
    epoch: int = 0


PeerAnswer = PeerBlock | NotHere | LacksSnapshot | TakeIt | Busy | Failed

NOT_HERE = NotHere()
LACKS_SNAPSHOT = LacksSnapshot()
TAKE_IT = TakeIt()
BUSY = Busy()


@dataclass(slots=True)
class PeerCounters:
    """Counts the blocks that this node requested from one peer since the daemon started."""

    # Blocks and bytes received, and seconds from the request to the last byte, summed up over blocks.
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    # Blocks that the peer did not have.
    not_here: int = 0
    # Blocks that the peer told this node to fetch (see TakeIt).
    given_back: int = 0
    # Blocks refused as busy, failed for other reasons, and received with wrong bytes.
    busy: int = 0
    failures: int = 0
    wrong: int = 0
