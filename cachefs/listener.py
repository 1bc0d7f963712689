"""Finds the process that listens at a unix socket, and whether it is stopped, from the kernel alone."""

import os
import socket
import struct
import time
from pathlib import Path
from typing import Final

_TIMEOUT_SECONDS: Final = 1.0
# Seconds between two looks at a process that may be stopped only for a moment.
_RECHECK_SECONDS: Final = 0.2
_CREDENTIALS: Final = struct.Struct("iII")  # of SO_PEERCRED: process, user, group


def listening_process(path: Path, seconds: float = _TIMEOUT_SECONDS) -> int | None:
    """Return the process that listens at *path*; None where there is none, where this user may not ask, or where the
    process is in a container that hides its number. The kernel makes the connection, so a stopped process is found too.

    seconds: timeout where more connections are pending than the process accepts.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
            connection.settimeout(seconds)
            connection.connect(os.fsencode(path))
            found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except (OSError, ValueError):
        return None
    return int(_CREDENTIALS.unpack(found)[0]) or None


def is_stopped(process: int, proc: Path = Path("/proc")) -> bool:
    """Return whether the process is stopped (SIGSTOP, Ctrl-Z, a debugger)."""
    try:
        text = (proc / str(process) / "stat").read_text(errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[:1] in (["T"], ["t"])


def silence_reason(path: Path) -> str:
    """Return why the listener at the socket does not answer, with the way out; "" where it is unknown."""
    process = listening_process(path)
    return _resume_hint(process) if process is not None and is_stopped(process) else ""


def stopped_reason(path: Path, proc: Path = Path("/proc")) -> str:
    """Return before a call why the listener at the socket will not answer, with the way out; "" where it may answer.

    A process that a debugger or cpulimit stops for a moment answers. The process must therefore be stopped by a signal
    at two looks, and must not have run between them.
    """
    process = listening_process(path, 0)
    if process is None or "State:\tT (stopped)" not in (first := _scheduling_lines(process, proc)):
        return ""
    time.sleep(_RECHECK_SECONDS)
    return _resume_hint(process) if _scheduling_lines(process, proc) == first else ""


def _scheduling_lines(process: int, proc: Path) -> list[str]:
    """Return the kernel's lines with the state of the process, and with its number of context switches."""
    try:
        lines = (proc / str(process) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.startswith("State:") or "_ctxt_switches:" in line]


def _resume_hint(process: int) -> str:
    return f"process {process} is stopped; resume it with `kill -CONT {process}`"
