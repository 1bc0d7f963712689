"""Finds the processes that keep a mount from being unmounted, as /proc tells without asking the mount."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cachefs.mount_table import mount_points, mount_points_of

# Users that are named; there may be thousands.
MOST_USERS: Final = 5
_PROCESSES: Final = Path("/proc")


def describe_users(directory: Path) -> str:
    """Say which processes use the mount on *directory*, and how; empty where none can be seen.

    Without root only processes of the caller can be looked into.
    """
    users = sorted(_users(directory))
    named = [f"{name} (process {pid}: {how})" for pid, name, how in users[:MOST_USERS]]
    more = [f"{len(users) - MOST_USERS} more"] if len(users) > MOST_USERS else []
    return ", ".join(named + more)


def _users(directory: Path) -> Iterator[tuple[int, str, str]]:
    """(pid, name, how) of each process that uses the mount."""
    device = next((point.device for point in reversed(mount_points()) if point.path == directory), None)
    own = _namespace(os.getpid())
    for entry in _PROCESSES.iterdir():
        if not entry.name.isdecimal():
            continue
        pid = int(entry.name)
        with contextlib.suppress(OSError):
            tops = [directory]
            if _namespace(pid) != own:  # a container sees the mount at another place
                tops = [point.path for point in mount_points_of(pid) if point.device == device]
            how = next((how for top in tops if (how := _use(entry, os.fspath(top)))), "")
            if how:
                yield pid, (entry / "comm").read_text(errors="replace").strip(), how


def _use(process: Path, top: str) -> str:
    """How a process uses what is below *top*; empty where it does not."""
    for link, how in (("cwd", "is in"), ("root", "has as its root"), ("exe", "runs")):
        with contextlib.suppress(OSError):
            path = os.readlink(process / link)
            if _is_below(path, top):
                return f"{how} {path}"
    for descriptor in os.listdir(process / "fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(process / "fd" / descriptor)
            if _is_below(path, top):
                return f"has {path} open"
    with contextlib.suppress(OSError):
        for line in (process / "maps").read_text(errors="surrogateescape").splitlines():
            path = line.partition("/")[2]
            if path and _is_below(f"/{path}", top):
                return f"has /{path} mapped"
    return ""


def _is_below(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top}/")


def _namespace(pid: int) -> str:
    return os.readlink(_PROCESSES / str(pid) / "ns" / "mnt")
