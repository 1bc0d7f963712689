"""The shield: a read-only overlayfs over the mount, so that the kernel answers ioctls that FUSE would send to the
mount.

Before Python 3.14, open() calls isatty() on each file, which is an ioctl. FUSE sends every ioctl to user space, so that
open() of a cached file took 131 us, and 28 us on a local disk. Overlayfs has no ioctls and refuses them at once: 35 us.

The overlay replaces the FUSE mount, which is then mounted only inside the overlay; both end together. The overlay has
the mount as its only regular layer, and an empty directory as a data-only layer, since overlayfs requires two layers.
With one regular layer no directory is merged, and inode numbers stay the same. The data-only layer is a directory of
sysfs that names the FUSE connection, so the table of mounts shows which connection is below (cachefs.mount_table).

Overlayfs does not expect names below it to change their meaning. A shield is therefore limited to a mount of one
dataset that stays at one snapshot.
"""

import ctypes
import errno
import logging
import os
import select
from pathlib import Path
from typing import Final

from cachefs.errors import CachefsError
from cachefs.mount import child_process, kernel
from cachefs.mount.child_process import fork_watched
from cachefs.mount.device import FuseConnection
from cachefs.mount.kernel import attach_mount, new_mount
from cachefs.mount.options import ShieldChoice
from cachefs.mount_spec import MountSpec
from cachefs.mount_table import mount_source, shield_layer

log = logging.getLogger(__name__)

SHIELD_SECONDS: Final = 10.0
_READ_ONLY: Final = 0x1  # MOUNT_ATTR_RDONLY
_NO_TIMES: Final = 0x10  # MOUNT_ATTR_NOATIME
_ATTRIBUTES: Final = {"nosuid": 0x2, "nodev": 0x4, "noexec": 0x8}  # MOUNT_ATTR_NOSUID and so on
_DETACH: Final = 2  # MNT_DETACH
_libc: Final = ctypes.CDLL(None, use_errno=True)


def shield_obstacle(spec: MountSpec, *, root: bool, allow_other: bool, can_abort: bool) -> str | None:
    """Return why a mount of *spec* cannot have a shield; None where it can.

    root: whether root mounts; allow_other: whether other users may read; can_abort: whether the FUSE connection can be
    ended through its control files, as a forced unmount of the overlay would not reach it.
    """
    if not root:
        return "it takes root"
    if not spec.is_single:
        return "the mount shows several datasets, and its root changes with them"
    if not spec.is_fixed:
        return "the mount follows refreshes, so names come to mean other files"
    if not allow_other:
        return "with noallow_other it would let other users in"
    if not can_abort:
        return "the control files of the FUSE connection cannot be opened"
    return None


def put_up_shield(
    choice: ShieldChoice,
    spec: MountSpec,
    directory: Path,
    connection: FuseConnection,
    flags: tuple[str, ...],
    *,
    shared: bool,
) -> None:
    """Put the shield over the mount on *directory*, which must answer requests. Takes SHIELD_SECONDS at most.

    flags: those of `nosuid`, `nodev`, `noexec` that the mount has; shared: whether it is mounted with allow_other.
    Where no shield is possible, raises CachefsError if the choice is ON, else logs the reason.
    """
    if choice is ShieldChoice.OFF:
        return
    why = shield_obstacle(spec, root=os.geteuid() == 0, allow_other=shared, can_abort=connection.has_abort)
    if why is None:
        why = _put_up_in_child(spec, directory, connection.number, flags)
    if why is None:
        return
    if choice is ShieldChoice.ON:
        raise CachefsError(f"no shield over {directory}: {why}; mount with -o shield=auto or shield=off")
    log.info(
        "no shield over %s: %s. So each open() of Python before 3.14 asks the mount; not so in jobs of `cachefs run`",
        directory, why,
    )  # fmt: skip


def _put_up_in_child(spec: MountSpec, directory: Path, number: int, flags: tuple[str, ...]) -> str | None:
    """Put up the shield in a child, since requests may hang. Returns the error; None after success."""
    reader, writer = os.pipe2(os.O_CLOEXEC)

    def work() -> None:
        try:
            _replace_mount(spec, directory, number, flags)
        except OSError as error:
            why = error.strerror or str(error)
            os.write(writer, f"the kernel refuses it ({why}); it takes overlayfs of Linux 6.5 or newer".encode())
            os._exit(1)

    try:
        pid, pidfd = fork_watched("shield", directory, work)
    except OSError as error:
        os.close(reader)
        return f"no process: {error.strerror}"
    finally:
        os.close(writer)
    try:
        if not select.select([pidfd], [], [], SHIELD_SECONDS)[0]:
            child_process.kill_child(pid)
            return f"it was not there within {SHIELD_SECONDS:.0f} s"
        status = os.waitpid(pid, 0)[1]
        message = os.read(reader, select.PIPE_BUF).decode(errors="replace")
        return (message or "the process that puts it up has died") if status else None
    finally:
        os.close(pidfd)
        os.close(reader)


def _replace_mount(spec: MountSpec, directory: Path, number: int, flags: tuple[str, ...]) -> None:
    """Put an overlay in the place of the FUSE mount *number*. Raises OSError."""
    mount_point = os.fsencode(directory.parent.resolve() / directory.name)
    os.chdir(mount_point)  # "." works as a layer also where the path is longer than a layer's name may be
    overlay = _new_overlay(mount_source(str(spec)), number, sum(_ATTRIBUTES.get(flag, 0) for flag in flags))
    os.chdir("/")
    if kernel.connection_number(directory) != number:
        raise OSError(errno.EBUSY, "something else is mounted there by now")
    try:
        # Attached beneath before the old mount is detached, so that the directory is never seen without the mount.
        attach_mount(overlay, mount_point, beneath=True)
    except OSError as error:
        log.debug("the shield cannot be attached beneath the mount: %s", error.strerror)
        _detach_topmost(mount_point)
        attach_mount(overlay, mount_point)
    else:
        _detach_topmost(mount_point)
    os.close(overlay)


def _new_overlay(source: str, number: int, attributes: int) -> int:
    """Return a descriptor of an overlay over the current directory. Raises OSError."""
    options = {"source": source, "lowerdir": f".::{shield_layer(number)}", "ro": None}
    try:
        return new_mount("overlay", options, _READ_ONLY | _NO_TIMES | attributes)
    except OSError:
        # Before Linux 6.16, data-only layers need this option.
        return new_mount("overlay", {**options, "metacopy": "on"}, _READ_ONLY | _NO_TIMES | attributes)


def _detach_topmost(mount_point: bytes) -> None:
    if _libc.umount2(mount_point, _DETACH):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
