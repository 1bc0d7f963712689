"""Blocks that no tier can hold, on their way to the readers that wait for them.

Memory is short or the disks are full, but a read is answered all the same: with its bytes instead of a place in a tier.
A reader takes a large block piece by piece, so a few of the last blocks stay here for a moment: without, each piece
would cost the origin the whole block.
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

# Seconds that a block stays. Not counted from its last use: the next fetch finds out whether a tier can hold it now.
KEPT_SECONDS: Final = 2.0
# Seconds without such a block after which the next one is told in the log.
QUIET_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class PassingBlock:
    """One block, or some whole pieces of it."""

    data: Data
    checksums: bytes  # of all its pieces, 8 bytes each; zeros of pieces before those that are here
    begin: int = 0  # bytes of the block before *data*

    @classmethod
    def of(cls, key: bytes, data: Data, checksums: bytes = b"") -> "PassingBlock":
        """checksums: where they are known."""
        return cls(data, checksums or piece_checksums(key, data))

    @classmethod
    def of_part(cls, key: bytes, data: Data, begin: int) -> "PassingBlock":
        """Whole pieces of a block, from *begin* on."""
        first = begin // PIECE_SIZE
        return cls(data, bytes(8 * first) + piece_checksums(key, data, first), begin)

    def pieces(self, start: int, size: int) -> memoryview:
        """The whole pieces around the bytes [start, start + size): a reader can verify only these."""
        begin = start // PIECE_SIZE * PIECE_SIZE - self.begin
        return memoryview(self.data)[begin : -(-(start + size) // PIECE_SIZE) * PIECE_SIZE - self.begin]


class Passing:
    """The last few of these blocks, and how many there were. Used on the event loop."""

    def __init__(self, room: int) -> None:
        """room: bytes of the blocks that stay; the last one always does."""
        self.count = 0  # since the daemon started
        self._room = room
        self._bytes = 0
        # By key, oldest first, with the loop time at which it came.
        self._blocks: OrderedDict[bytes, tuple[PassingBlock, float]] = OrderedDict()
        self._last = -math.inf  # loop time at which the last one came
        self._sweep: asyncio.TimerHandle | None = None

    def add(self, key: bytes, block: PassingBlock, reason: str) -> None:
        """A block has come. reason: why no tier has it."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._last > QUIET_SECONDS:
            log.warning("blocks go straight to their readers, as no tier can hold them: %s", reason)
        self._last = loop.time()
        self.count += 1
        self._drop(key)
        self._blocks[key] = block, self._last
        self._bytes += len(block.data)
        while self._bytes > self._room and len(self._blocks) > 1:
            self._drop(next(iter(self._blocks)))
        if self._sweep is None:
            self._sweep = loop.call_later(KEPT_SECONDS, self._drop_old)

    def get(self, key: bytes) -> PassingBlock | None:
        """The block, if it is still here."""
        found = self._blocks.get(key)
        return found[0] if found is not None else None

    def close(self) -> None:
        """Let go of all blocks."""
        self._blocks.clear()
        if self._sweep is not None:
            self._sweep.cancel()

    def _drop(self, key: bytes) -> None:
        gone = self._blocks.pop(key, None)
        if gone is not None:
            self._bytes -= len(gone[0].data)

    def _drop_old(self) -> None:
        loop = asyncio.get_running_loop()
        while self._blocks:
            key, (_, came) = next(iter(self._blocks.items()))
            if loop.time() - came < KEPT_SECONDS:
                self._sweep = loop.call_later(came + KEPT_SECONDS - loop.time(), self._drop_old)
                return
            self._drop(key)
        self._sweep = None
