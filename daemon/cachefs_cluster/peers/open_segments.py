"""Open segment files, shared by the threads of a peer server."""

import contextlib
import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cachefs.block import BlockLocation
from cachefs.segment import segment_path

MAX_OPEN: Final = 512


class SegmentDescriptor:
    """An open file, closed once no thread refers to it: one may send from it while another drops it from the table."""

    __slots__ = ("descriptor",)

    def __init__(self, path: Path, owner: int) -> None:
        """Open a segment without following a planted link or blocking on a pipe. owner: uid of the daemon. Raises
        OSError."""
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(self.descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != owner:
            raise PermissionError(errno.EPERM, "not a segment of the daemon", str(path))

    def __del__(self) -> None:
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self.descriptor)


class SegmentDescriptors:
    """A table of at most MAX_OPEN open segments. Thread-safe."""

    def __init__(self, directories: Mapping[int, Path], owner: int) -> None:
        self._directories = dict(directories)
        self._owner = owner
        self._lock = threading.Lock()
        # by tier and segment number, oldest first
        self._open: OrderedDict[tuple[int, int], SegmentDescriptor] = OrderedDict()

    def open_segment(self, location: BlockLocation) -> SegmentDescriptor | None:
        """Return the file that holds the block; None if it is gone."""
        name = (location.tier, location.segment)
        found = self._open.get(name)
        if found is not None:
            return found
        directory = self._directories.get(location.tier)
        if directory is None:
            return None
        try:
            opened = SegmentDescriptor(segment_path(directory, location.segment), self._owner)
        except OSError:
            return None
        with self._lock:
            self._open[name] = opened
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        return opened

    def forget_unlinked(self) -> None:
        """Close files that the daemon has deleted, so that their space becomes free."""
        with self._lock:
            for name, one in list(self._open.items()):
                if os.fstat(one.descriptor).st_nlink == 0:
                    del self._open[name]
