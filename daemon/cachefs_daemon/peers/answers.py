"""What is asked of a peer, and what comes of it."""

from dataclasses import dataclass
from enum import Enum

from cachefs.messages import BlockRef


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block that a peer is asked for."""

    ref: BlockRef
    key: bytes
    # Bytes that it has.
    length: int


@dataclass(frozen=True, slots=True)
class How:
    """How a peer is asked."""

    # Loop time at which an answer is needed.
    until: float
    # It is to bring the block from the origin where it does not have it.
    fetch: bool = False
    # Nobody waits for the block yet.
    ahead: bool = False
    # This node would fetch the block from the origin itself (see TakeIt).
    may_take: bool = False
    # The peer waits a while for the snapshot where that is on its way to it.
    await_snapshot: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class PeerBlock:
    """The block: all its bytes, verified."""

    # Use it and let go of it: the memory belongs to a connection, which receives the next answers there once nobody
    # holds any of it.
    data: memoryview
    # Of all its pieces, 8 bytes each.
    checksums: bytes
    # Where the peer had it: MEMORY or SSD; None where it was in no tier (it has just come from the origin).
    tier: int | None


@dataclass(frozen=True, slots=True)
class NotHere:
    """The peer does not have it."""


@dataclass(frozen=True, slots=True)
class LacksSnapshot:
    """The peer does not have the block, and cannot bring it: it does not have the snapshot that tells where from."""


@dataclass(frozen=True, slots=True)
class TakeIt:
    """Whoever asks is to fetch it from the origin."""


@dataclass(frozen=True, slots=True)
class Busy:
    """The peer lives, and has too much to do. Others are to be asked, or this one later."""


class Why(Enum):
    """Kinds of failures."""

    # It did not come until the deadline of who asked.
    LATE = "late"
    # The peer cannot be reached, or says nothing any more. It is not asked for a while.
    AWAY = "away"
    # One of the two has an older ring epoch than the other (see Failed.epoch).
    EPOCH = "epoch"
    # At its address there is somebody else: another node, or another run of its daemon, or another cluster.
    STRANGER = "stranger"
    # It does not take us for a member, or we do not take it for one; or it speaks another version.
    REFUSED = "refused"
    # What came was not the block, twice.
    WRONG = "wrong"
    # It has tried, and says why it could not.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Failed:
    """Nothing came of it."""

    # One line that names the peer.
    reason: str
    why: Why = Why.FAILED
    # The peer's ring epoch, where that is why.
    epoch: int = 0


PeerAnswer = PeerBlock | NotHere | LacksSnapshot | TakeIt | Busy | Failed

NOT_HERE = NotHere()
LACKS_SNAPSHOT = LacksSnapshot()
TAKE_IT = TakeIt()
BUSY = Busy()


@dataclass(slots=True)
class PeerCounters:
    """Of one peer, since the daemon started: what this node got from it."""

    # Blocks and bytes that came, and seconds from the question to the last byte, summed up over blocks.
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    # Blocks that it did not have.
    not_here: int = 0
    # Blocks that it gave back (see TakeIt).
    given_back: int = 0
    # Blocks for which it had no time, that failed for other reasons, and that came with other bytes.
    busy: int = 0
    failures: int = 0
    wrong: int = 0
