"""A FUSE connection as its processes share it: clones of the device, requests handed out again, and its end.

Requests read through a clone of the device belong to that clone: they fail when its last descriptor is closed, and can
be handed out again before that (FUSE_NOTIFY_RESEND, Linux 6.9). The connection itself ends when all its devices are
closed, or at once through /sys/fs/fuse/connections.
"""

import contextlib
import fcntl
import os
import struct
from pathlib import Path
from typing import Final

DEVICE: Final = "/dev/fuse"
CONNECTIONS: Final = Path("/sys/fs/fuse/connections")
_IOC_CLONE: Final = 0x8004E500
_RESEND: Final = struct.pack("<IiQ", 16, 7, 0)  # struct fuse_out_header: length, notify code, 0 for a request's number


def descriptors() -> set[int]:
    """This process's descriptors of the FUSE device, whatever their connection."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == DEVICE:
                found.add(int(name))
    return found


def clone(device: int, *, blocking: bool) -> int:
    """Another descriptor of the same connection, with requests of its own. Where several processes wait for requests it
    must not block, since all wake up and one gets it. Raises OSError."""
    fresh = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC | (0 if blocking else os.O_NONBLOCK))
    try:
        fcntl.ioctl(fresh, _IOC_CLONE, struct.pack("I", device))
    except OSError:
        os.close(fresh)
        raise
    return fresh


def resend(device: int) -> bool:
    """Have all requests that somebody took and has not answered handed out again; False where the kernel cannot.

    Who still works on one finds its answer refused, which libfuse takes for an interrupted request.
    """
    try:
        os.write(device, _RESEND)
    except OSError:
        return False
    return True


class Connection:
    """number: minor device number of the mount. Its files stay open, so that the number of a connection that is gone
    never means somebody else's; where the control file system is not mounted, nothing is known and nothing done."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._waiting = _open(CONNECTIONS / str(number) / "waiting", os.O_RDONLY)
        self._abort = _open(CONNECTIONS / str(number) / "abort", os.O_WRONLY)

    def has_waiting(self) -> bool:
        """Does anybody wait for an answer? Yes where that cannot be known."""
        try:
            return self._waiting is None or int(os.pread(self._waiting, 32, 0)) > 0
        except (OSError, ValueError):
            return True

    def abort(self) -> None:
        """End the connection: everybody who waits gets an error, and who serves ENODEV."""
        if self._abort is not None:
            with contextlib.suppress(OSError):
                os.write(self._abort, b"1")


def _open(path: Path, flags: int) -> int | None:
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError:
        return None
