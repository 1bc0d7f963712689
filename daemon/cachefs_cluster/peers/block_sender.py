"""Sends blocks of this node to peers: finds them in the index, and reads segments or the daemon's responses."""

import contextlib
import errno
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cachefs.block import MEMORY, BlockLocation, piece_count, pieces_match
from cachefs.index import IndexReader
from cachefs.messages import FetchedBlock
from cachefs.segment import segment_path
from cachefs_cluster.peers.protocol import NO_TIER, RequestedBlock, block_end, block_start
from cachefs_cluster.peers.wire import ConnectionLost, Wire

MAX_OPEN: Final = 512
# The least bytes a second at which a peer must read a block, and the seconds that it has for a block in any case. The
# connection of a slower peer is closed.
MIN_RATE: Final = 1 << 20
GRACE_SECONDS: Final = 10.0


class SegmentDescriptor:
    """An open file, closed once no thread refers to it: one may send from it while another drops it from the table."""

    __slots__ = ("descriptor",)

    def __init__(self, path: Path, owner: int) -> None:
        """Open a segment without following a planted link or blocking on a pipe. owner: uid of the daemon. Raises
        OSError."""
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(self.descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != owner:
            raise PermissionError(errno.EPERM, "not a segment of the daemon", str(path))

    def __del__(self) -> None:
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self.descriptor)


class SegmentDescriptors:
    """A table of at most MAX_OPEN open segments. Thread-safe."""

    def __init__(self, directories: Mapping[int, Path], owner: int) -> None:
        self._directories = dict(directories)
        self._owner = owner
        self._lock = threading.Lock()
        # by tier and segment number, oldest first
        self._open: OrderedDict[tuple[int, int], SegmentDescriptor] = OrderedDict()

    def open_segment(self, location: BlockLocation) -> SegmentDescriptor | None:
        """Return the file that holds the block; None if it is gone."""
        name = (location.tier, location.segment)
        found = self._open.get(name)
        if found is not None:
            return found
        directory = self._directories.get(location.tier)
        if directory is None:
            return None
        try:
            opened = SegmentDescriptor(segment_path(directory, location.segment), self._owner)
        except OSError:
            return None
        with self._lock:
            self._open[name] = opened
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        return opened

    def forget_unlinked(self) -> None:
        """Close files that the daemon has deleted, so that their space becomes free."""
        with self._lock:
            for name, one in list(self._open.items()):
                if os.fstat(one.descriptor).st_nlink == 0:
                    del self._open[name]


class BlockSender:
    """Finds and sends blocks. Thread-safe."""

    def __init__(self, index: Path, tiers: Mapping[int, Path]) -> None:
        """Open the node's index. tiers: directory by tier number. Raises CachefsError."""
        self.index = IndexReader(index)
        self.segments = SegmentDescriptors(tiers, self.index.owner)

    def find_block(self, block: RequestedBlock) -> BlockLocation | None:
        """Return the location of the block, if it is here with the length that the peer expects."""
        location = self.index.get(block.key)
        return location if location is not None and location.length == block.length else None

    def has_right_bytes(self, block: RequestedBlock, location: BlockLocation) -> bool:
        """Read the block, and return whether it matches its checksums."""
        segment = self.segments.open_segment(location)
        if segment is None:
            return False
        room = memoryview(bytearray(location.length))
        try:
            got = os.preadv(segment.descriptor, [room], location.offset)
        except OSError:
            return False
        return got == location.length and pieces_match(block.key, location.checksums, 0, room)

    def send_block(self, wire: Wire, at: int, block: RequestedBlock, location: BlockLocation) -> bool:
        """Send the block with number *at* of the request. Return False, with nothing sent, if it is gone. Raises
        ConnectionLost, also if the block goes away while it is sent."""
        segment = self.segments.open_segment(location)
        if segment is None:
            return False
        wire.send(block_start(at, location.tier, location.length, location.checksums), more=True)
        self._send_file(wire, segment, location)
        wire.send(block_end(stayed=self.index.get(block.key) == location), more=True)
        return True

    @staticmethod
    def _send_file(wire: Wire, segment: SegmentDescriptor, location: BlockLocation) -> None:
        until = time.monotonic() + GRACE_SECONDS + location.length / MIN_RATE
        try:
            wire.send_file(segment.descriptor, location.offset, location.length, until)
        except OSError as error:  # half a block is sent: only closing the connection can report that
            raise ConnectionLost(f"a segment cannot be read: {error}") from None

    @staticmethod
    def send_fetched(wire: Wire, at: int, block: RequestedBlock, fetched: FetchedBlock) -> bool:
        """Send a block from the daemon's response. Return False if its length is wrong. Raises ConnectionLost."""
        if len(fetched.data) != block.length or len(fetched.checksums) != 8 * piece_count(block.length):
            return False
        wire.send(block_start(at, NO_TIER, block.length, fetched.checksums), more=True)
        wire.send(fetched.data, more=True)
        wire.send(block_end(stayed=True), more=True)
        return True


def is_in_memory(location: BlockLocation) -> bool:
    """Return whether the block is sent without waiting for a disk."""
    return location.tier == MEMORY
