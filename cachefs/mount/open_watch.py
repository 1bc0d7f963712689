"""Watches whether other processes open files or directories of a mount, with fanotify(7). Needs root.

With zero-open the kernel opens cached files without a request to the mount, so only the kernel knows of those opens.
Each watched open costs its process a few microseconds; a mount is therefore watched only after a signal to end.
"""

import ctypes
import os
import select
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

# Length of one watch.
WATCH_SECONDS: Final = 1.0
_CLOSE_ON_EXEC: Final = 0x1  # FAN_CLOEXEC, with FAN_CLASS_NOTIF
_NON_BLOCKING: Final = 0x2  # FAN_NONBLOCK
_ADD: Final = 0x1  # FAN_MARK_ADD
_FILE_SYSTEM: Final = 0x100  # FAN_MARK_FILESYSTEM: also opens through mounts of other namespaces
_OPENED: Final = 0x20  # FAN_OPEN
_DIRECTORIES: Final = 0x40000000  # FAN_ONDIR
_HERE: Final = -100  # AT_FDCWD
# struct fanotify_event_metadata: length, version, reserved, metadata's length, mask, descriptor, process.
_EVENT: Final = struct.Struct("=IBBHQii")
_BUFFER: Final = 1 << 16
_libc: Final = ctypes.CDLL(None, use_errno=True)


def watch_opens(directory: Path, seconds: float, is_own: Callable[[int], bool]) -> set[int]:
    """Watch the file system mounted on *directory* for *seconds*. Returns the processes that opened files or
    directories of it, only the first ones where there are many; 0 for a process outside this pid namespace.

    is_own: whether a process belongs to the mount itself. Raises OSError where the kernel does not allow the watch.
    """
    watch = _new_watch(directory)
    seen: set[int] = set()
    deadline = time.monotonic() + seconds
    try:
        while not seen and select.select([watch], [], [], max(0.0, deadline - time.monotonic()))[0]:
            seen = {process for process in _processes(os.read(watch, _BUFFER)) if not is_own(process)}
    finally:
        os.close(watch)
    # A busy reader would fill the queue of the watch; one open per second is as informative as thousands.
    time.sleep(max(0.0, deadline - time.monotonic()))
    return seen


def _new_watch(directory: Path) -> int:
    watch: int = _libc.fanotify_init(_CLOSE_ON_EXEC | _NON_BLOCKING, os.O_RDONLY | os.O_CLOEXEC)
    if watch < 0:
        raise _error()
    mask = ctypes.c_uint64(_OPENED | _DIRECTORIES)
    if _libc.fanotify_mark(watch, _ADD | _FILE_SYSTEM, mask, _HERE, os.fsencode(directory)):
        error = _error()
        os.close(watch)
        raise error
    return watch


def _processes(events: bytes) -> list[int]:
    """Return the processes that caused *events*, 0 for one outside this namespace. Closes the events' descriptors."""
    found = []
    at = 0
    while at < len(events):
        length, _, _, _, _, descriptor, process = _EVENT.unpack_from(events, at)
        if descriptor >= 0:
            os.close(descriptor)
        at += length
        found.append(process)
    return found


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
