"""Finds the memory limits of this process's control groups, in both versions of control groups."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

# Memory of a control group that is not reclaimable by dropping clean pages. tmpfs (the memory tier) counts as shmem.
_UNRECLAIMABLE_V2: Final = ("anon", "shmem", "slab_unreclaimable", "kernel_stack", "pagetables")
_UNRECLAIMABLE_V1: Final = ("total_rss", "total_shmem")


def memory_limits(proc: Path = Path("/proc"), sys: Path = Path("/sys/fs/cgroup")) -> Iterator[tuple[int, int]]:
    """Yield (limit, bytes held) of each control group with a limit that this process is in, parents included."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for directory in _with_parents(sys, path):
                limit = _read_limit(directory / "memory.max")
                if limit is not None:
                    yield limit, _unreclaimable_bytes(directory, _UNRECLAIMABLE_V2)
        elif "memory" in controllers.split(","):
            for directory in _with_parents(sys / "memory", path):
                limit = _read_limit(directory / "memory.limit_in_bytes")
                # The largest multiple of the page size stands for no limit.
                if limit is not None and limit < 1 << 62:
                    yield limit, _unreclaimable_bytes(directory, _UNRECLAIMABLE_V1)


def _with_parents(root: Path, path: str) -> Iterator[Path]:
    """Yield the directory of a control group and its parents. Without a cgroup namespace only *root* exists."""
    directory = root / path.lstrip("/")
    while directory != root:
        yield directory
        directory = directory.parent
    yield root


def _read_limit(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max"
        return None


def _unreclaimable_bytes(directory: Path, names: tuple[str, ...]) -> int:
    try:
        pairs = (line.split() for line in (directory / "memory.stat").read_text().splitlines())
        return sum(int(pair[1]) for pair in pairs if pair[0] in names)
    except (OSError, ValueError, IndexError):
        return 0
