"""Blocks of this node on their way to a peer: found in the index, sent out of segments or out of daemon's answers."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cachefs.block import MEMORY, Location, piece_count, pieces_match
from cachefs.index import IndexReader
from cachefs.messages import FetchedBlock
from cachefs_daemon.peers.open_segments import OpenSegment, OpenSegments
from cachefs_daemon.peers.protocol import NO_TIER, AskedBlock, block_end, block_start
from cachefs_daemon.peers.wire import Gone, Wire

# Bytes a second that a peer takes at least, and seconds that it has for a block in any case: who takes fewer gets no
# more of it.
LEAST_RATE: Final = 1 << 20
GRACE_SECONDS: Final = 10.0


class Outlet:
    """Thread-safe."""

    def __init__(self, index: Path, tiers: Mapping[int, Path]) -> None:
        """index: of the node; tiers: tier number -> directory. Raises CachefsError."""
        self.index = IndexReader(index)
        self.segments = OpenSegments(tiers, self.index.owner)

    def find(self, block: AskedBlock) -> Location | None:
        """Where the block is, if it is here and what the peer means."""
        location = self.index.get(block.key)
        return location if location is not None and location.length == block.length else None

    def is_right(self, block: AskedBlock, location: Location) -> bool:
        """Read it, and compare it with its checksums."""
        segment = self.segments.get(location)
        if segment is None:
            return False
        room = memoryview(bytearray(location.length))
        try:
            got = os.preadv(segment.descriptor, [room], location.offset)
        except OSError:
            return False
        return got == location.length and pieces_match(block.key, location.checksums, 0, room)

    def send(self, wire: Wire, at: int, block: AskedBlock, location: Location) -> bool:
        """Send the block that has number *at* in the question. False where it is gone: then nothing was sent. Raises
        Gone, also where it goes while it is sent."""
        segment = self.segments.get(location)
        if segment is None:
            return False
        wire.send(block_start(at, location.tier, location.length, location.checksums), more=True)
        self._send_file(wire, segment, location)
        wire.send(block_end(stayed=self.index.get(block.key) == location), more=True)
        return True

    @staticmethod
    def _send_file(wire: Wire, segment: OpenSegment, location: Location) -> None:
        until = time.monotonic() + GRACE_SECONDS + location.length / LEAST_RATE
        try:
            wire.send_file(segment.descriptor, location.offset, location.length, until)
        except OSError as error:  # half a block is sent: only the end of the connection says so
            raise Gone(f"a segment cannot be read: {error}") from None

    @staticmethod
    def send_bytes(wire: Wire, at: int, block: AskedBlock, fetched: FetchedBlock) -> bool:
        """Send a block out of the daemon's answer. False where that has other bytes. Raises Gone."""
        if len(fetched.data) != block.length or len(fetched.checksums) != 8 * piece_count(block.length):
            return False
        wire.send(block_start(at, NO_TIER, block.length, fetched.checksums), more=True)
        wire.send(fetched.data, more=True)
        wire.send(block_end(stayed=True), more=True)
        return True


def is_quick(location: Location) -> bool:
    """Is no disk waited for?"""
    return location.tier == MEMORY
