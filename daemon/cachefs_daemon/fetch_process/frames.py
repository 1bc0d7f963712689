"""What daemon and fetch process tell each other: one message a packet, in msgpack.

With a Batch come the descriptors of its segments. A process answers each block of it once, with a Done or a Failed, and
sends a Report every BEAT_SECONDS while it has anything to do, though that may be an empty one. Its first one says that
it is ready.
"""

from typing import Final

import msgspec

from cachefs_daemon.origin.order import Way

# Bytes of a packet, at most. The kernel's own limit is about 200 KiB.
MOST_BYTES: Final = 128 << 10
# Blocks of one batch, at most: each may have a key of 1 KiB. And descriptors that come with it.
MOST_BLOCKS: Final = 32
MOST_SEGMENTS: Final = 2 * MOST_BLOCKS
# Answers in one report, at most: the checksums of a block of 64 MiB take 4 KiB.
MOST_ANSWERS: Final = 24
# Bytes of the reason for a failure, at most.
MOST_REASON: Final = 300
BEAT_SECONDS: Final = 0.25


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    """One message, or a part of it."""


class NumberedWay(_Frame, frozen=True, array_like=True):
    """How blocks are asked for that name this number."""

    number: int
    way: Way


class Segment(_Frame, frozen=True, array_like=True):
    """A file that comes as a descriptor."""

    # Of the segment, in its tier.
    number: int
    # Whether each record is to be an extent of its own.
    allocate: bool


class Wanted(_Frame, frozen=True, array_like=True):
    """A block to be brought."""

    # Names it in the report.
    number: int
    # Number of a way, from this batch or an earlier one.
    way: int
    # Of the object, which is the whole block.
    key: str
    etag: str
    # Bytes.
    size: int
    # Key of the block.
    block: bytes
    # Which of the segments it is written to, and where its record begins there.
    segment: int
    start: int


class Batch(_Frame, frozen=True, array_like=True):
    """What the daemon sends."""

    # Those that this process does not know yet.
    ways: list[NumberedWay]
    segments: list[Segment]
    blocks: list[Wanted]


class Done(_Frame, frozen=True, array_like=True):
    """A block is written."""

    number: int
    # Of its pieces.
    checksums: bytes
    # From the request to the last byte of the answer.
    seconds: float
    # Requests to its server that were sent a second time since the last Done, and those that were the first to answer.
    hedged: int = 0
    won: int = 0


class Failed(_Frame, frozen=True, array_like=True):
    """A block is not written, and will not be."""

    number: int
    # Why.
    reason: str
    # Whether the server refused it since there were too many requests.
    throttled: bool = False


class Report(_Frame, frozen=True, array_like=True):
    """What a fetch process sends."""

    done: list[Done] = []
    failed: list[Failed] = []
