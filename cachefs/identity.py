"""The client's side of identifying the caller to the daemon.

gRPC does not tell a server which user is at the other end of a unix socket, so the daemon has a second socket beside
its own. The kernel tells it who connects there (SO_PEERCRED, unix(7)), and each client receives a line of text, the
identity, which it sends along with each call. Only the daemon can make identities, and each run of the daemon makes its
own.
"""

import os
import socket
import stat
from pathlib import Path
from typing import Final

# Suffix of the daemon's socket path for that of the second socket.
IDENTITY_SUFFIX: Final = ".id"
# Metadata key of the caller's identity.
IDENTITY_KEY: Final = "cachefs-identity"
# Prefix of the identity of a mount that forwards calls of its control file, whose writer the mount does not know.
UNKNOWN_USER_PREFIX: Final = "somebody."
# Separates a job's name from its owner other than the daemon's user. Names given by users never contain it.
OWNER_MARK: Final = "~"
# Owner of the jobs of unknown users.
UNKNOWN_OWNER: Final = "control"
# Timeout: the daemon answers at once, since it examines nothing but the connection.
_TIMEOUT_SECONDS: Final = 5.0
_MAX_BYTES: Final = 256


def identity_socket_path(daemon_socket: Path) -> Path:
    return daemon_socket.with_name(daemon_socket.name + IDENTITY_SUFFIX)


def request_identity(daemon_socket: Path) -> str | None:
    """Return this process's identity; "" without a second socket, None where the daemon has ended, or is too busy."""
    response = b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
            connection.settimeout(_TIMEOUT_SECONDS)
            found = os.open(identity_socket_path(daemon_socket), os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if not _is_trusted_socket(daemon_socket, os.fstat(found)):
                    return ""
                connection.connect(f"/proc/self/fd/{found}")
            finally:
                os.close(found)
            while len(response) < _MAX_BYTES and (piece := connection.recv(_MAX_BYTES)):
                response += piece
    except (FileNotFoundError, PermissionError):
        return ""
    except OSError:
        return None
    return response.decode("ascii", "replace")


def _is_trusted_socket(daemon_socket: Path, socket_status: os.stat_result) -> bool:
    """Return whether the second socket belongs to the owner of the first, and only root, the owner and this user may
    replace either. Otherwise another user could link the second socket of a daemon beside a socket of their own, and
    receive our identity for that daemon."""
    trusted = (0, socket_status.st_uid, os.geteuid())
    above = daemon_socket.absolute().parent.resolve()
    return stat.S_ISSOCK(socket_status.st_mode) and all(
        (found := directory.stat()).st_uid in trusted
        and (not found.st_mode & stat.S_IWOTH or bool(found.st_mode & stat.S_ISVTX))
        for directory in (above, *above.parents)
    )
