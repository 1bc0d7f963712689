"""Reads the kernel's table of mounts, which shows the mounts of cachefs without asking a mount that may be dead."""

import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cachefs.socket_path import DEFAULT_SOCKET, SOCKET_VARIABLE

FS_TYPE: Final = "fuse.cachefs"
SOURCE_PREFIX: Final = "cachefs:"
_TABLE: Final = Path("/proc/self/mountinfo")
_PROCESSES: Final = Path("/proc")
# Maximum number of processes examined, and the commands of a process that serves a mount: `python -m cachefs.mount SPEC
# DIRECTORY`, or `python /usr/sbin/mount.cachefs SPEC DIRECTORY`.
_MAX_PROCESSES: Final = 4096
_MOUNT_PROGRAMS: Final = (b"cachefs.mount", b"mount.cachefs")
# A mount may be a layer of our overlay, its shield (cachefs.mount.shield), and is then seen through the overlay.
_OVERLAY: Final = b"overlay"
# File systems of this node's own disks and memory, on which no lookup waits for a server or another process.
_LOCAL_FILE_SYSTEMS: Final = frozenset(
    b"bcachefs btrfs erofs ext2 ext3 ext4 f2fs overlay ramfs rootfs squashfs tmpfs xfs zfs".split()
)
# Maximum number of symbolic links in the resolution of one path, as in the kernel.
_MAX_LINKS: Final = 40
_SHIELD_LAYER: Final = re.compile(rb"lowerdir=\.::/sys/class/bdi/0\\134:(\d+)(?:,|$)")


@dataclass(frozen=True, slots=True)
class MountPoint:
    """A mount of cachefs."""

    path: Path
    # Major and minor number of the mount's device, as in "0:57"; without a shield, the minor is the FUSE connection's.
    device: str
    # Source of the mount, as shown by `df`: "cachefs:" and the SPEC.
    source: str
    # The kernel's number of the FUSE connection below the shield; None without a shield.
    shielded_connection: int | None = None
    # The directory of the mount that is seen here: not / where a part of the mount is bound to a directory.
    root: str = "/"
    # The kernel's id of this mount, also shown by /proc/PID/fdinfo.
    mount_id: int = field(default=0, compare=False)

    @property
    def connection(self) -> int:
        """The kernel's number of the mount's FUSE connection."""
        return int(self.device.partition(":")[2]) if self.shielded_connection is None else self.shielded_connection

    @property
    def spec(self) -> str:
        return self.source.removeprefix(SOURCE_PREFIX)


def mount_source(spec: str) -> str:
    """Return the source that a mount of *spec* gives to the kernel."""
    return SOURCE_PREFIX + spec


def shield_layer(connection: int) -> str:
    """Return the layer of a shield that identifies the FUSE connection below, as an option of overlayfs."""
    return f"/sys/class/bdi/0\\:{connection}"


def mount_points() -> list[MountPoint]:
    """Return the mounts of cachefs, in the order of mounting."""
    return _mount_points(_TABLE)


def find_mount_point(path: Path) -> MountPoint | None:
    """Return the mount of cachefs seen at *path*; None without one, or where a later mount covers it."""
    row = _visible_mounts().get(os.fspath(path))
    return None if row is None else _mount_point(row)


def mount_points_of(process: int) -> list[MountPoint]:
    """Return the mounts of cachefs seen by *process*, which may be in a container. Raises OSError if unknown."""
    return _mount_points(_PROCESSES / str(process) / "mountinfo")


def _mount_points(table: Path) -> list[MountPoint]:
    return [point for row in _read_table(table) if (point := _mount_point(row)) is not None]


def daemon_sockets() -> dict[Path, str]:
    """Return by directory of each mount with a process the socket of its daemon; "" where it is unknown.

    Reads command lines, which every user may read, so that neither a mount nor a daemon is asked.
    """
    found: dict[Path, str] = {}
    for process in list(_PROCESSES.glob("[0-9]*"))[:_MAX_PROCESSES]:
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        program = next((at for at, word in enumerate(words[:4]) if word.endswith(_MOUNT_PROGRAMS)), None)
        if program is None:
            continue
        options = [option for word in words[program:] for option in word.split(b",")]
        option = next((option for option in options if option.startswith(b"socket=")), None)
        socket = _environment_socket(process) if option is None else os.fsdecode(option.removeprefix(b"socket="))
        for word in words[program + 1 : program + 4]:
            if word.startswith(b"/"):
                path = Path(os.fsdecode(word))
                found[path] = socket or found.get(path, "")
    return found


def _environment_socket(process: Path) -> str:
    """Return the socket of a mount without a `socket` option; "" where this user may not read its environment."""
    try:
        variables = (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    prefix = f"{SOCKET_VARIABLE}=".encode()
    option = next((variable for variable in variables if variable.startswith(prefix)), b"")
    return os.fsdecode(option.removeprefix(prefix)) or str(DEFAULT_SOCKET)


def mounted_paths() -> set[str]:
    """Return the directories where any file system is mounted."""
    return set(_visible_mounts())


def resolve_locally(path: str) -> str:
    """Return the absolute path without symbolic links, and ask only file systems of this node's own disks and memory.

    Raises OSError where the path does not exist, or leads through any other mount, such as one of cachefs or NFS: then
    with EXDEV and, as its filename, the path as far as it was resolved, and the rest.
    """
    local = {
        path: row.kind in _LOCAL_FILE_SYSTEMS and _mount_point(row) is None for path, row in _visible_mounts().items()
    }
    parts = os.path.join(os.getcwd(), path).split("/")[::-1]
    found, links = "/", 0
    while parts:
        part = parts.pop()
        if part == "..":
            found = os.path.dirname(found)
            continue
        here = os.path.join(found, part) if part not in ("", ".") else found
        if not local.get(here, True):
            raise OSError(errno.EXDEV, "not on a local file system", "/".join((here, *reversed(parts))))
        if not stat.S_ISLNK(os.lstat(here).st_mode):
            found = here
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = os.readlink(here)
        parts += target.split("/")[::-1]
        found = "/" if target.startswith("/") else found
    return found


def file_system_location(path: Path) -> tuple[str, str]:
    """Return the device of *path*, which has no links, and the path in its file system: the same for the same directory
    in two bind mounts. Asks no file system."""
    seen = _visible_mounts()
    top = next((row for above in (path, *path.parents) if (row := seen.get(os.fspath(above))) is not None), None)
    if top is None:  # as in a chroot whose root is no mount
        return "", os.fspath(path)
    return top.device, os.path.normpath(os.path.join(top.root, path.relative_to(top.path)))


def file_system_kinds() -> dict[str, str]:
    """Return by device, as in "0:57", the type of its file system, such as `ext4`."""
    return {row.device: row.kind.decode(errors="replace") for row in _read_table(_TABLE)}


def _mount_point(row: "_TableRow") -> MountPoint | None:
    if row.kind == FS_TYPE.encode():
        return MountPoint(Path(row.path), row.device, _unescape(row.source), None, row.root, row.mount_id)
    if row.kind == _OVERLAY and row.source.startswith(SOURCE_PREFIX.encode()):
        layers = _SHIELD_LAYER.search(row.options)
        if layers is not None:
            return MountPoint(Path(row.path), row.device, _unescape(row.source), int(layers[1]), row.root, row.mount_id)
    return None


@dataclass(frozen=True, slots=True)
class _TableRow:
    """A line of the table (proc_pid_mountinfo(5))."""

    mount_id: int
    path: str
    # The directory of the file system that is mounted at *path*.
    root: str
    device: str
    kind: bytes
    # Still escaped.
    source: bytes
    # Options of the file system, still escaped.
    options: bytes


def _visible_mounts() -> dict[str, _TableRow]:
    """Return by directory the mount that programs see there: of two mounts on one directory, the later one."""
    return {row.path: row for row in _read_table(_TABLE)}


def _read_table(table: Path) -> Iterator[_TableRow]:
    # Split at single spaces: the kernel escapes space, tab, newline and backslash, but not other white space in names.
    for line in table.read_bytes().rstrip(b"\n").split(b"\n"):
        left, _, right = line.partition(b" - ")
        fields, (kind, source, options) = left.split(b" "), right.split(b" ", 2)
        yield _TableRow(
            int(fields[0]), _unescape(fields[4]), _unescape(fields[3]), fields[2].decode(), kind, source, options
        )


def _unescape(field: bytes) -> str:
    """Unescape a field, in which space, tab, newline and backslash are written as \\ooo."""
    return os.fsdecode(field.decode("unicode_escape").encode("latin-1"))
