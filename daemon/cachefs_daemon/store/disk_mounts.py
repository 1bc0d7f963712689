"""Checks that the disk for a directory is mounted.

Where a disk is not mounted, its mount point is an empty directory of the disk below, and files created there fill that
disk.
"""

import os
from pathlib import Path
from typing import Final

from cachefs.mount_table import mounted_paths

FSTAB: Final = Path("/etc/fstab")


def is_mounted(point: Path) -> bool:
    """Return whether a file system is mounted on *point*."""
    return os.path.realpath(point) in mounted_paths()


def missing_mount(directory: Path, fstab: Path = FSTAB) -> Path | None:
    """Return a mount point in *fstab* above *directory* on which nothing is mounted."""
    real = Path(os.path.realpath(directory))
    above = (point for point in _points(fstab) if directory.is_relative_to(point) or real.is_relative_to(point))
    return next((point for point in above if not is_mounted(point)), None)


def _points(fstab: Path) -> list[Path]:
    """Return the mount points in *fstab*; none where it cannot be read."""
    try:
        lines = fstab.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    fields = (line.split() for line in lines if not line.lstrip().startswith("#"))
    points = (Path(os.path.normpath(_unescaped(each[1]))) for each in fields if len(each) > 1)
    return [point for point in points if point.is_absolute() and point != Path("/")]


def _unescaped(field: str) -> str:
    r"""Decode a field of fstab(5): a space is written as \040, and a tab as \011."""
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
