"""A FUSE connection shared by the processes of a mount: clones of the device, resent requests, and the end.

A request that was read through a clone of the device belongs to that clone. The request fails when the last descriptor
of the clone is closed, and can be handed out again before that (FUSE_NOTIFY_RESEND, Linux 6.9). The connection ends
when all its devices are closed, or at once through its control file `abort`; without that file, by a forced unmount.
"""

import contextlib
import fcntl
import logging
import os
import select
import struct
from pathlib import Path
from typing import Final

from cachefs.mount import kernel
from cachefs.mount.fuse_control import FuseControlFiles

log = logging.getLogger(__name__)

DEVICE: Final = "/dev/fuse"
_IOC_CLONE: Final = 0x8004E500
# struct fuse_out_header: length, notify code, 0 for a request's number
_RESEND: Final = struct.pack("<IiQ", 16, 7, 0)
_NEW_EPOCH: Final = struct.pack("<IiQ", 16, 8, 0)


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
