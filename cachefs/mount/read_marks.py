"""Marks of the blocks that the mount's workers have read recently, in memory shared with the mount's pusher.

A reader that is faster than the pusher reads the blocks that the pusher is about to store, and both then load the same
pages. Reports through the daemon tell of a read 0.1 s later, hundreds of reads too late. A worker therefore sets a mark
when it begins to read a whole block, and the pusher checks the mark before it stores a block.

Blocks with the same hash share a slot. A mark overwritten by another block's no longer matches its block, which is then
stored needlessly; that costs time only.
"""

import math
import mmap
import os
import struct
import time
from typing import Final

from cachefs.block import block_number

_SLOTS: Final = 1 << 16
# First half of the content id, block number, time of the read (ms).
_MARK: Final = struct.Struct("<8sII")
_MILLISECONDS: Final = (1 << 32) - 1
# Milliseconds for which a mark is valid: long enough for a pusher that is late, and short enough for the pages to be
# still cached.
_VALID_MILLISECONDS: Final = 2000


def create() -> int:
    """Return a descriptor for ReadMarks, in this process and in others that inherit it."""
    fd = os.memfd_create("cachefs-read-marks", os.MFD_CLOEXEC)
    os.ftruncate(fd, _SLOTS * _MARK.size)
    return fd


class ReadMarks:
    """The marks. Setting one takes 1.5 us, checking one 1.3 us."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _SLOTS * _MARK.size)

    def set(self, key: bytes) -> None:
        """Mark a block that is being read, from its start and in the largest possible reads."""
        number = block_number(key)
        _MARK.pack_into(self._memory, _mark_offset(key, number), key[:8], number, _now())

    def clear(self, key: bytes) -> None:
        """Remove the mark of a block whose pages are dropped."""
        _MARK.pack_into(self._memory, _mark_offset(key, block_number(key)), bytes(8), 0, 0)

    def age(self, key: bytes) -> float:
        """Return the seconds since the block was read; infinity where that was more than 2 s ago, or never."""
        number = block_number(key)
        name, marked, when = _MARK.unpack_from(self._memory, _mark_offset(key, number))
        age = (_now() - when) & _MILLISECONDS
        return age / 1000 if name == key[:8] and marked == number and age < _VALID_MILLISECONDS else math.inf


def _mark_offset(key: bytes, number: int) -> int:
    return (int.from_bytes(key[8:10]) ^ (number & 0xFFFF)) * _MARK.size


def _now() -> int:
    """Return the milliseconds of a clock shared by all processes."""
    return int(time.monotonic() * 1000) & _MILLISECONDS
