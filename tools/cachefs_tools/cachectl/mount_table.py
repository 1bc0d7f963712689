"""The kernel's table of mounts, which can be read without touching any of them."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MOUNT_INFO: Final = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class MountPoint:
    """kind: file system type, such as `fuse.cachefs`; source: what it shows."""

    path: Path
    kind: str
    source: str

    @property
    def is_cachefs(self) -> bool:
        return self.kind == "fuse.cachefs"


def parse(text: bytes) -> list[MountPoint]:
    """The lines of /proc/self/mountinfo (proc_pid_mountinfo(5)): oldest mount first."""
    points = []
    for line in text.splitlines():
        left, _, right = line.partition(b" - ")
        kind, source = right.split(b" ")[:2]
        path = Path(os.fsdecode(_unescape(left.split(b" ")[4])))
        points.append(MountPoint(path, os.fsdecode(kind), os.fsdecode(_unescape(source))))
    return points


def mounted_at(path: Path) -> MountPoint | None:
    """The topmost mount at exactly *path*."""
    found = [point for point in parse(MOUNT_INFO.read_bytes()) if point.path == path]
    return found[-1] if found else None


def file_system_of(path: Path) -> str:
    """Type of the file system *path* is on, such as `ext4`."""
    above = [point for point in parse(MOUNT_INFO.read_bytes()) if path.resolve().is_relative_to(point.path)]
    return max(above, key=lambda point: len(point.path.parts)).kind


def _unescape(field: bytes) -> bytes:
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field)
