"""Versions of files: size, mtime, ctime and inode.

Size and mtime alone do not suffice: `cp -p`, `rsync -t` and tar set any mtime, so that a file could be put together
from blocks of two versions. The ctime cannot be set, and a file that is renamed over another one has another inode. The
remaining gap is a file that is written in place within the clock tick of the file system (at most 10 ms) in which it
was listed.

A version is a text, `size-mtime-ctime-inode`, which is kept in snapshots and is part of a block's name in the cache. A
version may end early: missing parts are not compared. Snapshots of earlier releases have `size-mtime`.
"""

import os
from typing import Final

from cachefs.mount_table import file_system_kinds

# Clients of these file systems may make up inode numbers, which differ after the next mount or even the next access.
_UNSTABLE_INODE_KINDS: Final = ("fuse", "cifs", "smb", "9p", "overlay")


class FileVersions:
    """Makes the versions of one listing."""

    def __init__(self, *, mtime_only: bool) -> None:
        """mtime_only: see cachefs.messages.OriginOptions."""
        self._mtime_only = mtime_only
        self._stable_devices: dict[int, bool] = {}  # by device: whether its inode numbers are stable

    def version_of(self, status: os.stat_result) -> bytes:
        if self._mtime_only:
            return b"%d-%d" % (status.st_size, status.st_mtime_ns)
        full_version = _full_version(status)
        return full_version if self._has_stable_inodes(status.st_dev) else full_version.rpartition(b"-")[0]

    def _has_stable_inodes(self, device: int) -> bool:
        if device not in self._stable_devices:
            kind = file_system_kinds().get(f"{os.major(device)}:{os.minor(device)}", "")
            self._stable_devices[device] = not kind.startswith(_UNSTABLE_INODE_KINDS)
        return self._stable_devices[device]


def is_version(status: os.stat_result, version: bytes) -> bool:
    """Return whether an open file is the listed *version*, as far as the version tells."""
    full_version = _full_version(status)
    return full_version == version or full_version.startswith(version + b"-")


def _full_version(status: os.stat_result) -> bytes:
    return b"%d-%d-%d-%d" % (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
