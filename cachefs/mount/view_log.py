"""What the daemon has told this mount about its node, in the order in which the mount has acted on it.

All workers of a mount must show the same tree. A worker that takes the place of another must know every inode that the
kernel has got from that one. So the views that they act on are in one file without a name, which all of them have open.
A worker that the daemon tells something new adds it to the file, and all workers take it from there. A worker that
starts needs no daemon for it.
"""

import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import msgspec

from cachefs.messages import NodeView
from cachefs.rpc import decoder, encode

# At the start of the file: where the last whole record ends. It is written after the record, so that a writer may die
# at any time.
_END: Final = struct.Struct("<Q")
_HEADER: Final = struct.Struct("<IQ")  # length of what follows, unix time in nanoseconds


@dataclass(frozen=True, slots=True)
class Heard:
    """A view of the node."""

    # When the mount heard it: unix time in nanoseconds.
    when_ns: int
    view: NodeView


class ViewLog:
    """The log. It is to be made before forking; each process then has a place of its own in it."""

    def __init__(self, first: NodeView) -> None:
        self._fd = os.memfd_create("cachefs-views", os.MFD_CLOEXEC)
        self._decode = decoder(NodeView)
        self._place = _END.size  # up to which this process has read, in bytes
        self._last = _lasting(first)  # the last record that this process has read or written
        self._append(self._place, self._last)

    def news(self) -> list[Heard]:
        """What was added since the last call, oldest first; at the first call, all there is."""
        end = self._end()
        heard = []
        while self._place < end:
            length, when = _HEADER.unpack(os.pread(self._fd, _HEADER.size, self._place))
            self._last = os.pread(self._fd, length, self._place + _HEADER.size)
            self._place += _HEADER.size + length
            heard.append(Heard(when, self._decode(self._last)))
        return heard

    def add(self, view: NodeView) -> list[Heard]:
        """Add *view*, unless nothing in it is new. Returns what `news` returns then."""
        record = _lasting(view)
        if record == self._last and self._place == self._end():
            return []
        with self._locked():
            heard = self.news()
            if record != self._last:
                self._append(self._place, record)
            return heard + self.news()

    def _end(self) -> int:
        end: int = _END.unpack(os.pread(self._fd, _END.size, 0) or bytes(_END.size))[0]
        return end

    def _append(self, place: int, record: bytes) -> None:
        os.pwrite(self._fd, _HEADER.pack(len(record), time.time_ns()) + record, place)
        os.pwrite(self._fd, _END.pack(place + _HEADER.size + len(record)), 0)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock for writing. It is a lock of lockf: one of flock belongs to the open file, which forked
        processes share."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)


def _lasting(view: NodeView) -> bytes:
    """The view as a record, without what changes with every block."""
    return encode(msgspec.structs.replace(view, capacity=0, used=0))
