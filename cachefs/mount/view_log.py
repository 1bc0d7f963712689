"""The log of the daemon's views of its node that this mount has acted on, in order.

All workers of a mount must show the same tree. A worker that replaces another must know every inode that the kernel has
got from the first one. The views are therefore in one unnamed file that all workers have open. A worker that gets a new
view from the daemon appends it, and all workers read it there. A worker can start without the daemon.

When the file has become long, a worker appends a summary: the last view, and the slots of all snapshots shown so far.
Workers that are behind continue from the summary, and the file before it is punched out, except for the first view.
"""

import ctypes
import fcntl
import logging
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import msgspec

from cachefs.messages import NodeView
from cachefs.mount.namespace import Slot

log = logging.getLogger(__name__)

# At the start of the file: end of the last whole record, and begin of the last summary. They are written after the
# record, so that a writer may die at any time.
_HEAD: Final = struct.Struct("<QQ")
# A log is summed up once it has grown by more than this, and by four times the last summary's length, since that
# summary.
_LONG: Final = 1 << 20
# FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE.
_PUNCH: Final = 3
# Most seconds of a wait for the lock. The lock is held for some 20 us, and a waiting worker answers no requests.
LOCK_SECONDS: Final = 0.5
_libc: Final = ctypes.CDLL(None, use_errno=True)
_HEADER: Final = struct.Struct("<IQ")  # length of the record, unix time in nanoseconds


class _Record(msgspec.Struct, frozen=True):
    """A record of the log: a view, or a summary."""

    view: NodeView
    # The slots of a summary; None for a view.
    slots: list[Slot] | None = None
    changed_ns: int = 0


@dataclass(frozen=True, slots=True)
class Heard:
    """A view of the node."""

    # When the mount got the view: unix time in nanoseconds.
    when_ns: int
    view: NodeView
    # In a summary: all slots shown so far, and the unix time of the last change in nanoseconds. None in a plain view.
    slots: list[Slot] | None = None
    changed_ns: int = 0


class ViewLog:
    """The log. To be created before the forks; each process then has its own position in the log."""

    def __init__(self, first: NodeView) -> None:
        self._fd = os.memfd_create("cachefs-views", os.MFD_CLOEXEC)
        self._decode = msgspec.msgpack.Decoder(_Record).decode
        self._place = _HEAD.size  # read position of this process, in bytes
        self._last = _lasting(first)  # the last view that this process has read or written
        self._begin = _HEAD.size  # begin of the last summary that this process knows
        self._append(self._place, _Record(self._last))

    def news(self) -> list[Heard]:
        """Return the views added since the last call, oldest first; at the first call, all."""
        heard = []
        while self._place < self._ends()[0]:
            place, (length, when) = self._place, _HEADER.unpack(os.pread(self._fd, _HEADER.size, self._place))
            packed = os.pread(self._fd, length, place + _HEADER.size)
            self._begin = self._ends()[1]
            if _HEAD.size < place < self._begin:
                self._place = self._begin  # the bytes just read may have been punched out meanwhile
                continue
            record = self._decode(packed)
            self._place, self._last = place + _HEADER.size + length, record.view
            heard.append(Heard(when, record.view, record.slots, record.changed_ns))
        return heard

    def add(self, view: NodeView) -> list[Heard]:
        """Append *view*, unless it has nothing new, or another process has held the lock for LOCK_SECONDS: the daemon
        sends the view again. Returns as `news`."""
        view = _lasting(view)
        if view == self._last and self._place == self._ends()[0]:
            return []
        with self._locked() as is_locked:
            heard = self.news()
            if is_locked and view != self._last:
                self._append(self._place, _Record(view))
            return heard + self.news()

    @property
    def is_long(self) -> bool:
        """True when `sum_up` is due."""
        end, begin = self._ends()
        (length, _) = _HEADER.unpack(os.pread(self._fd, _HEADER.size, begin))
        return bool(end - begin > max(_LONG, 4 * length))

    def sum_up(self, slots: list[Slot], changed_ns: int) -> None:
        """Append a summary and punch out the views before it. slots, changed_ns: see Heard, after all views that this
        process has read. Does nothing where there are unread views."""
        with self._locked() as is_locked:
            if not is_locked:
                return
            begin, (first, _) = self._place, _HEADER.unpack(os.pread(self._fd, _HEADER.size, _HEAD.size))
            if begin != self._ends()[0]:
                return
            self._append(begin, _Record(self._last, slots, changed_ns), begin=begin)
            rest = _HEAD.size + _HEADER.size + first
            sizes = ctypes.c_int64(rest), ctypes.c_int64(begin - rest)
            if begin > rest and _libc.fallocate(self._fd, _PUNCH, *sizes):
                log.warning("the mount's log of views cannot be cut: %s", os.strerror(ctypes.get_errno()))

    def _ends(self) -> tuple[int, int]:
        """Return the end of the last whole record, and the begin of the last summary."""
        head = os.pread(self._fd, _HEAD.size, 0)
        end, begin = _HEAD.unpack(head) if head else (_HEAD.size, _HEAD.size)
        return end, begin

    def _append(self, place: int, record: _Record, begin: int | None = None) -> None:
        packed = msgspec.msgpack.encode(record)
        begin = self._ends()[1] if begin is None else begin
        os.pwrite(self._fd, _HEADER.pack(len(packed), time.time_ns()) + packed, place)
        os.pwrite(self._fd, _HEAD.pack(place + _HEADER.size + len(packed), begin), 0)

    @contextmanager
    def _locked(self) -> Iterator[bool]:
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


def _lasting(view: NodeView) -> NodeView:
    """Return the view without the fields that change with every block."""
    return msgspec.structs.replace(view, capacity=0, used=0)
