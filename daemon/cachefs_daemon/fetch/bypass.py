"""Bypass blocks: blocks that no tier can hold, served to waiting readers as bytes instead of a location in a tier.

Used when memory is short or the disks are full. A reader takes a large block piece by piece, so the last few bypass
blocks stay in memory for KEPT_SECONDS; otherwise each piece would cost the origin the whole block.
"""

import asyncio
import logging
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from cachefs.block import PIECE_SIZE, piece_checksums
from cachefs_daemon.origin.base import Data

log = logging.getLogger(__name__)

# Seconds that a block stays, counted from its arrival and not from its last use: the next fetch then finds out whether
# a tier can hold it.
KEPT_SECONDS: Final = 2.0
# Seconds without a bypass block after which the next one is logged again.
QUIET_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class BypassBlock:
    """The bytes of one block, or of a run of whole pieces of it."""

    data: Data
    checksums: bytes  # of all pieces of the block, 8 bytes each; zeros for pieces before *begin*
    begin: int = 0  # offset of *data* in the block, in bytes

    @classmethod
    def of(cls, key: bytes, data: Data, checksums: bytes = b"") -> "BypassBlock":
        """Return a whole block. checksums: computed if empty."""
        return cls(data, checksums or piece_checksums(key, data))

    @classmethod
    def of_part(cls, key: bytes, data: Data, begin: int) -> "BypassBlock":
        """Return a part of a block: whole pieces that start at offset *begin*."""
        first = begin // PIECE_SIZE
        return cls(data, bytes(8 * first) + piece_checksums(key, data, first), begin)

    def pieces(self, start: int, size: int) -> memoryview:
        """Return the whole pieces that cover the bytes [start, start + size); a reader can verify only whole pieces."""
        begin = start // PIECE_SIZE * PIECE_SIZE - self.begin
        return memoryview(self.data)[begin : -(-(start + size) // PIECE_SIZE) * PIECE_SIZE - self.begin]


class BypassBlocks:
    """Keeps the last few bypass blocks and counts all of them. Used on the event loop."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: bytes of blocks to keep; the newest block is kept even if it is larger."""
        self.count = 0  # since the daemon started
        self._max_bytes = max_bytes
        self._bytes = 0
        # By key, oldest first, with the loop time of arrival.
        self._blocks: OrderedDict[bytes, tuple[BypassBlock, float]] = OrderedDict()
        self._last_arrival = -math.inf  # loop time of the last arrival
        self._expiry_timer: asyncio.TimerHandle | None = None

    def add(self, key: bytes, block: BypassBlock, reason: str) -> None:
        """Keep a block that has arrived. reason: why no tier holds it, for the log."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._last_arrival > QUIET_SECONDS:
            log.warning("blocks go straight to their readers, as no tier can hold them: %s", reason)
        self._last_arrival = loop.time()
        self.count += 1
        self._drop(key)
        self._blocks[key] = block, self._last_arrival
        self._bytes += len(block.data)
        while self._bytes > self._max_bytes and len(self._blocks) > 1:
            self._drop(next(iter(self._blocks)))
        if self._expiry_timer is None:
            self._expiry_timer = loop.call_later(KEPT_SECONDS, self._drop_old)

    def get(self, key: bytes) -> BypassBlock | None:
        """Return the block if it is still kept."""
        found = self._blocks.get(key)
        return found[0] if found is not None else None

    def close(self) -> None:
        """Drop all blocks."""
        self._blocks.clear()
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()

    def _drop(self, key: bytes) -> None:
        gone = self._blocks.pop(key, None)
        if gone is not None:
            self._bytes -= len(gone[0].data)

    def _drop_old(self) -> None:
        loop = asyncio.get_running_loop()
        while self._blocks:
            key, (_, came) = next(iter(self._blocks.items()))
            if loop.time() - came < KEPT_SECONDS:
                self._expiry_timer = loop.call_later(came + KEPT_SECONDS - loop.time(), self._drop_old)
                return
            self._drop(key)
        self._expiry_timer = None
