"""Kernel operations of a mount besides FUSE: checks of mount points, unmounting, and readahead.

System calls that libc does not have everywhere are made by number: openat2(2), and fsopen(2) with its relatives. A
mount made with fsopen(2) is attached to no directory until `attach_mount`, and lasts as long as its descriptor is open.
"""

import ctypes
import errno
import fcntl
import logging
import os
import stat
import struct
import subprocess
import sys
from pathlib import Path
from typing import Final

from cachefs.errors import AccessDenied, Busy, CachefsError, NotFound
from cachefs.mount_table import find_mount_point, mount_points

# The calls have these numbers on every architecture.
_MOVE_MOUNT: Final = 429
_FSOPEN: Final = 430
_FSCONFIG: Final = 431
_FSMOUNT: Final = 432
_OPENAT2: Final = 437
_NO_MAGIC_LINKS: Final = 0x02  # RESOLVE_NO_MAGICLINKS
_OPEN_HOW: Final = struct.Struct("QQQ")  # flags, mode, resolve
_CLOSE_ON_EXEC: Final = 1  # FSOPEN_CLOEXEC, and FSMOUNT_CLOEXEC
_SET_FLAG: Final = 0  # FSCONFIG_SET_FLAG
_SET_STRING: Final = 1  # FSCONFIG_SET_STRING
_CREATE: Final = 6  # FSCONFIG_CMD_CREATE
_NO_SOURCE_PATH: Final = 0x04  # MOVE_MOUNT_F_EMPTY_PATH
_BENEATH: Final = 0x200  # MOVE_MOUNT_BENEATH, Linux 6.5
_AT_FDCWD: Final = -100
log = logging.getLogger(__name__)

UNMOUNT_SECONDS: Final = 10
# A mount that has not answered within this time counts as hanging.
RESPONSE_SECONDS: Final = 5
# Parts of the messages of umount and fusermount3 for lack of rights. fusermount3 sees only mounts of the calling user.
_NOT_ALLOWED: Final = ("must be superuser", "ermission denied", "not permitted", "not found in /etc/mtab")
_MNT_FORCE: Final = 1
_MAX_LINKS: Final = 40
# Directories of the kernel: their entries come and go with processes and devices, and a mount on an entry goes with it.
_KERNEL_DIRECTORIES: Final = (Path("/proc"), Path("/sys"), Path("/dev"))
# An ordinary file system below one of them.
_SHARED_MEMORY: Final = Path("/dev/shm")
_libc: Final = ctypes.CDLL(None, use_errno=True)


def system_call(number: int, *arguments: object) -> int:
    """Make system call *number*. Raises OSError."""
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def new_mount(kind: str, options: dict[str, str | None] | None = None, attributes: int = 0) -> int:
    """Return a descriptor of a new mount of the file system *kind*, attached to no directory.

    options: name -> value, None for flags; attributes: MOUNT_ATTR_ bits. Raises OSError.
    """
    context = system_call(_FSOPEN, kind.encode(), _CLOSE_ON_EXEC)
    try:
        for name, value in (options or {}).items():
            command, text = (_SET_FLAG, None) if value is None else (_SET_STRING, os.fsencode(value))
            system_call(_FSCONFIG, context, command, name.encode(), text, 0)
        system_call(_FSCONFIG, context, _CREATE, None, None, 0)
        return system_call(_FSMOUNT, context, _CLOSE_ON_EXEC, attributes)
    finally:
        os.close(context)


def attach_mount(mount: int, directory: bytes, *, beneath: bool = False) -> None:
    """Attach a mount of `new_mount` to *directory*: over the mounts there, or *beneath* the topmost one.

    Raises OSError.
    """
    system_call(_MOVE_MOUNT, mount, b"", _AT_FDCWD, directory, _NO_SOURCE_PATH | (_BENEATH if beneath else 0))


def leads_through_magic_link(path: Path) -> bool:
    """Return whether *path* has a link that the kernel resolves by itself, such as /proc/self/root, whose text does not
    tell its target. Does not access a mount at *path*. False where the kernel (before 5.6) cannot tell."""
    how = _OPEN_HOW.pack(os.O_PATH | os.O_CLOEXEC, 0, _NO_MAGIC_LINKS)
    try:
        os.close(system_call(_OPENAT2, _AT_FDCWD, os.fsencode(path), how, len(how)))
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def resolve_mount_point(directory: Path) -> Path:
    """Return the path of a mount on *directory*, without links, and without access to a mount there. Raises
    CachefsError."""
    mount_point = _without_links_above(directory)
    for _ in range(_MAX_LINKS):
        try:
            target = os.readlink(mount_point)  # does not access the mount, unlike lstat(2)
        except OSError:
            return mount_point
        mount_point = _without_links_above(mount_point.parent / target)
    raise CachefsError(f"mount point {directory} is a symbolic link to itself")


def _without_links_above(path: Path) -> Path:
    """Resolve all links but the last name of *path*. Raises CachefsError where links form a circle."""
    try:
        above = os.path.realpath(path.parent, strict=True)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CachefsError(f"{path} leads through symbolic links in a circle") from None
        above = os.path.realpath(path.parent)
    return Path(above) / path.name


def check_mount_point(directory: Path) -> Path:
    """Return the place to mount on for the absolute path *directory*. Raises CachefsError where a mount would not
    last."""
    normalized = Path(os.path.normpath(directory))
    # The given path counts too: /proc/self is another process for each program that resolves it.
    _check_not_in_kernel_directory(normalized, directory)
    mount_point = resolve_mount_point(directory)
    _check_not_in_kernel_directory(mount_point, directory)
    if leads_through_magic_link(directory):
        raise CachefsError(
            f"{directory} leads through a link of /proc, which each process sees differently; name {mount_point}"
        )
    return mount_point


def _check_not_in_kernel_directory(mount_point: Path, directory: Path) -> None:
    for top in _KERNEL_DIRECTORIES:
        if mount_point.is_relative_to(top) and not (
            mount_point.is_relative_to(_SHARED_MEMORY) and mount_point != _SHARED_MEMORY
        ):
            raise CachefsError(f"{directory} is below {top}, where the kernel keeps its own; choose another directory")


def check_mounted(mount_point: Path) -> None:
    """Raise CachefsError where no cachefs is mounted at *mount_point*, a path of `resolve_mount_point`."""
    if not any(point.path == mount_point for point in mount_points()):
        raise CachefsError(f"{mount_point} was unmounted, moved or removed while it was being mounted; mount it again")


def is_dead(directory: Path) -> bool:
    """Return whether *directory* has a FUSE mount whose process is gone. (stat(2) could succeed from cached
    attributes.)"""
    try:
        os.statvfs(directory)
    except OSError as error:
        return error.errno == errno.ENOTCONN
    return False


def is_stuck(directory: Path) -> bool:
    """Return whether the mount on *directory* does not answer. A child process probes, since the probe may hang."""
    probe = "import contextlib, os, sys\nwith contextlib.suppress(OSError): os.statvfs(sys.argv[1])"
    child = subprocess.Popen([sys.executable, "-SIc", probe, directory], start_new_session=True)
    try:
        child.wait(RESPONSE_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        return True
    return False


def unmount(directory: Path, *, lazy: bool = False, force: bool = False) -> None:
    """Unmount. lazy: even while files are open; force: fail the requests that wait for an answer (root only).

    Raises Busy, AccessDenied where another user or root is needed, or CachefsError with the message of the command.
    """
    if os.geteuid() == 0:
        command = ["umount", "-i", *["-l"] * lazy, *["-f"] * force, str(directory)]
    else:
        command = ["fusermount3", "-u", *["-z"] * lazy, str(directory)]
    words = {**os.environ, "LC_ALL": "C"}  # the messages searched for below are English
    try:
        child = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", env=words
        )
    except OSError as error:
        raise CachefsError(f"cannot unmount {directory}: {error}") from None
    assert child.stderr is not None
    try:
        _, stderr = child.communicate(timeout=UNMOUNT_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()  # not waited for, since it may hang in the kernel at the mount
        child.stderr.close()
        raise CachefsError(
            f"cannot unmount {directory}: `{' '.join(command)}` has not ended within {UNMOUNT_SECONDS} s"
        ) from None
    if child.returncode:
        message = " ".join(stderr.split()).rstrip(".") or f"{command[0]} failed"
        if any(reason in message for reason in _NOT_ALLOWED):
            raise AccessDenied(f"you may not unmount {directory}: it takes root, or the user who mounted it")
        kind = Busy if " busy" in message else CachefsError
        raise kind(f"cannot unmount {directory}: {message}")


def abort_connection(directory: Path) -> None:
    """End the FUSE connection mounted on *directory* as a forced unmount does, without access to the mount. The mount
    point stays. Needs CAP_SYS_ADMIN. Raises OSError."""
    mount_point = directory.parent.resolve() / directory.name
    # An open descriptor keeps the mount busy, so that only its connection ends.
    descriptor = os.open(mount_point, os.O_PATH | os.O_CLOEXEC)
    try:
        if _libc.umount2(os.fsencode(mount_point), _MNT_FORCE) and (code := ctypes.get_errno()) != errno.EBUSY:
            raise OSError(code, os.strerror(code))
    finally:
        os.close(descriptor)


def connection_number(directory: Path) -> int | None:
    """Return the kernel's number of the FUSE connection that is seen at *directory*, without access to the mount.

    None where no cachefs is mounted there, or another file system is mounted over it: an unmount of the directory would
    end that file system.
    """
    point = find_mount_point(directory.parent.resolve() / directory.name)
    return None if point is None else point.connection


def prepare_mount_point(directory: Path) -> int:
    """Make sure that *directory* can be mounted on. Unmounts the dead mount of a killed mount process.

    Returns a descriptor that keeps other mounts off the directory until `release_claim`. Raises CachefsError.
    """
    # Must precede any access to the directory itself, which would access a mount there.
    mount_point = directory.parent.resolve() / directory.name
    if any(point.path == mount_point for point in mount_points()) and is_stuck(directory):
        raise Busy(f"{directory} is a cachefs mount that does not answer; free it with `cachectl umount {directory}`")
    if is_dead(directory):
        log.warning("%s is the mount point of a process that is gone; unmounting it", directory)
        unmount(directory, lazy=True)
    try:
        found = directory.stat()
    except FileNotFoundError:
        raise NotFound(f"mount point {directory} does not exist; create it with `mkdir -p {directory}`") from None
    except OSError as error:
        raise CachefsError(f"mount point {directory} cannot be used: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise CachefsError(f"mount point {directory} is not a directory")
    claim = _claim_directory(directory)
    already = next((point for point in mount_points() if point.path == directory.resolve()), None)
    if already is not None:
        raise Busy(
            f"{directory} already is a cachefs mount, of {already.spec}; unmount it first with `cachectl umount"
            f" {directory}`. (In /etc/fstab write {already.source}, and `mount -a` leaves it alone)"
        )
    return claim


def _claim_directory(directory: Path) -> int:
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Busy(f"another mount.cachefs is mounting on {directory} at this moment") from None
    except OSError as error:
        raise CachefsError(f"mount point {directory} cannot be used: {error.strerror}") from None
    return descriptor


def release_claim(claim: int) -> None:
    """Release the claim of `prepare_mount_point`, also for the processes forked since."""
    fcntl.flock(claim, fcntl.LOCK_UN)
    os.close(claim)


def raise_readahead(directory: Path, kib: int) -> None:
    """Set the mount's readahead; without permission it is left unchanged.

    The kernel's default of 128 KiB limits a sequential reader of large files to 1.5 GB/s; 1 MiB gave 2.3 GB/s.
    """
    path = Path(f"/sys/class/bdi/0:{connection_number(directory)}/read_ahead_kb")
    try:
        path.write_text(str(kib))
    except OSError as error:
        log.info("readahead stays at the kernel's default: %s: %s", path, error.strerror)
