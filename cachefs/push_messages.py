"""Messages between the daemon and a mount's pusher: which blocks to store in the page cache and which to drop.

Blocks are two arrays of equal length, little-endian: *entries*, u64, the numbers of their files in the snapshot; and
*numbers*, u32, the numbers of the blocks in their files.
"""

import msgspec

from cachefs.messages import Message


class HeldPages(Message, frozen=True):
    """Blocks of one snapshot that were stored, and not dropped since then."""

    snapshot: str
    entries: bytes
    numbers: bytes


class PushSubscribe(Message, frozen=True):
    """Opens the stream of orders. A mount has one stream; a later one takes the place of an earlier one."""

    # The mount's id in its MountReports.
    mount: str
    # Bytes of the page cache that may be filled now.
    budget: int
    # The blocks that were stored by orders of earlier streams, and are still there.
    held: list[HeldPages] = msgspec.field(default_factory=list)
    # What the pusher has counted since it started (see PushDone).
    counters: dict[str, int] = msgspec.field(default_factory=dict)
    # False where pages are neither stored nor dropped: it only says which are there.
    pushes: bool = True
    # Where the mount is; empty where its pusher is of an older version.
    directory: str = ""


class PushOrder(Message, frozen=True):
    """Store blocks, or drop them, in this order. An order without blocks only shows that the daemon is there."""

    # Number of the order in its stream.
    serial: int
    snapshot: str
    entries: bytes
    numbers: bytes
    drop: bool = False
    # The blocks were stored before. Store those of which the kernel has taken pages back.
    check: bool = False


class OrderDone(Message, frozen=True, array_like=True):
    """The result of one order."""

    serial: int
    # Indices, in the order, of the blocks that could not be stored or dropped: u32, little-endian.
    failed: bytes = b""


class PushDone(Message, frozen=True):
    """The results of orders."""

    mount: str
    done: list[OrderDone]
    # Bytes of the page cache that may be filled now.
    budget: int
    # What the pusher has counted since it started, by name (see cachefs.mount.push.blocks).
    counters: dict[str, int] = msgspec.field(default_factory=dict)


class PushReply(Message, frozen=True):
    """The daemon has the report."""
