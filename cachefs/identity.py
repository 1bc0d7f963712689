"""Who calls the daemon: the client's side.

gRPC does not tell a server which user is at the other end of a unix socket. So the daemon has a second socket beside
its own. The kernel says who connects to it (SO_PEERCRED, unix(7)), and whoever does gets a line of text, the identity,
which goes along with each call. Only the daemon can make one, and each run of the daemon makes its own.
"""

import socket
from pathlib import Path
from typing import Final

# Of the second socket's path: that of the first, and this.
IDENTITY_SUFFIX: Final = ".id"
# The metadata of a call that holds the caller's identity.
IDENTITY_KEY: Final = "cachefs-identity"
# Stands for somebody unknown: a mount passes on what its control file says, and cannot tell who has written it.
ANONYMOUS: Final = "anonymous"
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
            connection.connect(str(identity_socket(daemon_socket)))
            while len(answer) < _MAX_BYTES and (piece := connection.recv(_MAX_BYTES)):
                answer += piece
    except (FileNotFoundError, PermissionError):
        return ""
    except OSError:
        return None
    return answer.decode("ascii", "replace")
