"""Finds the daemon's socket. Imports little, so that users of the path alone need not load gRPC."""

import os
from pathlib import Path
from typing import Final

DEFAULT_SOCKET: Final = Path("/run/cachefs/cachefsd.sock")
# Variable with the socket's path where none is given.
SOCKET_VARIABLE: Final = "CACHEFS_SOCKET"
# Maximum bytes of the socket's path: the size of sun_path, less its final NUL and the suffix of cachefs.identity.
MAX_SOCKET_PATH: Final = 104


def absolute_path(path: str) -> str:
    """Return the absolute path, for processes in other directories. Returns the path as it is where the current
    directory was deleted: connecting to it fails later."""
    try:
        return os.path.abspath(path)
    except OSError:
        return path


def socket_path(path: str | os.PathLike[str] | None = None) -> Path:
    """Return the path of the daemon's socket: *path*, else $CACHEFS_SOCKET, else the system-wide one."""
    return Path(path or os.environ.get(SOCKET_VARIABLE) or DEFAULT_SOCKET)


def refusal_reason(socket: Path) -> str:
    """Return why no call can be made at *socket*: it is missing, or this user may not connect to it. "" where it
    exists, whether or not a daemon answers."""
    if is_forbidden(socket):
        return f"you may not use the socket {socket} of the daemon"
    return "" if socket.exists() else f"there is no socket {socket} here"


def is_forbidden(socket: Path) -> bool:
    """Return whether there is a socket that this user may not connect to."""
    try:
        before = socket.stat()
        may = os.access(socket, os.W_OK, effective_ids=True)
        # A starting daemon removes the socket of an earlier one, to which no user may connect then.
        after = socket.stat()
        return not may and (after.st_ino, after.st_ctime_ns) == (before.st_ino, before.st_ctime_ns)
    except OSError as error:
        return isinstance(error, PermissionError)
