"""Requests to a peer for blocks, and their responses."""

import math
from dataclasses import dataclass
from enum import Enum

from cachefs.messages import BlockRef


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """A block to request from a peer."""

    ref: BlockRef
    key: bytes
    # Length of the block in bytes.
    length: int
    # The job that reads the block; empty for readers that have published nothing.
    job: str = ""
    # Loop time from which a block that is read ahead is urgent; inf: never.
    urgent_at: float = math.inf


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of a request to a peer."""

    # Deadline, in loop time.
    deadline: float
    # The peer fetches the block from the origin if it does not have it.
    may_fetch: bool = False
    # The block is read ahead: no reader waits for it yet.
    is_ahead: bool = False
    # This node is ready to fetch the block from the origin itself (see FetchYourself).
    may_delegate: bool = False
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
class BlockNotFound:
    """The peer does not have the block."""


@dataclass(frozen=True, slots=True)
class SnapshotNotFound:
    """The peer neither has the block nor can fetch it, as it lacks the snapshot."""


@dataclass(frozen=True, slots=True)
class FetchYourself:
    """The peer tells this node to fetch the block from the origin itself."""


@dataclass(frozen=True, slots=True)
class PeerOverloaded:
    """The peer is alive but overloaded: ask other peers, or this one later."""


class FailureKind(Enum):
    """Kinds of failures."""

    # The block did not arrive by the deadline.
    LATE = "late"
    # The peer is unreachable or silent. No request is sent to it for a while.
    UNREACHABLE = "away"
    # One of the two nodes has an older ring epoch than the other (see PeerRequestFailed.epoch).
    OTHER_EPOCH = "epoch"
    # Another node, another run of the node's daemon or another cluster answers at the peer's address.
    WRONG_NODE = "stranger"
    # One of the two nodes does not accept the other as a member, or they speak different protocol versions.
    REFUSED = "refused"
    # The peer sent other bytes than those of the block, twice.
    WRONG_BYTES = "wrong"
    # The peer tried and reports why it failed.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PeerRequestFailed:
    """A request that failed."""

    # One line, which names the peer.
    reason: str
    kind: FailureKind = FailureKind.FAILED
    # The peer's ring epoch, if `kind` is OTHER_EPOCH.
    epoch: int = 0


PeerResponse = PeerBlock | BlockNotFound | SnapshotNotFound | FetchYourself | PeerOverloaded | PeerRequestFailed

BLOCK_NOT_FOUND = BlockNotFound()
SNAPSHOT_NOT_FOUND = SnapshotNotFound()
FETCH_YOURSELF = FetchYourself()
PEER_OVERLOADED = PeerOverloaded()


@dataclass(slots=True)
class PeerCounters:
    """Counts the blocks that this node requested from one peer since the daemon started."""

    # Blocks and bytes received, and seconds from the request to the last byte, summed up over blocks.
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    # Blocks that the peer did not have.
    not_here: int = 0
    # Blocks that the peer told this node to fetch (see FetchYourself).
    delegated: int = 0
    # Blocks refused as busy, failed for other reasons, and received with wrong bytes.
    busy: int = 0
    failures: int = 0
    wrong: int = 0
