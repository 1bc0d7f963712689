"""Sends blocks of this node to peers: finds them in the index, and reads segments or the daemon's responses."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cachefs.block import MEMORY, BlockLocation, piece_count, pieces_match
from cachefs.index import IndexReader
from cachefs.messages import FetchedBlock
from cachefs_cluster.peers.open_segments import SegmentDescriptor, SegmentDescriptors
from cachefs_cluster.peers.protocol import NO_TIER, RequestedBlock, block_end, block_start
from cachefs_cluster.peers.wire import ConnectionLost, Wire

# The least bytes a second at which a peer must read a block, and the seconds that it has for a block in any case. The
# connection of a slower peer is closed.
MIN_RATE: Final = 1 << 20
GRACE_SECONDS: Final = 10.0


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
