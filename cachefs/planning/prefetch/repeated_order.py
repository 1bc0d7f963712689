"""A log of the blocks that readers had to wait for, in order: a later pass over the snapshot may repeat the order."""

from typing import Final

import numpy as np

# Most reads that are remembered, 12 bytes each. The oldest are forgotten first.
MAX_READS: Final = 1 << 19
_FIRST_READS: Final = 1 << 10
# Bits of a packed read that hold the block's number within its file.
_NUMBER_BITS: Final = 24
_FACTOR: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1

FileBlock = tuple[int, int]  # entry of the file in the snapshot, number of the block in the file


class RepeatedOrder:
    """A log of reads, with the last position of each block.

    Positions are kept in a hash table with one entry per hash: a block whose entry was overwritten cannot be found by
    `last_position`, but stays in the log, so a reader that has a position can continue from there.
    """

    def __init__(self, most: int = MAX_READS) -> None:
        """most: reads that are remembered, a power of two."""
        self._most = most
        self._count = 0  # reads so far
        self._log = np.zeros(min(_FIRST_READS, most), np.int64)
        self._positions = np.zeros(len(self._log), np.int32)  # by hash: 1 + index in `_log`; 0: none

    def append_read(self, entry: int, number: int) -> None:
        """Append a read of the block. Takes 1 us."""
        if self._count == len(self._log) < self._most:
            self._grow()
        packed = _packed(entry, number)
        where = self._count % len(self._log)
        self._log[where] = packed
        self._positions[_hash(packed) % len(self._positions)] = where + 1
        self._count += 1

    def last_position(self, entry: int, number: int) -> int | None:
        """Return the position of the block's last read; None where unknown or forgotten."""
        packed = _packed(entry, number)
        where = int(self._positions[_hash(packed) % len(self._positions)]) - 1
        if where < 0 or self._log[where] != packed:
            return None
        return self._count - 1 - (self._count - 1 - where) % len(self._log)

    def reads_after(self, position: int, most: int) -> list[FileBlock]:
        """Return up to *most* blocks that were read after the read at *position*, in order."""
        first = max(position + 1, self._count - len(self._log))
        reads = self._log[np.arange(first, min(first + most, self._count)) % len(self._log)]
        return [(packed >> _NUMBER_BITS, packed & ((1 << _NUMBER_BITS) - 1)) for packed in reads.tolist()]

    def _grow(self) -> None:
        """Double the size. No read was forgotten so far, so each has its own entry."""
        self._log = np.concatenate((self._log, np.zeros(len(self._log), np.int64)))
        hashes = _hashes(self._log[: self._count])
        self._positions = np.zeros(len(self._log), np.int32)
        self._positions[hashes % np.uint64(len(self._positions))] = 1 + np.arange(self._count)


def _packed(entry: int, number: int) -> int:
    return (entry << _NUMBER_BITS | number) & (1 << 63) - 1


def _hash(packed: int) -> int:
    return (packed * _FACTOR & _WORD) >> 24


def _hashes(packed: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """Return `_hash` of each element: shape (n,), uint64."""
    return (packed.astype(np.uint64) * np.uint64(_FACTOR)) >> np.uint64(24)
