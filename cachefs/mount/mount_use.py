"""Finds out whether a mount is in use, without access to the mount.

`describe_users` finds the processes that keep the mount from being unmounted, through /proc. `watch_opens` watches
whether other processes open files or directories of the mount, with fanotify(7), and needs root: with zero-open the
kernel opens cached files without a request to the mount, so only the kernel knows of those opens. Each watched open
costs its process a few microseconds; a mount is therefore watched only after a signal to end.
"""

import contextlib
import ctypes
import functools
import itertools
import os
import select
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from cachefs.mount_table import mount_points, mount_points_of

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
# Most users that are named; there may be thousands.
MAX_USERS: Final = 5
# Most seconds of a search: a loader's process may have thousands of files open and mapped, and there may be thousands
# of processes.
SEARCH_SECONDS: Final = 1.0
_PROCESSES: Final = Path("/proc")


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


def describe_users(directory: Path, seconds: float = SEARCH_SECONDS) -> str:
    """Describe the processes that use the mount on *directory*: the first MAX_USERS found within *seconds*, and how
    each uses it. Empty where none is found.

    Maps are read last, since the maps of one process may take as long as the links of a thousand. Without root, only
    processes of the caller can be searched.
    """
    users = itertools.islice(_find_users(directory, time.monotonic() + seconds), MAX_USERS + 1)
    named = [f"{name} (process {pid}: {how})" for pid, name, how in users]
    return ", ".join([*named[:MAX_USERS], *["and more"] * (len(named) > MAX_USERS)])


def _find_users(directory: Path, deadline: float) -> Iterator[tuple[int, str, str]]:
    """Yield (pid, name, how) of each process that uses the mount. deadline: monotonic seconds."""
    mount = next((point for point in reversed(mount_points()) if point.path == directory), None)
    own = _mount_namespace(os.getpid())

    @functools.cache
    def directories_of(pid: int) -> dict[str, int | None]:
        """Return the directories where a process sees the mount, and their mount ids. A container has others."""
        if _mount_namespace(pid) == own:
            return {os.fspath(directory): None if mount is None else mount.mount_id}
        device = None if mount is None else mount.device
        return {os.fspath(each.path): each.mount_id for each in mount_points_of(pid) if each.device == device}

    pids = sorted(int(name) for name in os.listdir(_PROCESSES) if name.isdecimal())
    found: set[int] = set()
    for use, pid in itertools.product((_link_or_file, _mapped_file), pids):
        if time.monotonic() >= deadline:
            return
        if pid in found:
            continue
        entry = _PROCESSES / str(pid)
        with contextlib.suppress(OSError):
            directories = directories_of(pid).items()
            how = next((how for top, number in directories if (how := use(entry, top, number, deadline))), "")
            if how:
                found.add(pid)
                yield pid, (entry / "comm").read_text(errors="replace").strip(), how


def _link_or_file(process: Path, top: str, mount: int | None, deadline: float) -> str:
    """Describe a link or open file of a process below *top*; "" where none is found in time.

    mount: the kernel's id of the mount on *top*; None where none is there. A process that uses the directory under the
    mount does not count: for example a shell that was in it before, or a process of the mount that keeps it open.
    """
    for link, how in (("cwd", "is in"), ("root", "has as its root"), ("exe", "runs")):
        with contextlib.suppress(OSError):
            path = os.readlink(process / link)
            if _is_below(path, top) and _is_on(process / link, mount):
                return f"{how} {path}"
    for descriptor in os.listdir(process / "fd"):
        if time.monotonic() >= deadline:
            return ""
        with contextlib.suppress(OSError):
            path = os.readlink(process / "fd" / descriptor)
            if _is_below(path, top) and _is_on(process / "fd" / descriptor, mount):
                return f"has {path} open"
    return ""


def _mapped_file(process: Path, top: str, mount: int | None, deadline: float) -> str:
    """Describe a mapped file of a process below *top*; "" where none is found in time."""
    with contextlib.suppress(OSError), (process / "maps").open(errors="surrogateescape") as maps:
        for line in maps:
            if time.monotonic() >= deadline:
                return ""
            path = line.rstrip("\n").partition("/")[2]
            if path and _is_below(f"/{path}", top):
                return f"has /{path} mapped"
    return ""


def _is_on(link: Path, mount: int | None) -> bool:
    """Return whether a link of /proc leads to a file of *mount* (None: any mount), without access to the mount. Raises
    OSError."""
    if mount is None:
        return True
    descriptor = os.open(link, os.O_PATH | os.O_CLOEXEC)
    try:
        return f"\nmnt_id:\t{mount}\n" in Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    finally:
        os.close(descriptor)


def _is_below(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top}/")


def _mount_namespace(pid: int) -> str:
    return os.readlink(_PROCESSES / str(pid) / "ns" / "mnt")
