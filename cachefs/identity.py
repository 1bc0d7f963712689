"""Who calls the daemon: the client's side.

gRPC does not tell a server which user is at the other end of a unix socket. So the daemon has a second socket beside
its own. The kernel says who connects to it (SO_PEERCRED, unix(7)), and whoever does gets a line of text, the identity,
which goes along with each call. Only the daemon can make one, and each run of the daemon makes its own.
"""

import os
import socket
import stat
from pathlib import Path
from typing import Final

# Of the second socket's path: that of the first, and this.
IDENTITY_SUFFIX: Final = ".id"
# The metadata of a call that holds the caller's identity.
IDENTITY_KEY: Final = "cachefs-identity"
# In front of the identity of a mount that passes on what its control file says, and cannot tell who has written it.
FOR_SOMEBODY: Final = "somebody."
# Between a job's name and whose it is, where that is not the user that the daemon runs as. No name that a user may give
# has this character.
OWNER_MARK: Final = "~"
# Whose the jobs of somebody unknown are.
UNKNOWN_OWNER: Final = "control"
# The daemon answers at once, without looking at anything but the connection.
_SECONDS: Final = 5.0
_MAX_BYTES: Final = 256


def identity_socket(daemon_socket: Path) -> Path:
    return daemon_socket.with_name(daemon_socket.name + IDENTITY_SUFFIX)


def ask_identity(daemon_socket: Path) -> str | None:
    """This process's identity; an empty text where there is no second socket, None where nobody answers there: the
    daemon that was asked has gone, or has no time."""
    answer = b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
            connection.settimeout(_SECONDS)
            found = os.open(identity_socket(daemon_socket), os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if not _may_ask(daemon_socket, os.fstat(found)):
                    return ""
                connection.connect(f"/proc/self/fd/{found}")
            finally:
                os.close(found)
            while len(answer) < _MAX_BYTES and (piece := connection.recv(_MAX_BYTES)):
                answer += piece
    except (FileNotFoundError, PermissionError):
        return ""
    except OSError:
        return None
    return answer.decode("ascii", "replace")


def _may_ask(daemon_socket: Path, asked: os.stat_result) -> bool:
    """Is the second socket that of whoever has the first? Else somebody could have our identity for another daemon
    sent to himself: it would be enough to have a link to that daemon's second socket beside a socket of his own.
    Nobody but root, its owner and we may be able to exchange either of the two."""
    trusted = (0, asked.st_uid, os.geteuid())
    above = daemon_socket.absolute().parent.resolve()
    return stat.S_ISSOCK(asked.st_mode) and all(
        (found := directory.stat()).st_uid in trusted
        and (not found.st_mode & stat.S_IWOTH or bool(found.st_mode & stat.S_ISVTX))
        for directory in (above, *above.parents)
    )
