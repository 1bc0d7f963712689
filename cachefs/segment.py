"""Verified reads of blocks from segment files, shared by the mount and the daemon.

Bytes are copied with pread, never exposed as a mapping. The verified copy cannot change when the daemon punches the
block out of the file; and a truncated file is a short read and not a SIGBUS.
"""

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cachefs.block import PIECE_SIZE, BlockLocation, pieces_match

MAX_OPEN_SEGMENTS: Final = 512
# Errors of file systems without RWF_NOWAIT (tmpfs, overlayfs, NFS, ZFS), where it is unknown whether a read would wait.
_NO_NOWAIT: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{number:08x}.seg"


class SegmentReader:
    """Verified reads from the segments of a node's tiers. Not thread-safe: each thread needs its own reader."""

    def __init__(self, directories: Mapping[int, Path], owner: int | None = None) -> None:
        """directories: tier number -> directory; owner: uid of the daemon, None for any.

        A file of another owner is not a segment: a tier's directory may lie where all users can create files, and may
        be absent for a while.
        """
        self._directories = dict(directories)
        self._owner = owner
        # (tier, segment) -> descriptor, in the order in which they were opened.
        self._files: OrderedDict[tuple[int, int], int] = OrderedDict()

    def read(
        self, key: bytes, location: BlockLocation, start: int, size: int, buffer: memoryview, *, wait: bool = True
    ) -> memoryview | None:
        """Return bytes [start, start + size) of the block *key*, as a view into *buffer*; None where they fail
        verification.

        *buffer* must hold size + 2 * PIECE_SIZE bytes, since whole pieces are read to be verified. With wait=False a
        read that would wait for the disk, or might wait, raises BlockingIOError.
        """
        first = start // PIECE_SIZE
        begin = first * PIECE_SIZE
        end = min(location.length, -(-(start + size) // PIECE_SIZE) * PIECE_SIZE)
        pieces = buffer[: end - begin]
        try:
            got = os.preadv(self._file(location), [pieces], location.offset + begin, 0 if wait else os.RWF_NOWAIT)
        except BlockingIOError:
            raise
        except KeyError:  # the whole tier is gone
            return None
        except OSError as error:
            if not wait and error.errno in _NO_NOWAIT:
                raise BlockingIOError from None
            return None  # the segment is gone
        if got < len(pieces):
            if not wait:
                # RWF_NOWAIT may return the cached part only; a waiting read tells whether the rest is cold or missing.
                raise BlockingIOError
            return None
        if not pieces_match(key, location.checksums, first, pieces):
            return None
        return pieces[start - begin : min(start + size, location.length) - begin]

    def close_unlinked(self) -> None:
        """Close segments that the daemon has deleted, so that their space becomes free."""
        for name, fd in list(self._files.items()):
            if os.fstat(fd).st_nlink == 0:
                del self._files[name]
                os.close(fd)

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _file(self, location: BlockLocation) -> int:
        name = (location.tier, location.segment)
        fd = self._files.get(name)
        if fd is None:
            fd = self._files[name] = self._open(segment_path(self._directories[location.tier], location.segment))
            if len(self._files) > MAX_OPEN_SEGMENTS:
                os.close(self._files.popitem(last=False)[1])
        return fd

    def _open(self, path: Path, flags: int = 0) -> int:
        """Open a segment file, without following a planted link or waiting for the writer of a pipe. Raises OSError."""
        fd = os.open(path, flags | os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or self._owner not in (None, found.st_uid):
            os.close(fd)
            raise PermissionError(errno.EPERM, "not a segment of the daemon", str(path))
        return fd
