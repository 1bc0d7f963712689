"""Translates process numbers of containers into numbers of the daemon's namespace.

The first process of a pid namespace has number 1 in it. It, and all others in it, have numbers of their own in every
namespace around it, and the daemon is usually in one of these.
"""

import os
from pathlib import Path

_PROC = Path("/proc")


def own_namespace() -> int:
    """Return the inode number of this process's pid namespace, by which others name it; 0 where unknown."""
    return namespace_of("self")


def namespace_of(pid: str) -> int:
    """Return the inode number of the pid namespace of a process; 0 where this process may not read it."""
    try:
        return os.stat(_PROC / pid / "ns" / "pid").st_ino
    except OSError:
        return 0


def find_pid(pid: int, namespace: int) -> int:
    """Return the number, here, of the process with the number *pid* in that namespace; 0 where it is not visible.
    Searches all processes (10 us each), so call it in a thread."""
    for name in os.listdir(_PROC):
        if name.isdigit() and namespace_of(name) == namespace and _pid_in_own_namespace(name) == pid:
            return int(name)
    return 0


def _pid_in_own_namespace(pid: str) -> int:
    """Return the number of a process in its own namespace; 0 where it has ended."""
    try:
        status = (_PROC / pid / "status").read_bytes()
    except OSError:
        return 0
    return next((int(line.split()[-1]) for line in status.splitlines() if line.startswith(b"NSpid:")), 0)
