"""What the daemon has told this mount about its node, in the order in which the mount has acted on it.

All workers of a mount must show the same tree. A worker that takes the place of another must know every inode that the
kernel has got from that one. So the views that they act on are in one file without a name, which all of them have open.
A worker that the daemon tells something new adds it to the file, and all workers take it from there. A worker that
starts needs no daemon for it.

Where the file has become long, a worker adds a summary: the last view, and the slots of all that was shown. Whoever has
not read so far goes on from there, and what is before it is thrown away, but for the first view.
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

# At the start of the file: where the last whole record ends, and where the last summary begins. They are written after
# the record, so that a writer may die at any time.
_HEAD: Final = struct.Struct("<QQ")
# A log that has become longer than this since the last summary, and four times as long as that, is summed up.
_LONG: Final = 1 << 20
# FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE.
_PUNCH: Final = 3
# Seconds for which the lock is waited for. It is held for some 20 us, and who waits for it answers no requests.
LOCK_SECONDS: Final = 0.5
_libc: Final = ctypes.CDLL(None, use_errno=True)
_HEADER: Final = struct.Struct("<IQ")  # length of what follows, unix time in nanoseconds


class _Record(msgspec.Struct, frozen=True):
    """A record of the log."""

    view: NodeView
    # Of a summary, what Summary has; None for a view.
    slots: list[Slot] | None = None
    changed_ns: int = 0


@dataclass(frozen=True, slots=True)
class Heard:
    """A view of the node."""

    # When the mount heard it: unix time in nanoseconds.
    when_ns: int
    view: NodeView
    # Where views before it may be missing: what was shown so far, and when that has changed last, in nanoseconds.
    slots: list[Slot] | None = None
    changed_ns: int = 0


class ViewLog:
    """The log. It is to be made before forking; each process then has a place of its own in it."""

    def __init__(self, first: NodeView) -> None:
        self._fd = os.memfd_create("cachefs-views", os.MFD_CLOEXEC)
        self._decode = msgspec.msgpack.Decoder(_Record).decode
        self._place = _HEAD.size  # up to which this process has read, in bytes
        self._last = _lasting(first)  # the last view that this process has read or written
        self._begin = _HEAD.size  # where the last summary begins that this process knows of
        self._append(self._place, _Record(self._last))

    def news(self) -> list[Heard]:
        """What was added since the last call, oldest first; at the first call, all there is."""
        heard = []
        while self._place < self._ends()[0]:
            place, (length, when) = self._place, _HEADER.unpack(os.pread(self._fd, _HEADER.size, self._place))
            packed = os.pread(self._fd, length, place + _HEADER.size)
            self._begin = self._ends()[1]
            if _HEAD.size < place < self._begin:
                self._place = self._begin  # what was read may have been thrown away meanwhile
                continue
            record = self._decode(packed)
            self._place, self._last = place + _HEADER.size + length, record.view
            heard.append(Heard(when, record.view, record.slots, record.changed_ns))
        return heard

    def add(self, view: NodeView) -> list[Heard]:
        """Add *view*, unless nothing in it is new, or somebody has held the lock for LOCK_SECONDS: the daemon says it
        again. Returns what `news` returns then."""
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
        """Is it time to `sum_up`?"""
        end, begin = self._ends()
        (length, _) = _HEADER.unpack(os.pread(self._fd, _HEADER.size, begin))
        return bool(end - begin > max(_LONG, 4 * length))

    def sum_up(self, slots: list[Slot], changed_ns: int) -> None:
        """Throw away what is not needed any more. slots, changed_ns: see Heard, after all views that this process has
        read. Does nothing where there are news."""
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
        """Where the last whole record ends, and where the last summary begins."""
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
        """Hold the lock for writing; yields False where somebody else holds it for LOCK_SECONDS, as a worker that was
        stopped. It is a lock of lockf: one of flock belongs to the open file, which forked processes share."""
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
    """The view without what changes with every block."""
    return msgspec.structs.replace(view, capacity=0, used=0)
