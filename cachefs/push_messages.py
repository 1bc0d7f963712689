"""Messages between the daemon and a mount's pusher: which blocks to store in the page cache and which to drop.

Blocks are two arrays of equal length, little-endian: *entries*, u64, the numbers of their files in the snapshot; and
*numbers*, u32, the numbers of the blocks in their files.
"""

import msgspec

from cachefs.messages import Message


class StoredPages(Message, frozen=True):
    """Blocks of one snapshot that were stored, and not dropped since."""

    snapshot: str
    entries: bytes
    numbers: bytes


class PushSubscription(Message, frozen=True):
    """Opens the stream of orders. A mount has one stream; a later one replaces an earlier one."""

    # The mount's id in its MountReports.
    mount: str
    # Bytes of the page cache that may be filled now.
    budget: int
    # Blocks stored by orders of earlier streams that are still in the page cache.
    held: list[StoredPages] = msgspec.field(default_factory=list)
    # Counters since the pusher started (see PushReport).
    counters: dict[str, int] = msgspec.field(default_factory=dict)
    # Whether the pusher stores and drops pages; otherwise it only reports which pages are there.
    pushes: bool = True
    # Directory of the mount; "" for a pusher of an older version.
    directory: str = ""


class PushCommand(Message, frozen=True):
    """A command to store blocks, or drop them, in this order. An empty order is the daemon's heartbeat."""

    # Number of the order in its stream.
    serial: int
    snapshot: str
    entries: bytes
    numbers: bytes
    drop: bool = False
    # Whether the blocks were stored before: store those whose pages the kernel has reclaimed.
    check: bool = False


class PushResult(Message, frozen=True, array_like=True):
    """The result of one order."""

    serial: int
    # Indices in the order of the blocks that could not be stored or dropped: u32, little-endian.
    failed: bytes = b""


class PushReport(Message, frozen=True):
    """The results of orders."""

    mount: str
    done: list[PushResult]
    # Bytes of the page cache that may be filled now.
    budget: int
    # Counters since the pusher started, by name (see cachefs.mount.push.blocks).
    counters: dict[str, int] = msgspec.field(default_factory=dict)


class PushAcknowledgement(Message, frozen=True):
    """Acknowledges a PushReport."""
