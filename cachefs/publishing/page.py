"""A few pages of memory that a training process and its helper share, so that telling the other costs one store.

They belong to no file system, so no full /dev/shm can make a store fail. They are allocated and sealed when they are
made, so that no access to them can ever end in SIGBUS.
"""

import fcntl
import mmap
import os
import struct
from enum import IntEnum
from pathlib import Path
from typing import Final

from cachefs.publishing.tally import Tally

# Name of a link to the page in the helper's directory, for processes that neither of the two has started.
PAGE_NAME: Final = "page"
# Consumers of one training process at most.
SLOTS: Final = 256
PAGE_SIZE: Final = 8 * 4096
# Epochs and positions are below this.
MOST: Final = (1 << 32) - 1
_FIRST_SLOT: Final = 1  # word
_FIRST_TALLY: Final = _FIRST_SLOT + 2 * SLOTS  # word
_TALLY: Final = struct.Struct(f"={len(Tally._fields)}Q")
_TEXT: Final = 8 * _FIRST_TALLY + _TALLY.size * SLOTS  # byte


class Need(IntEnum):
    """Of which samples of a consumer the helper wants to hear which files were opened."""

    # Of those whose files it has not heard of.
    UNKNOWN = 0
    NONE = 1
    # Of a part of all samples, to compare what it has published.
    SOME = 2


class Page:
    """What changes with every batch, in one slot per consumer, and what the helper has to say.

    A slot is two 64-bit words, each of which is written in one store. The first word is the epoch and the position in
    it. The second word is a Need. Behind the slots are as many tallies, which are only shown to people: one that is
    read while it is written may have words of two moments. What the helper says is text that grows at the end of the
    page; the page's first word is its length in bytes.
    """

    def __init__(self, place: Path | int) -> None:
        """place: the path of the page, to look at it only; or a descriptor of it, which stays open. Raises OSError."""
        if isinstance(place, int):
            memory = mmap.mmap(place, PAGE_SIZE)
        else:
            fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
            try:
                memory = mmap.mmap(fd, PAGE_SIZE, access=mmap.ACCESS_READ)
            except ValueError as error:  # it is another file, which is smaller
                raise OSError(str(error)) from None
            finally:
                os.close(fd)
        self._memory = memory
        self._words = memoryview(memory).cast("Q")

    @staticmethod
    def create() -> int:
        """A descriptor of a new page. Raises OSError."""
        fd = os.memfd_create("cachefs-page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, PAGE_SIZE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def set_position(self, slot: int, epoch: int, position: int) -> None:
        """Raises ValueError where one of the two is negative, or larger than MOST."""
        if not (0 <= epoch < MOST and 0 <= position <= MOST):
            raise ValueError(f"epoch {epoch}, position {position}: not between 0 and 2^32 - 2")
        self._words[_FIRST_SLOT + 2 * slot] = (epoch + 1) << 32 | position

    def clear(self, slot: int) -> None:
        """For a consumer that begins in a slot where another one was."""
        self._words[_FIRST_SLOT + 2 * slot] = self._words[_FIRST_SLOT + 2 * slot + 1] = 0
        self.set_tally(slot, Tally())

    def position(self, slot: int) -> tuple[int, int] | None:
        """(epoch, position); None where none was set yet."""
        word = self._words[_FIRST_SLOT + 2 * slot]
        return ((word >> 32) - 1, word & MOST) if word else None

    def set_tally(self, slot: int, tally: Tally) -> None:
        """Raises struct.error where a number is negative, or larger than a word."""
        _TALLY.pack_into(self._memory, 8 * _FIRST_TALLY + _TALLY.size * slot, *tally)

    def tally(self, slot: int) -> Tally:
        return Tally(*_TALLY.unpack_from(self._memory, 8 * _FIRST_TALLY + _TALLY.size * slot))

    def set_need(self, slot: int, need: Need) -> None:
        self._words[_FIRST_SLOT + 2 * slot + 1] = need

    def need(self, slot: int) -> Need:
        return Need(self._words[_FIRST_SLOT + 2 * slot + 1])

    def say(self, line: str) -> None:
        """Add a line to what the helper says. Where the page is full, it is left out."""
        text = line.replace("\n", " ").encode(errors="replace") + b"\n"
        begin = _TEXT + self._words[0]
        if begin + len(text) <= PAGE_SIZE:
            self._memory[begin : begin + len(text)] = text
            self._words[0] += len(text)

    @property
    def said(self) -> int:
        """How many bytes the helper has said by now."""
        return self._words[0]

    def text(self, begin: int, end: int) -> str:
        """These bytes of what was said."""
        return self._memory[_TEXT + begin : _TEXT + end].decode(errors="replace")
