"""Which blocks the mount's workers have read a moment ago, in memory that they share with the mount's pusher.

A reader that is faster than the pusher reads what the pusher is about to store, and then both bring the same pages.
Reports by way of the daemon tell of a read 0.1 s later, hundreds of reads too late. So a worker sets a mark when it
begins to read a whole block, and the pusher looks for the mark before it stores a block.

Blocks with the same hash share a slot. A mark that was overwritten by another block's matches no block any more; then
a block is stored needlessly, which costs time only.
"""

import math
import mmap
import os
import struct
import time
from typing import Final

from cachefs.block import block_number

_SLOTS: Final = 1 << 16
# The first half of the content id, the block's number, when the block was read (ms).
_MARK: Final = struct.Struct("<8sII")
_MILLISECONDS: Final = (1 << 32) - 1
# Milliseconds for which a mark counts: long enough for a pusher that is behind, and short enough for the pages to be
# still there.
_FRESH: Final = 2000


def create() -> int:
    """A descriptor for ReadMarks, in this process and in others that inherit it."""
    fd = os.memfd_create("cachefs-read-marks", os.MFD_CLOEXEC)
    os.ftruncate(fd, _SLOTS * _MARK.size)
    return fd


class ReadMarks:
    """The marks. To set one takes 1.5 us, to look for one 1.3 us."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _SLOTS * _MARK.size)

    def set(self, key: bytes) -> None:
        """The block is being read, from its start and in the largest reads there are."""
        number = block_number(key)
        _MARK.pack_into(self._memory, _place(key, number), key[:8], number, _now())

    def clear(self, key: bytes) -> None:
        """The block's pages are dropped."""
        _MARK.pack_into(self._memory, _place(key, block_number(key)), bytes(8), 0, 0)

    def age(self, key: bytes) -> float:
        """Seconds since the block was read; infinite where it was read long ago, or never."""
        number = block_number(key)
        name, marked, when = _MARK.unpack_from(self._memory, _place(key, number))
        age = (_now() - when) & _MILLISECONDS
        return age / 1000 if name == key[:8] and marked == number and age < _FRESH else math.inf


def _place(key: bytes, number: int) -> int:
    return (int.from_bytes(key[8:10]) ^ (number & 0xFFFF)) * _MARK.size


def _now() -> int:
    """Milliseconds of a clock that is the same in all processes."""
    return int(time.monotonic() * 1000) & _MILLISECONDS
