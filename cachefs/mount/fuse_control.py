"""The kernel's control files of a FUSE connection (`count_waiting`, `abort`).

The files are in a file system of their own, fusectl, which is often not mounted in containers and on bare machines. In
that case this module mounts fusectl without attaching it to a directory (fsopen(2), fsmount(2), Linux 5.2). That needs
CAP_SYS_ADMIN.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cachefs.mount.mount_calls import new_mount

CONNECTIONS: Final = Path("/sys/fs/fuse/connections")
_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class FuseControlFiles:
    """The control files of one connection.

    The connection's directory stays open: once the connection is gone the directory is empty, and never that of a later
    connection with the same number.
    """

    def __init__(self, number: int) -> None:
        self._directory: int | None = None  # descriptor of the connection's directory; None where it cannot be opened
        self._abort: int | None = None  # descriptor of `abort`; None where it cannot be opened
        for connections in (_open_mounted, _open_detached):
            with contextlib.suppress(OSError), connections() as every:
                directory = os.open(str(number), _DIRECTORY, dir_fd=every)
                try:
                    self._abort = os.open("abort", os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
                except OSError:
                    os.close(directory)
                    raise
                self._directory = directory
                return

    @property
    def has_abort(self) -> bool:
        return self._abort is not None

    @property
    def descriptors(self) -> set[int]:
        return {descriptor for descriptor in (self._directory, self._abort) if descriptor is not None}

    def abort(self) -> None:
        """End the connection. Raises OSError."""
        if self._abort is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "abort")
        os.write(self._abort, b"1")

    def set_request_limit(self, max_requests: int) -> None:
        """Set the limit of the kernel's readahead requests under way at once. Raises OSError."""
        for name in ("max_background", "congestion_threshold"):
            file = self._open(name, os.O_WRONLY)
            try:
                os.write(file, b"%d" % max_requests)
            finally:
                os.close(file)

    def count_waiting(self) -> int:
        """Return the number of requests not yet answered. Raises OSError where that cannot be known."""
        # Opened for each call, since a descriptor returns the number of its first read for ever.
        file = self._open("waiting", os.O_RDONLY)
        try:
            return int(os.read(file, 32))
        finally:
            os.close(file)

    def _open(self, name: str, flags: int) -> int:
        if self._directory is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return os.open(name, flags | os.O_CLOEXEC, dir_fd=self._directory)


@contextlib.contextmanager
def _open_mounted() -> Iterator[int]:
    """Open the directory of connections where fusectl is mounted. Raises OSError."""
    connections = os.open(CONNECTIONS, _DIRECTORY)
    try:
        yield connections
    finally:
        os.close(connections)


@contextlib.contextmanager
def _open_detached() -> Iterator[int]:
    """Open the directory of connections in a detached mount, which lasts while any descriptor in it is open.

    Raises OSError.
    """
    mount = new_mount("fusectl")
    try:
        yield mount
    finally:
        os.close(mount)
