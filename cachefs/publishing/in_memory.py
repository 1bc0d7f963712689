"""Whether the numbers of an array lie in memory. Those of a mapped file may lie on a mount: to read them is to wait for
its origin, in the middle of the job."""

from typing import Any, Final

import numpy
from numpy.typing import NDArray

# Beginnings of the paths of files that are memory.
_MEMORY: Final = (b"/dev/shm/", b"/memfd:", b"/dev/zero", b"/SYSV", b"[")


def is_in_memory(array: NDArray[Any]) -> bool:
    """array: of no class of its own. Costs 0.2 us, and of a tensor some ms."""
    base: Any = array
    while type(base) is numpy.ndarray:
        base = base.base
    if base is None or type(base) in (bytes, bytearray):
        return True
    # A tensor does not tell where it has its numbers from.
    return type(base).__module__ == "torch" and not _is_mapped(int(array.__array_interface__["data"][0]))


def _is_mapped(address: int) -> bool:
    """Does a file lie at this address?"""
    with open("/proc/self/maps", "rb") as maps:
        for line in maps:
            span, _, _, _, inode, *path = line.split(maxsplit=5)
            begin, _, end = span.partition(b"-")
            if int(begin, 16) <= address < int(end, 16):
                return inode != b"0" and not (path and path[0].startswith(_MEMORY))
    return False
