"""What the daemon and a mount's pusher say to each other: which blocks' pages to store and to drop.

Blocks are arrays: entries (u64) and block numbers within the file (u32), little-endian, of equal count.
"""

import msgspec

from cachefs.messages import Message


class HeldPages(Message, frozen=True):
    """Blocks of one snapshot whose pages were stored and not dropped since."""

    snapshot: str
    entries: bytes
    numbers: bytes


class PushSubscribe(Message, frozen=True):
    """Opens the stream of orders; a mount has one, and a newer one replaces it.

    mount: id in its MountReports; budget: bytes of page cache that may be filled now; held: what there is of orders of
    an earlier stream.
    """

    mount: str
    budget: int
    held: list[HeldPages] = msgspec.field(default_factory=list)


class PushOrder(Message, frozen=True):
    """Store these blocks' pages, or drop them, in this order. One without blocks shows that the daemon is there. check:
    they were stored before; store those of which the kernel has taken pages back."""

    serial: int
    snapshot: str
    entries: bytes
    numbers: bytes
    drop: bool = False
    check: bool = False


class OrderDone(Message, frozen=True, array_like=True):
    """failed: indices (u32) of the order's blocks that could not be stored or dropped."""

    serial: int
    failed: bytes = b""


class PushDone(Message, frozen=True):
    """What came of orders. budget: as in PushSubscribe, as of now; counters: cumulative (cachefs.mount.push.blocks)."""

    mount: str
    done: list[OrderDone]
    budget: int
    counters: dict[str, int] = msgspec.field(default_factory=dict)


class PushReply(Message, frozen=True):
    pass
