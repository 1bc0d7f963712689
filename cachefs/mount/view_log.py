"""What the daemon has told this mount of its node, in the order in which the mount took it up.

All workers of a mount show the same tree, and one that starts in the place of another knows every inode the kernel has
got from that one. So the views they act on are in one file without a name, which they all have open: whoever hears
something new from the daemon adds it, and all take it from there. A worker that starts needs no daemon for it.
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

# At the file's start: where the last whole record ends. Stored after the record, so that a writer may die at any time.
_END: Final = struct.Struct("<Q")
_HEADER: Final = struct.Struct("<IQ")  # length of what follows, unix time in nanoseconds


@dataclass(frozen=True, slots=True)
class Heard:
    when_ns: int
    view: NodeView


class ViewLog:
    """Make it before forking; each process then has its own place in it."""

    def __init__(self, first: NodeView) -> None:
        self._fd = os.memfd_create("cachefs-views", os.MFD_CLOEXEC)
        self._decode = decoder(NodeView)
        self._place = _END.size
        self._last = _lasting(first)
        self._append(self._place, self._last)

    def news(self) -> list[Heard]:
        """What was added since the last call, oldest first; all there is, the first time."""
        end = self._end()
        heard = []
        while self._place < end:
            length, when = _HEADER.unpack(os.pread(self._fd, _HEADER.size, self._place))
            self._last = os.pread(self._fd, length, self._place + _HEADER.size)
            self._place += _HEADER.size + length
            heard.append(Heard(when, self._decode(self._last)))
        return heard

    def add(self, view: NodeView) -> list[Heard]:
        """Add *view* unless nothing in it is new, and answer as `news` does."""
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
        """lockf and not flock: forked processes share the open file, which is what flock goes by."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)


def _lasting(view: NodeView) -> bytes:
    """Without what changes with every block."""
    return encode(msgspec.structs.replace(view, capacity=0, used=0))
