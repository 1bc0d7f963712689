"""Where the daemon's socket is. This module loads nothing: whoever only needs the path need not load gRPC."""

import os
from pathlib import Path
from typing import Final

DEFAULT_SOCKET: Final = Path("/run/cachefs/cachefsd.sock")
# Names the socket where no other way does.
SOCKET_VARIABLE: Final = "CACHEFS_SOCKET"
# Bytes that the socket's path may have: the size of sun_path, less its final NUL and the suffix of cachefs.identity.
MAX_SOCKET_PATH: Final = 104


def absolute(path: str) -> str:
    """The path for processes that may run elsewhere. As it is where the current directory was deleted: it leads to
    nothing there, which is told once somebody connects."""
    try:
        return os.path.abspath(path)
    except OSError:
        return path


def socket_path(given: str | os.PathLike[str] | None = None) -> Path:
    """The daemon's socket: as *given*, else as $CACHEFS_SOCKET says, else the system-wide one."""
    return Path(given or os.environ.get(SOCKET_VARIABLE) or DEFAULT_SOCKET)


def refusal(socket: Path) -> str:
    """Why nobody can be called at *socket*: there is none, or this user may not connect to it. Empty where it is there;
    that somebody answers is not said."""
    if is_forbidden(socket):
        return f"you may not use the socket {socket} of the daemon"
    return "" if socket.exists() else f"there is no socket {socket} here"


def is_forbidden(socket: Path) -> bool:
    """Is there a socket that this user may not connect to?"""
    try:
        before = socket.stat()
        may = os.access(socket, os.W_OK, effective_ids=True)
        # A daemon that starts takes away what an earlier one has left, which nobody may use then.
        after = socket.stat()
        return not may and (after.st_ino, after.st_ctime_ns) == (before.st_ino, before.st_ctime_ns)
    except OSError as error:
        return isinstance(error, PermissionError)
