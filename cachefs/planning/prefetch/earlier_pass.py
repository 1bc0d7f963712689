"""In which order blocks of a snapshot were read that readers had to wait for: a later pass may take the same way."""

from typing import Final

import numpy as np

# Reads that are remembered: 12 bytes each. The oldest are forgotten first.
MOST_READS: Final = 1 << 19
_FIRST_READS: Final = 1 << 10
# Of a read's number, the bits that name the block within its file.
_NUMBER_BITS: Final = 24
_FACTOR: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1

Block = tuple[int, int]  # entry of the file in the snapshot, number of the block in the file


class EarlierPass:
    """A log of reads, and where in it each block was read last.

    That is kept in a table with one place for all blocks with the same hash: a block that has lost its place cannot be
    found, but it is still in the log, so whoever has found his place in the log is not lost there.
    """

    def __init__(self, most: int = MOST_READS) -> None:
        """most: reads that are remembered, a power of two."""
        self._most = most
        self._count = 0  # reads so far
        self._log = np.zeros(min(_FIRST_READS, most), np.int64)
        self._places = np.zeros(len(self._log), np.int32)  # by hash: 1 + where it is in `_log`; 0: nowhere

    def note(self, entry: int, number: int) -> None:
        """The block was read: in 1 us."""
        if self._count == len(self._log) < self._most:
            self._grow()
        packed = _packed(entry, number)
        where = self._count % len(self._log)
        self._log[where] = packed
        self._places[_hash(packed) % len(self._places)] = where + 1
        self._count += 1

    def place(self, entry: int, number: int) -> int | None:
        """Where in the log the block was read last; None where that is not known (any more)."""
        packed = _packed(entry, number)
        where = int(self._places[_hash(packed) % len(self._places)]) - 1
        if where < 0 or self._log[where] != packed:
            return None
        return self._count - 1 - (self._count - 1 - where) % len(self._log)

    def after(self, place: int, most: int) -> list[Block]:
        """Up to *most* blocks that were read after the read at *place*, in order."""
        first = max(place + 1, self._count - len(self._log))
        reads = self._log[np.arange(first, min(first + most, self._count)) % len(self._log)]
        return [(packed >> _NUMBER_BITS, packed & ((1 << _NUMBER_BITS) - 1)) for packed in reads.tolist()]

    def _grow(self) -> None:
        """To twice the size. Nothing was forgotten so far, so each read is at its own place."""
        self._log = np.concatenate((self._log, np.zeros(len(self._log), np.int64)))
        hashes = _hashes(self._log[: self._count])
        self._places = np.zeros(len(self._log), np.int32)
        self._places[hashes % np.uint64(len(self._places))] = 1 + np.arange(self._count)


def _packed(entry: int, number: int) -> int:
    return (entry << _NUMBER_BITS | number) & (1 << 63) - 1


def _hash(packed: int) -> int:
    return (packed * _FACTOR & _WORD) >> 24


def _hashes(packed: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """`_hash` of each: shape (n,), uint64."""
    return (packed.astype(np.uint64) * np.uint64(_FACTOR)) >> np.uint64(24)
