"""The kernel's table of mounts, from which we learn what is mounted where without asking a mount that may be dead."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FS_TYPE: Final = "fuse.cachefs"
_SOURCE_PREFIX: Final = "cachefs:"
_TABLE: Final = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class MountPoint:
    """A mount of cachefs."""

    path: Path
    # Major and minor number of the mount's device, as in "0:57"; the minor one is the number of the FUSE connection.
    device: str
    # What `df` shows: "cachefs:" and the SPEC.
    source: str

    @property
    def connection(self) -> int:
        """The kernel's number of the mount's FUSE connection."""
        return int(self.device.partition(":")[2])

    @property
    def spec(self) -> str:
        return self.source.removeprefix(_SOURCE_PREFIX)


def source_of(spec: str) -> str:
    """What a mount of *spec* gives the kernel as its source."""
    return _SOURCE_PREFIX + spec


def mount_points() -> list[MountPoint]:
    """The mounts of cachefs, in the order in which they were mounted."""
    return [
        MountPoint(Path(row.path), row.device, _text(row.source)) for row in _rows() if row.kind == FS_TYPE.encode()
    ]


def mounted_paths() -> set[str]:
    """Where anything is mounted, of whatever file system."""
    return {row.path for row in _rows()}


def file_system_kinds() -> dict[str, str]:
    """By device, as in "0:57": what kind of file system is mounted, such as `ext4`."""
    return {row.device: row.kind.decode(errors="replace") for row in _rows()}


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of the table (proc_pid_mountinfo(5))."""

    path: str
    device: str
    kind: bytes
    # Not unescaped yet.
    source: bytes


def _rows() -> Iterator[_Row]:
    # The kernel escapes space, tab, newline and backslash; a name may have any other white space in it.
    for line in _TABLE.read_bytes().rstrip(b"\n").split(b"\n"):
        left, _, right = line.partition(b" - ")
        fields, (kind, source, *_) = left.split(b" "), right.split(b" ")
        yield _Row(_text(fields[4]), fields[2].decode(), kind, source)


def _text(field: bytes) -> str:
    """Space, tab, newline and backslash are written as \\ooo."""
    return os.fsdecode(field.decode("unicode_escape").encode("latin-1"))
