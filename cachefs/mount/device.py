"""A FUSE connection shared by the processes of a mount: clones of the device, resent requests, and the end.

A request that was read through a clone of the device belongs to that clone. The request fails when the last descriptor
of the clone is closed, and can be handed out again before that (FUSE_NOTIFY_RESEND, Linux 6.9). The connection ends
when all its devices are closed, or at once through its control file `abort`; without that file, by a forced unmount.

The kernel's control files of the connection are in a file system of their own, fusectl, which is often not mounted in
containers and on bare machines. In that case this module mounts fusectl without attaching it to a directory (fsopen(2),
fsmount(2), Linux 5.2). That needs CAP_SYS_ADMIN.
"""

import contextlib
import errno
import fcntl
import logging
import os
import select
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cachefs.mount import kernel
from cachefs.mount.kernel import new_mount

CONNECTIONS: Final = Path("/sys/fs/fuse/connections")
_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
log = logging.getLogger(__name__)

DEVICE: Final = "/dev/fuse"
_IOC_CLONE: Final = 0x8004E500
# struct fuse_out_header: length, notify code, 0 for a request's number
_RESEND: Final = struct.pack("<IiQ", 16, 7, 0)
_NEW_EPOCH: Final = struct.pack("<IiQ", 16, 8, 0)


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


def device_descriptors() -> set[int]:
    """Return this process's descriptors of the FUSE device, of all connections."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == DEVICE:
                found.add(int(name))
    return found


def clone_device(device: int, *, blocking: bool) -> int:
    """Return another descriptor of the connection of *device*, with requests of its own.

    Where several processes wait for requests the descriptor must not be *blocking*: a request wakes all processes, and
    one gets it. Raises OSError.
    """
    fresh = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC | (0 if blocking else os.O_NONBLOCK))
    try:
        fcntl.ioctl(fresh, _IOC_CLONE, struct.pack("I", device))
    except OSError:
        os.close(fresh)
        raise
    return fresh


def resend_requests(device: int) -> bool:
    """Have the kernel hand out again all taken and unanswered requests. Returns False where the kernel cannot.

    A late answer of a process that still works on such a request is refused, which libfuse takes for an interrupt.
    """
    try:
        os.write(device, _RESEND)
    except OSError:
        return False
    return True


def invalidate_names(device: int) -> None:
    """Have the kernel look up again each cached name (FUSE_NOTIFY_INC_EPOCH, Linux 6.16; no effect before).

    Must not be used below a shield: overlayfs answers ESTALE where a name below it is looked up anew.
    """
    with contextlib.suppress(OSError):
        os.write(device, _NEW_EPOCH)


def has_ended(device: int) -> bool:
    """Return whether the connection of *device* has ended, as by an unmount: poll(2) then reports POLLERR."""
    poll = select.poll()
    poll.register(device, 0)  # 0 asks for no events; poll(2) always reports errors
    return any(event & select.POLLERR for _, event in poll.poll(0))


class FuseConnection:
    """The FUSE connection of a mount, for a process that may have to end it. To be created while the mount exists."""

    def __init__(self, number: int, directory: Path) -> None:
        """number: minor device number of the mount; directory: where it is mounted."""
        self.number = number
        self.directory = directory
        self._control = FuseControlFiles(number)

    @property
    def has_abort(self) -> bool:
        """True where the connection can be ended even when it is no longer mounted anywhere."""
        return self._control.has_abort

    @property
    def control_files(self) -> set[int]:
        """Descriptors that this object keeps open."""
        return self._control.descriptors

    @property
    def is_visible(self) -> bool:
        """True where programs see this mount at its directory. Only then may the directory be unmounted: the mount may
        be detached (`umount --lazy`), and another mount be in its place or over it."""
        return kernel.connection_number(self.directory) == self.number

    def has_waiting(self) -> bool:
        """Return whether a request waits for an answer; True where that cannot be known."""
        try:
            return self._control.count_waiting() > 0
        except (OSError, ValueError):
            return True

    def set_request_limit(self, max_requests: int) -> None:
        """Let the kernel's readahead have up to *max_requests* requests under way. Needs root; otherwise the limit
        stays at 12."""
        try:
            self._control.set_request_limit(max_requests)
        except OSError as error:
            log.info("the kernel's limit of background requests stays at 12: %s", error.strerror)

    def abort(self) -> None:
        """End the connection: waiting readers get an error, serving processes get ENODEV. The mount point stays."""
        try:
            if self._control.has_abort:
                self._control.abort()
            elif self.is_visible:
                kernel.abort_connection(self.directory)
        except OSError as error:
            log.debug("the connection of %s cannot be ended: %s", self.directory, error.strerror)
