"""Inode numbers of a mount: `slot << 40 | entry`.

An entry is the number of a file or directory in its snapshot, and the slot follows from the snapshot's id. An inode
number is therefore the same on every node and in every process, and different for every snapshot: the kernel's caches
of an inode never become stale. Inode 1 is the root of the mount, whether of one dataset or several.

The root of each dataset in a mount has a symbolic link named IDENTITY_NAME, which is not listed. Its target is the id
of the snapshot, and its inode number has the snapshot's slot, so that a program finds both without the daemon. A mount
of an older version has the extended attribute LEGACY_ATTRIBUTE instead of the link.
"""

import errno
import functools
import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

# The root of a mount: the root of its one dataset, or a directory of several datasets.
ROOT: Final = 1
ENTRY_BITS: Final = 40
ENTRY_MASK: Final = (1 << ENTRY_BITS) - 1
# Entry number of the link to the snapshot's id, which no file has.
IDENTITY_ENTRY: Final = ENTRY_MASK
IDENTITY_NAME: Final = b".cachefs-snapshot"
LEGACY_ATTRIBUTE: Final = "user.cachefs.snapshot"
# Slots are numbered from 1 to SLOTS, so that inode numbers fit into a signed 64-bit integer.
SLOTS: Final = 1 << 22


def is_identity_link(inode: int) -> bool:
    """Return whether the inode is the link that names a snapshot."""
    return inode & ENTRY_MASK == IDENTITY_ENTRY


def read_mounted_snapshot(root: str | bytes | os.PathLike[str]) -> tuple[int, str]:
    """Return slot and id of the snapshot that a mount shows at *root*, the root of a dataset. Raises OSError."""
    path = os.path.join(os.fsencode(root), IDENTITY_NAME)
    try:
        link = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return _read_legacy_mount(os.fsencode(root))
    try:  # both of one link, even if the name refers to another one by then
        return slot_and_entry(os.fstat(link).st_ino)[0], os.readlink("", dir_fd=link)
    finally:
        os.close(link)


def _read_legacy_mount(root: bytes) -> tuple[int, str]:
    """Return the same for a mount of an older version, without the link. Raises OSError."""
    directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        snapshot = os.getxattr(directory, LEGACY_ATTRIBUTE)
        with os.scandir(directory) as entries:
            first = next(entries, None)
        if first is None:
            raise FileNotFoundError(errno.ENOENT, "the root is empty", os.fsdecode(root))
        slot, _ = slot_and_entry(os.stat(first.name, dir_fd=directory, follow_symlinks=False).st_ino)
        if os.getxattr(directory, LEGACY_ATTRIBUTE) != snapshot:
            raise OSError(errno.ESTALE, "the mount shows another snapshot now", os.fsdecode(root))
    finally:
        os.close(directory)
    _log_legacy_mount(root)
    return slot, snapshot.decode("ascii", "replace")


@functools.cache
def _log_legacy_mount(root: bytes) -> None:
    """Log once per mount that it is of an older version."""
    import logging

    logging.getLogger(__name__).info("the mount at %s is of an older version of cachefs", os.fsdecode(root))


def slot_of(snapshot_id: str) -> int:
    """Return the slot, 1 to SLOTS, of a snapshot, unless another snapshot of the mount occupies the slot.

    snapshot_id: 32 hex digits. Two snapshots hardly ever have the same slot.
    """
    return (int(snapshot_id[:8], 16) & (SLOTS - 1)) + 1


def next_slot(slot: int) -> int:
    """Return the slot to try where *slot* is taken by another snapshot."""
    return slot % SLOTS + 1


def inode_of(slot: int, entry: int) -> int:
    """Return the inode number of entry number *entry* of the snapshot in *slot*."""
    return slot << ENTRY_BITS | entry


def slot_and_entry(inode: int) -> tuple[int, int]:
    """Return slot and entry of an inode number; the reverse of `inode_of`."""
    return inode >> ENTRY_BITS, inode & ENTRY_MASK


def slots_and_entries(
    inodes: "NDArray[numpy.int64]",
) -> "tuple[NDArray[numpy.int64], NDArray[numpy.int64]]":
    """Return `slot_and_entry` of each of *inodes*, as two arrays: shape (n,), int64."""
    return inodes >> ENTRY_BITS, inodes & ENTRY_MASK
