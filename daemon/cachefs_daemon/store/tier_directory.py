"""The directory of a tier: opened once, locked for this daemon, and the same one as long as the daemon runs.

Every file in it is reached through its descriptor, so that whatever happens to the path, no file of another directory
is read, written or punched.
"""

import contextlib
import errno
import fcntl
import os
import stat
import threading
from dataclasses import dataclass
from typing import Final

from cachefs.errors import Busy
from cachefs_daemon.store import capacity, segment_writer
from cachefs_daemon.store.owned_directory import ConfiguredDirectory, open_owned
from cachefs_daemon.store.segment_writer import PAGE, SegmentFile

_PROBE: Final = ".probe"
# As sparse as a segment: file systems may give a file that grows, or that could be in huge pages, more than it needs.
_PROBE_SIZE: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class SegmentListing:
    """The segments in the directory."""

    segments: list[int]  # numbers of the files with a segment's name, oldest first
    next: int  # the number that follows all of them


class TierDirectory:
    """Holds the tier's directory open and locked. Thread-safe."""

    def __init__(self, setting: ConfiguredDirectory) -> None:
        """Raises ConfigError, Busy."""
        self.setting = setting
        self.path = setting.path
        # The number stays the same when the directory is created again.
        self.descriptor = open_owned(setting)
        try:
            self._lock(self.descriptor)
        except Busy:
            os.close(self.descriptor)
            raise
        self._remaking = threading.Lock()
        self._device = os.fstat(self.descriptor).st_dev
        # Whether each record must be an extent of its own for its space to come back.
        self.extent_per_record = capacity.file_system(self.descriptor) == capacity.BTRFS

    def segment(self, number: int) -> SegmentFile:
        return SegmentFile(self.path, self.descriptor, number)

    def list_segments(self) -> SegmentListing:
        """Raises OSError."""
        with os.scandir(self.descriptor) as entries:
            named = ((segment_writer.segment_number(entry.name), entry) for entry in entries)
            found = sorted(
                number for number, entry in named if number is not None and entry.is_file(follow_symlinks=False)
            )
        return SegmentListing(found, found[-1] + 1 if found else 0)

    def disk_bytes(self, number: int) -> int:
        """Return the bytes on disk of a segment's file; 0 where they are unknown."""
        try:
            return os.stat(self.segment(number).name, dir_fd=self.descriptor, follow_symlinks=False).st_blocks * 512
        except OSError:
            return 0

    def check(self) -> None:
        """Raise OSError where the path no longer leads to this directory, which mounts need too."""
        there, ours = os.stat(self.path), os.fstat(self.descriptor)
        if there.st_dev != ours.st_dev:
            raise OSError(errno.ENODEV, "it is on another file system than at start; mount the right one or restart")
        if there.st_ino != ours.st_ino:
            raise OSError(errno.ESTALE, "another directory has been put in its place; put it back or restart")

    def probe(self) -> int:
        """Write two pages and free one. Return the bytes that are taken then. Raises OSError."""
        self.check()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_PROBE, dir_fd=self.descriptor)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        probe = os.open(_PROBE, flags, stat.S_IRUSR | stat.S_IWUSR, dir_fd=self.descriptor)
        try:
            os.ftruncate(probe, _PROBE_SIZE)
            os.pwrite(probe, os.urandom(2 * PAGE), 0)
            segment_writer.free_range(probe, 0, PAGE)
            return os.fstat(probe).st_blocks * 512
        finally:
            os.close(probe)
            os.unlink(_PROBE, dir_fd=self.descriptor)

    def recreate(self) -> None:
        """Create the directory again if another program has removed it, but not on the disk below one that is not
        mounted just now. Raises OSError, ConfigError or Busy where it then does not exist, or is not the same."""
        with self._remaking:
            with contextlib.suppress(FileNotFoundError):
                self.check()
                return
            if self.path.parent.stat().st_dev != self._device:
                raise OSError(errno.ENODEV, "its disk is not mounted")
            fresh = open_owned(self.setting)
            try:
                self._lock(fresh)
                os.dup2(fresh, self.descriptor, inheritable=False)
            finally:
                os.close(fresh)

    def close(self) -> None:
        """Release the directory for another daemon."""
        os.close(self.descriptor)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(
                f"{self.setting.setting} {self.path} belongs to another running daemon; choose another"
            ) from None
