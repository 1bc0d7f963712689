"""The path of a socket on which the daemon listens: taken at the start, and watched.

A cleaner of temporary files or another daemon may remove the path of a socket. The listener is not told, and clients
cannot connect any more. So the path is checked from time to time. It counts as ours only if it is the very file that we
have created.
"""

import contextlib
import logging
import os
import secrets
import socket
import stat
from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path
from typing import Final

from cachefs.errors import Busy, CachefsError

log = logging.getLogger(__name__)

# Connections that wait until they are accepted.
BACKLOG: Final = 128
# Backlog for asyncio, which accepts this many connections in one turn of the loop. Where it has no descriptor for one,
# it retries as often each second, with a traceback for each.
ACCEPT_BACKLOG: Final = 1
# All users may connect, see docs/operations.md.
SOCKET_MODE: Final = 0o666
_DIRECTORY_MODE: Final = 0o755


class PathOwner(StrEnum):
    """The owner of the path."""

    OURS = "ours"
    GONE = "gone"
    TAKEN = "taken"


class SocketPath:
    """The path of one socket. Never removes a socket on which another process listens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Device and inode of the socket that we have created; None before. The number stays ours while we listen, even
        # where the path is gone.
        self._own_inode: tuple[int, int] | None = None

    def claim(self, bind: Callable[[str], object]) -> None:
        """Let *bind* listen at a temporary path, and move that socket to our path, with its mode.

        gRPC removes the path that it was given before it listens and when it ends, whichever socket is there then. So
        it gets another one. Raises Busy where another process listens at our path, CachefsError where it cannot be
        used.
        """
        self._remove_stale()
        try:
            directory = _open_directory(self.path.parent)
            try:
                self._own_inode = self._bind(directory, bind)
            finally:
                os.close(directory)
        except FileExistsError:
            raise Busy(f"another daemon listens on {self.path} since a moment ago; stop one of the two") from None
        except RuntimeError:  # of gRPC, whose text names the temporary path
            raise CachefsError(
                f"cannot listen on the socket {self.path}: no socket can be made in {self.path.parent}; let the daemon "
                "write there, or give it another daemon.socket"
            ) from None
        except OSError as error:
            raise CachefsError(f"cannot listen on the socket {self.path}: {error.strerror or error}") from None

    def listen(self) -> socket.socket:
        """Return a socket that listens at our path, for asyncio. Raises as `claim` does."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

        def bind(path: str) -> None:
            listening.bind(path)
            listening.listen(BACKLOG)

        try:
            self.claim(bind)
        except CachefsError:
            listening.close()
            raise
        return listening

    def _bind(self, directory: int, bind: Callable[[str], object]) -> tuple[int, int]:
        name = f".cachefsd-{secrets.token_hex(4)}"
        try:
            bind(f"/proc/self/fd/{directory}/{name}")  # the path of the directory may be too long for another name
            os.chmod(name, SOCKET_MODE, dir_fd=directory)
            os.link(name, self.path.name, src_dir_fd=directory, dst_dir_fd=directory)
            return _identity(os.stat(name, dir_fd=directory, follow_symlinks=False))
        finally:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=directory)

    def owner(self) -> PathOwner:
        try:
            found = _identity(os.lstat(self.path))
        except OSError:
            return PathOwner.GONE
        return PathOwner.OURS if found == self._own_inode else PathOwner.TAKEN

    def remove(self) -> None:
        """Remove our socket. Call while we listen: later the inode may belong to another file."""
        if self.owner() == PathOwner.OURS:
            self.path.unlink(missing_ok=True)

    def _remove_stale(self) -> None:
        """Remove a socket without a listener. Raises Busy where a process listens on it."""
        try:
            before = os.lstat(self.path)
        except OSError:
            return
        if not stat.S_ISSOCK(before.st_mode):
            raise CachefsError(f"{self.path}, the path of the daemon's socket, is not a socket; remove it")
        if _is_listening(self.path):
            raise Busy(f"another daemon listens on {self.path}; stop it, or give this one another daemon.socket")
        with contextlib.suppress(OSError):
            if os.path.samestat(before, os.lstat(self.path)):
                log.info("removing the stale socket %s", self.path)
                self.path.unlink()


def _is_listening(path: Path) -> bool:
    """Return whether a process listens on the socket. Raises CachefsError where that is unknown."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as connection:
        try:
            connection.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:  # its backlog is full
            return True
        except OSError as error:
            raise CachefsError(f"cannot tell whether a daemon listens on {path}: {error}") from None
    return True


def _open_directory(path: Path) -> int:
    """Create the directory where it is missing, so that all users may enter it. Raises OSError."""
    for missing in reversed([each for each in (path, *path.parents) if not each.exists()]):
        missing.mkdir(exist_ok=True)
        missing.chmod(_DIRECTORY_MODE)  # mkdir's own mode is less the umask, which is one for all threads
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


class SocketKeeper:
    """Watches one socket. A failure to create it is logged once, and retried at each look."""

    def __init__(self, path: SocketPath, listen: Callable[[], Awaitable[None]]) -> None:
        """listen: creates the socket; raises CachefsError."""
        self._socket_path = path
        self._listen = listen
        # At the last look. Another daemon that starts at our path needs a moment until it listens, so a foreign socket
        # is left alone at the first look.
        self._last_owner = PathOwner.OURS
        # The error that was logged last.
        self._logged_error = ""

    async def check(self) -> None:
        before, self._last_owner = self._last_owner, self._socket_path.owner()
        if self._last_owner == PathOwner.OURS:
            self._logged_error = ""
        elif self._last_owner == PathOwner.GONE or before == PathOwner.TAKEN:
            await self._create_again()

    async def _create_again(self) -> None:
        path = self._socket_path.path
        try:
            await self._listen()
        except CachefsError as error:
            if str(error) != self._logged_error:
                self._logged_error = str(error)
                log.error(
                    "%s is no longer this daemon's socket, so clients cannot connect; trying again: %s", path, error
                )
        else:
            log.warning("%s had been removed, such as by a cleaner of temporary files; it is there again", path)
