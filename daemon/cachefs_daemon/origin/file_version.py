"""What tells two versions of a file apart: size, mtime, ctime and inode.

Size and mtime are not enough. `cp -p`, `rsync -t` and tar set an mtime of their choice, and a file could then be put
together from blocks of two versions. The ctime cannot be set, and a file that is renamed into the place of another one
has another inode. What remains is a file that is written in place within the tick of the file system's clock (at most
10 ms) in which it was listed.

A version is a text, `size-mtime-ctime-inode`, which is kept in snapshots and is a part of a block's name in the cache.
It may end early: then what it lacks is not compared. Snapshots of earlier releases have `size-mtime`.
"""

import os
from typing import Final

from cachefs.mount_table import file_system_kinds

# Their inode numbers may be made up by the client, and differ after the next mount or even the next look.
_MADE_UP: Final = ("fuse", "cifs", "smb", "9p", "overlay")


class FileVersions:
    """Makes the versions of one listing."""

    def __init__(self, *, mtime_only: bool) -> None:
        """mtime_only: as in cachefs.messages.OriginOptions."""
        self._mtime_only = mtime_only
        self._steady: dict[int, bool] = {}  # by device: whether its inode numbers last

    def version(self, status: os.stat_result) -> bytes:
        if self._mtime_only:
            return b"%d-%d" % (status.st_size, status.st_mtime_ns)
        whole = _whole(status)
        return whole if self._has_steady_inodes(status.st_dev) else whole.rpartition(b"-")[0]

    def _has_steady_inodes(self, device: int) -> bool:
        if device not in self._steady:
            kind = file_system_kinds().get(f"{os.major(device)}:{os.minor(device)}", "")
            self._steady[device] = not kind.startswith(_MADE_UP)
        return self._steady[device]


def is_version(status: os.stat_result, version: bytes) -> bool:
    """Whether an open file is the *version* that was listed, as far as that says."""
    whole = _whole(status)
    return whole == version or whole.startswith(version + b"-")


def _whole(status: os.stat_result) -> bytes:
    return b"%d-%d-%d-%d" % (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
