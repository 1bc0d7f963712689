"""How many bytes a tier may really take now: its budget, unless the machine has less to give.

Limits are absolute: what the tier uses already plus what is left beside it. So the tier's own growth does not move its
limit, and somebody else's growth lowers it.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cachefs_daemon.segment import PAGE

_CGROUP_HEADROOM: Final = 256 << 20
# What a cgroup holds that the kernel cannot take back by dropping clean pages. tmpfs (our memory tier) counts as shmem.
_HELD_V2: Final = ("anon", "shmem", "slab_unreclaimable", "kernel_stack", "pagetables")
_HELD_V1: Final = ("total_rss", "total_shmem")


def metadata_reserve(budget: int) -> int:
    """Bytes of a budget kept for what a file system adds to segments: directory entries and extent tree leaves.

    ext4 has 340 extents to a 4 KiB leaf and half-full leaves after splits; with every second page of a segment punched
    out that is 0.6 % of the live bytes.
    """
    return max(4 * PAGE, budget >> 7)


def disk_room(directory: Path, min_free: int) -> int:
    """Bytes the file system can still give, may be negative. Raises OSError."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize - min_free


def disk_size(directory: Path) -> int:
    """Raises OSError."""
    found = os.statvfs(directory)
    return found.f_blocks * found.f_frsize


def memory_room(proc: Path = Path("/proc"), sys: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes our cgroup may still allocate, less headroom; None without a limit. May be negative."""
    rooms = [limit - held - min(_CGROUP_HEADROOM, limit // 8) for limit, held in _cgroup_limits(proc, sys)]
    return min(rooms, default=None)


def _cgroup_limits(proc: Path, sys: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes held) of each limited cgroup we are in, parents included."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for directory in _with_parents(sys, path):
                limit = _number(directory / "memory.max")
                if limit is not None:
                    yield limit, _held(directory, _HELD_V2)
        elif "memory" in controllers.split(","):
            for directory in _with_parents(sys / "memory", path):
                limit = _number(directory / "memory.limit_in_bytes")
                # "No limit" is the largest multiple of the page size.
                if limit is not None and limit < 1 << 62:
                    yield limit, _held(directory, _HELD_V1)


def _with_parents(root: Path, path: str) -> Iterator[Path]:
    """The cgroup's directory and those above it. In a container without its own namespace only *root* exists."""
    directory = root / path.lstrip("/")
    while directory != root:
        yield directory
        directory = directory.parent
    yield root


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max"
        return None


def _held(directory: Path, names: tuple[str, ...]) -> int:
    try:
        pairs = (line.split() for line in (directory / "memory.stat").read_text().splitlines())
        return sum(int(pair[1]) for pair in pairs if pair[0] in names)
    except (OSError, ValueError, IndexError):
        return 0
