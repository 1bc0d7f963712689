"""Messages between daemon and fetch process: one message per packet, in msgpack.

The descriptors of a Batch's segments come with it. A process responds to each block once, with a Done or a Failed. It
sends a Report every HEARTBEAT_SECONDS while it has work, even an empty one, as a heartbeat. Its first report says that
it is ready.
"""

from typing import Final

import msgspec

from cachefs_daemon.origin.s3.prepared_get import GetParameters

# Largest packet in bytes. The kernel's own limit is about 200 KiB.
MAX_BYTES: Final = 128 << 10
# Blocks per batch, at most: each may have a key of 1 KiB. And descriptors per batch.
MAX_BLOCKS: Final = 32
MAX_SEGMENTS: Final = 2 * MAX_BLOCKS
# Results per report, at most: the checksums of a block of 64 MiB take 4 KiB.
MAX_RESULTS: Final = 24
# Longest reason of a failure, in bytes.
MAX_REASON: Final = 300
HEARTBEAT_SECONDS: Final = 0.25


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    """A message, or a part of one."""


class NumberedGetParameters(_Frame, frozen=True, array_like=True):
    """A way to request objects, with the number by which blocks refer to it."""

    number: int
    parameters: GetParameters


class SegmentToWrite(_Frame, frozen=True, array_like=True):
    """A segment file, sent as a descriptor."""

    # Number of the segment in its tier.
    number: int
    # Whether each record is to be an extent of its own.
    allocate: bool


class FetchCommand(_Frame, frozen=True, array_like=True):
    """A block to fetch."""

    # Identifies the block in reports.
    number: int
    # Number of a way, from this batch or an earlier one.
    parameters: int
    # Key and ETag of the object, which is the whole block.
    key: str
    etag: str
    # Bytes.
    size: int
    # Key of the block.
    block: bytes
    # Index of the segment to write to, and the offset of the record in it.
    segment: int
    start: int


class CommandBatch(_Frame, frozen=True, array_like=True):
    """A message from the daemon."""

    # Ways that this process does not know yet.
    parameters: list[NumberedGetParameters]
    segments: list[SegmentToWrite]
    blocks: list[FetchCommand]


class BlockWritten(_Frame, frozen=True, array_like=True):
    """A written block."""

    number: int
    # Checksums of its pieces.
    checksums: bytes
    # Seconds from the request to the last byte of the response.
    seconds: float
    # Requests to its server hedged since the last Done, and hedges that responded first.
    hedged: int = 0
    won: int = 0


class BlockFailed(_Frame, frozen=True, array_like=True):
    """A block that is not written, and will not be."""

    number: int
    # Cause of the failure.
    reason: str
    # Whether the server refused the request because of too many requests.
    throttled: bool = False


class FetchReport(_Frame, frozen=True, array_like=True):
    """A message from a fetch process."""

    done: list[BlockWritten] = []
    failed: list[BlockFailed] = []
