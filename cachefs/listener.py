"""Which process listens at a unix socket, and whether it runs: the kernel tells, although nobody may answer there."""

import os
import socket
import struct
import time
from pathlib import Path
from typing import Final

_SECONDS: Final = 1.0
# Seconds between two looks at a process that may be stopped for a moment only.
_LOOK_AGAIN: Final = 0.2
_CREDENTIALS: Final = struct.Struct("iII")  # of SO_PEERCRED: process, user, group


def listening_process(path: Path, seconds: float = _SECONDS) -> int | None:
    """The process that listens at *path*; None where nobody does, where this user may not ask, or where the process is
    in a container from which it cannot be seen. The kernel makes the connection, so a process that is stopped is found
    as well. seconds: to wait where more connections wait for the process than it takes."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
            connection.settimeout(seconds)
            connection.connect(os.fsencode(path))
            found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except (OSError, ValueError):
        return None
    return int(_CREDENTIALS.unpack(found)[0]) or None


def is_stopped(process: int, proc: Path = Path("/proc")) -> bool:
    """Has somebody stopped the process (SIGSTOP, Ctrl-Z, a debugger)?"""
    try:
        text = (proc / str(process) / "stat").read_text(errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[:1] in (["T"], ["t"])


def why_silent(path: Path) -> str:
    """What keeps whoever listens at the socket from answering, with the way out; empty where nobody can tell."""
    process = listening_process(path)
    return _way_out(process) if process is not None and is_stopped(process) else ""


def why_unanswered(path: Path, proc: Path = Path("/proc")) -> str:
    """Tells before a call why the listener at the socket will not answer, with the way out; empty where it may answer.

    A process that a debugger or cpulimit stops for a moment answers. So the process must be stopped by a signal at two
    looks, and must not have run between them.
    """
    process = listening_process(path, 0)
    if process is None or "State:\tT (stopped)" not in (first := _scheduling(process, proc)):
        return ""
    time.sleep(_LOOK_AGAIN)
    return _way_out(process) if _scheduling(process, proc) == first else ""


def _scheduling(process: int, proc: Path) -> list[str]:
    """Returns the lines of the kernel with the state of the process, and with how often it gave its processor up."""
    try:
        lines = (proc / str(process) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.startswith("State:") or "_ctxt_switches:" in line]


def _way_out(process: int) -> str:
    return f"process {process} is stopped; let it go on with `kill -CONT {process}`"
