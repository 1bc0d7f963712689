"""Finds the processes that keep a mount from being unmounted, as /proc tells without asking the mount."""

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cachefs.mount_table import mount_points, mount_points_of

# Users that are named; there may be thousands.
MOST_USERS: Final = 5
# Seconds that a look may take: one process of a loader may have thousands of files open, and there may be thousands.
LOOK_SECONDS: Final = 1.0
_PROCESSES: Final = Path("/proc")


def describe_users(directory: Path, seconds: float = LOOK_SECONDS) -> str:
    """Say which processes use the mount on *directory*, and how: the first MOST_USERS that are found within *seconds*.
    Empty where none is found.

    Without root only processes of the caller can be looked into.
    """
    users = itertools.islice(_users(directory, time.monotonic() + seconds), MOST_USERS + 1)
    named = [f"{name} (process {pid}: {how})" for pid, name, how in users]
    return ", ".join([*named[:MOST_USERS], *["and more"] * (len(named) > MOST_USERS)])


def _users(directory: Path, deadline: float) -> Iterator[tuple[int, str, str]]:
    """(pid, name, how) of each process that uses the mount, by pid. deadline: monotonic seconds."""
    device = next((point.device for point in reversed(mount_points()) if point.path == directory), None)
    own = _namespace(os.getpid())
    for pid in sorted(int(name) for name in os.listdir(_PROCESSES) if name.isdecimal()):
        if time.monotonic() >= deadline:
            return
        entry = _PROCESSES / str(pid)
        with contextlib.suppress(OSError):
            tops = [directory]
            if _namespace(pid) != own:  # a container sees the mount at another place
                tops = [point.path for point in mount_points_of(pid) if point.device == device]
            how = next((how for top in tops if (how := _use(entry, os.fspath(top), deadline))), "")
            if how:
                yield pid, (entry / "comm").read_text(errors="replace").strip(), how


def _use(process: Path, top: str, deadline: float) -> str:
    """How a process uses what is below *top*; empty where it does not, or where that is not found in time."""
    for link, how in (("cwd", "is in"), ("root", "has as its root"), ("exe", "runs")):
        with contextlib.suppress(OSError):
            path = os.readlink(process / link)
            if _is_below(path, top):
                return f"{how} {path}"
    for descriptor in os.listdir(process / "fd"):
        if time.monotonic() >= deadline:
            return ""
        with contextlib.suppress(OSError):
            path = os.readlink(process / "fd" / descriptor)
            if _is_below(path, top):
                return f"has {path} open"
    with contextlib.suppress(OSError), (process / "maps").open(errors="surrogateescape") as maps:
        for line in maps:
            if time.monotonic() >= deadline:
                return ""
            path = line.rstrip("\n").partition("/")[2]
            if path and _is_below(f"/{path}", top):
                return f"has /{path} mapped"
    return ""


def _is_below(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top}/")


def _namespace(pid: int) -> str:
    return os.readlink(_PROCESSES / str(pid) / "ns" / "mnt")
