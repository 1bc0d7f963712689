"""Which process listens at a unix socket, and whether it runs: the kernel tells, although nobody may answer there."""

import os
import socket
import struct
from pathlib import Path
from typing import Final

_SECONDS: Final = 1.0
_CREDENTIALS: Final = struct.Struct("iII")  # of SO_PEERCRED: process, user, group


def listening_process(path: Path) -> int | None:
    """The process that listens at *path*; None where nobody does, where this user may not ask, or where the process is
    in a container from which it cannot be seen. The kernel makes the connection, so a process that is stopped is found
    as well."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
            connection.settimeout(_SECONDS)
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
    if process is None or not is_stopped(process):
        return ""
    return f"process {process} is stopped; let it go on with `kill -CONT {process}`"
