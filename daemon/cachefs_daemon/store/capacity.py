"""Computes how many bytes a tier may take now: its budget, unless the machine has less to give.

Limits are absolute: what the tier uses already plus what is left beside it. So the tier's own growth does not move its
limit, and the growth of others lowers it.
"""

import ctypes
import os
from pathlib import Path
from typing import Final

from cachefs.cgroup import memory_limits
from cachefs_daemon.store.segment_writer import PAGE

_CGROUP_HEADROOM: Final = 256 << 20
# Magic numbers of file systems (linux/magic.h).
BTRFS: Final = 0x9123683E
IN_MEMORY: Final = (0x01021994, 0x858458F6)  # tmpfs, ramfs

_libc = ctypes.CDLL(None, use_errno=True)


def metadata_reserve(budget: int) -> int:
    """Return the bytes of a budget kept for what a file system adds to segments: directory entries and extent tree
    leaves.

    ext4 has 340 extents to a 4 KiB leaf and half-full leaves after splits; with every second page of a segment punched
    out that is 0.6 % of the live bytes.
    """
    return max(4 * PAGE, budget >> 7)


def disk_room(directory: int, min_free: int) -> int:
    """Return the bytes that a directory's file system can still give; may be negative. Raises OSError."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize - min_free


def disk_size(directory: int | Path) -> int:
    """Return the bytes of the directory's file system. Raises OSError."""
    found = os.statvfs(directory)
    return found.f_blocks * found.f_frsize


def file_system(directory: int | Path) -> int:
    """Return the magic number (statfs(2)) of the file system of a directory, or of its descriptor. Raises OSError."""
    found = (ctypes.c_long * 32)()
    if isinstance(directory, int):
        failed = _libc.fstatfs(directory, found)
    else:
        failed = _libc.statfs(os.fsencode(directory), found)
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found[0]) & 0xFFFFFFFF


def memory_room(
    *, min_free: int = 0, spare: int | None = None, proc: Path = Path("/proc"), sys: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the bytes that may still be allocated: of our cgroup, less headroom, and, where *min_free* bytes of the
    machine's memory are to stay free, of the rest. None without any limit. May be negative.

    spare: bytes that may be allocated in any case, as long as half of what is to stay free does; negative where there
    are too many already.
    """
    rooms = [_room(limit - used, min(_CGROUP_HEADROOM, limit // 8), spare) for limit, used in memory_limits(proc, sys)]
    if min_free and (available := _available(proc)) is not None:
        rooms.append(_room(available, min_free, spare))
    return min(rooms, default=None)


def _room(left: int, kept: int, spare: int | None) -> int:
    return max(left - kept, min(spare, left - kept // 2)) if spare is not None else left - kept


def _available(proc: Path) -> int | None:
    """Return the bytes of the machine's memory that are free, or that the kernel can free by dropping clean pages."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
