"""The daemon's views of its node, as the mount has acted on them: their log, and the index and tiers of the last one.

All workers of a mount must show the same tree. A worker that replaces another must know every inode that the kernel has
got from the first one. The views are therefore in one unnamed file that all workers have open. A worker that gets a new
view from the daemon appends it, and all workers read it there. A worker can start without the daemon, and reads index
and tiers on while the daemon restarts.

When the file has become long, a worker appends a summary: the last view, and the slots of all snapshots shown so far.
Workers that are behind continue from the summary, and the file before it is punched out, except for the first view.
"""

import ctypes
import fcntl
import logging
import os
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from cachefs.block import TIER_NAMES, BlockLocation
from cachefs.errors import CachefsError
from cachefs.index import IndexReader
from cachefs.messages import NodeView
from cachefs.mount.namespace import SnapshotSlot

log = logging.getLogger(__name__)

# At the start of the file: end of the last whole record, and begin of the last summary. They are written after the
# record, so that a writer may die at any time.
_HEAD: Final = struct.Struct("<QQ")
# A log is summed up once it has grown by more than this, and by four times the last summary's length, since that
# summary.
_SUMMARY_BYTES: Final = 1 << 20
# FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE.
_PUNCH: Final = 3
# Most seconds of a wait for the lock. The lock is held for some 20 us, and a waiting worker answers no requests.
LOCK_SECONDS: Final = 0.5
_libc: Final = ctypes.CDLL(None, use_errno=True)
_HEADER: Final = struct.Struct("<IQ")  # length of the record, unix time in nanoseconds


class _MissingIndex(IndexReader):
    """Replaces an index that cannot be opened yet: finds no block, and accepts no segment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_open = False
        self.owner = -1  # no user has this number

    def get(self, key: bytes) -> BlockLocation | None:
        return None

    def blocks_of(self, content: bytes) -> Iterator[tuple[bytes, BlockLocation]]:
        return iter(())

    def close(self) -> None:
        pass


class TierView:
    """The index (location of each block) and the directories of the tiers (bytes of the blocks)."""

    def __init__(self, view: NodeView, *, needs_index: bool = True) -> None:
        """needs_index: raise CachefsError where the index cannot be read. Otherwise no block is found until
        `adopt_view` succeeds."""
        try:
            self.index = IndexReader(Path(view.index))
        except CachefsError as error:
            if needs_index:
                raise
            log.warning("%s; until then, each block is requested from the daemon", error)
            self.index = _MissingIndex(Path(view.index))
        self.directories = _tier_directories(view)  # tier number -> directory of its segments

    def adopt_view(self, view: NodeView) -> bool:
        """Adopt the view of a daemon that may have restarted. Returns whether a tier has another directory or owner.

        Raises CachefsError where a new index cannot be read. With another path than before, the old state is kept. With
        the same path, no block is found until a later call succeeds, and each is requested from the daemon.
        """
        owner = self.index.owner
        if view.index != str(self.index.path):
            fresh = IndexReader(Path(view.index))
            self.index.close()
            self.index = fresh
        elif not self.index.is_current():
            # LMDB does not open a path twice in a process.
            self.index.close()
            self.index = IndexReader(Path(view.index))
        directories = _tier_directories(view)
        moved = directories != self.directories or owner != self.index.owner
        self.directories = directories
        return moved


def _tier_directories(view: NodeView) -> Mapping[int, Path]:
    return {TIER_NAMES.index(name): Path(path) for name, path in view.tiers.items()}


class _ViewRecord(msgspec.Struct, frozen=True):
    """A record of the log: a view, or a summary."""

    view: NodeView
    # The slots of a summary; None for a view.
    slots: list[SnapshotSlot] | None = None
    changed_ns: int = 0


@dataclass(frozen=True, slots=True)
class LoggedView:
    """A view of the node."""

    # When the mount got the view: unix time in nanoseconds.
    when_ns: int
    view: NodeView
    # In a summary: all slots shown so far, and the unix time of the last change in nanoseconds. None in a plain view.
    slots: list[SnapshotSlot] | None = None
    changed_ns: int = 0


class ViewLog:
    """The log. To be created before the forks; each process then has its own position in the log."""

    def __init__(self, first: NodeView) -> None:
        self._fd = os.memfd_create("cachefs-views", os.MFD_CLOEXEC)
        self._decode = msgspec.msgpack.Decoder(_ViewRecord).decode
        self._position = _HEAD.size  # read position of this process, in bytes
        self._last_view = _without_volatile_fields(first)  # the last view that this process has read or written
        self._summary_begin = _HEAD.size  # begin of the last summary that this process knows
        self._append_record(self._position, _ViewRecord(self._last_view))

    def read_new(self) -> list[LoggedView]:
        """Return the views added since the last call, oldest first; at the first call, all."""
        views = []
        while self._position < self._read_head()[0]:
            position, (length, when) = self._position, _HEADER.unpack(os.pread(self._fd, _HEADER.size, self._position))
            packed = os.pread(self._fd, length, position + _HEADER.size)
            self._summary_begin = self._read_head()[1]
            if _HEAD.size < position < self._summary_begin:
                self._position = self._summary_begin  # the bytes just read may have been punched out meanwhile
                continue
            record = self._decode(packed)
            self._position, self._last_view = position + _HEADER.size + length, record.view
            views.append(LoggedView(when, record.view, record.slots, record.changed_ns))
        return views

    def append_view(self, view: NodeView) -> list[LoggedView]:
        """Append *view*, unless it has nothing new, or another process has held the lock for LOCK_SECONDS: the daemon
        sends the view again. Returns as `read_new`."""
        view = _without_volatile_fields(view)
        if view == self._last_view and self._position == self._read_head()[0]:
            return []
        with self._hold_lock() as is_locked:
            views = self.read_new()
            if is_locked and view != self._last_view:
                self._append_record(self._position, _ViewRecord(view))
            return views + self.read_new()

    @property
    def is_long(self) -> bool:
        """True when `append_summary` is due."""
        end, begin = self._read_head()
        (length, _) = _HEADER.unpack(os.pread(self._fd, _HEADER.size, begin))
        return bool(end - begin > max(_SUMMARY_BYTES, 4 * length))

    def append_summary(self, slots: list[SnapshotSlot], changed_ns: int) -> None:
        """Append a summary and punch out the views before it. slots, changed_ns: see LoggedView, after all views that
        this process has read. Does nothing where there are unread views."""
        with self._hold_lock() as is_locked:
            if not is_locked:
                return
            begin, (first, _) = self._position, _HEADER.unpack(os.pread(self._fd, _HEADER.size, _HEAD.size))
            if begin != self._read_head()[0]:
                return
            self._append_record(begin, _ViewRecord(self._last_view, slots, changed_ns), begin=begin)
            punch_start = _HEAD.size + _HEADER.size + first
            sizes = ctypes.c_int64(punch_start), ctypes.c_int64(begin - punch_start)
            if begin > punch_start and _libc.fallocate(self._fd, _PUNCH, *sizes):
                log.warning("the mount's log of views cannot be cut: %s", os.strerror(ctypes.get_errno()))

    def _read_head(self) -> tuple[int, int]:
        """Return the end of the last whole record, and the begin of the last summary."""
        head = os.pread(self._fd, _HEAD.size, 0)
        end, begin = _HEAD.unpack(head) if head else (_HEAD.size, _HEAD.size)
        return end, begin

    def _append_record(self, position: int, record: _ViewRecord, begin: int | None = None) -> None:
        packed = msgspec.msgpack.encode(record)
        begin = self._read_head()[1] if begin is None else begin
        os.pwrite(self._fd, _HEADER.pack(len(packed), time.time_ns()) + packed, position)
        os.pwrite(self._fd, _HEAD.pack(position + _HEADER.size + len(packed), begin), 0)

    @contextmanager
    def _hold_lock(self) -> Iterator[bool]:
        """Hold the lock for writing; yield False where another process holds it for LOCK_SECONDS, such as a stopped
        worker. Uses lockf, since a lock of flock belongs to the open file, which forked processes share."""
        deadline = time.monotonic() + LOCK_SECONDS
        while not (is_locked := self._try_lock()) and time.monotonic() < deadline:
            time.sleep(0.001)
        try:
            yield is_locked
        finally:
            if is_locked:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _try_lock(self) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True


def _without_volatile_fields(view: NodeView) -> NodeView:
    """Return the view without the fields that change with every block."""
    return msgspec.structs.replace(view, capacity=0, used=0)
