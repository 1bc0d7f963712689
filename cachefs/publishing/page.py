"""Memory that a training process and its helper share, so that telling the other costs one store.

The pages belong to no file system, so no full /dev/shm can make a store fail. They are allocated and sealed when they
are made, so that no access can ever end in SIGBUS. They are mapped by mmap(2) itself: an object of Python's `mmap`
would keep a descriptor, and close its number when the object is collected, whatever file the job has under it by then.

Among what they share are the counts of each loader (`LoaderCounts`): what it has delivered, and how long the job's loop
has waited for it.
"""

import fcntl
import mmap
import os
import struct
import sys
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

# Upper bound of epochs, and of samples of one epoch.
MAX_COUNT: Final = (1 << 32) - 1


class LoaderCounts(NamedTuple):
    """Counts since the loader's first epoch. Times are nanoseconds; each is written in one word of the shared page.

    A loop waits from when it asks the loader's iterator for a batch until it gets the batch. It is busy with the loader
    from the beginning of an epoch to the latest batch of the epoch: what lies between two epochs counts for nothing.
    """

    # Epochs that have begun.
    epochs: int = 0
    # Samples of the current epoch: all of them (0 while unknown), and the delivered ones.
    epoch_length: int = 0
    epoch_samples: int = 0
    # Delivered samples of all epochs.
    samples: int = 0
    # Time busy in this epoch; in all epochs; and time waited in all epochs.
    epoch_busy: int = 0
    busy: int = 0
    waited: int = 0
    # Time busy and time waited in the first epoch alone.
    first_busy: int = 0
    first_waited: int = 0
    # Delivered batches of all epochs; and those whose length cannot be seen: they count as many samples as were asked
    # for, so `samples` may be too large.
    batches: int = 0
    unmeasured: int = 0


NO_COUNTS: Final = LoaderCounts()


class Stopwatch:
    """Measures the `LoaderCounts` of one loader. *now* is monotonic nanoseconds."""

    def __init__(self) -> None:
        self._epochs = self._length = self._epoch_samples = self._samples = 0
        self._epoch_busy = self._busy = self._waited = self._first_busy = self._first_waited = 0
        self._batches = self._unmeasured = 0
        self.last_length = 0  # samples of the previous epoch, where all were delivered
        self._busy_since = 0  # when the epoch began, or its latest batch came
        self._requested_at = 0  # when the pending batch was asked for; 0 without one

    @property
    def counts(self) -> LoaderCounts:
        return LoaderCounts(
            self._epochs, min(self._length, MAX_COUNT), min(self._epoch_samples, MAX_COUNT), self._samples,
            self._epoch_busy, self._busy, self._waited, self._first_busy, self._first_waited, self._batches,
            self._unmeasured,
        )  # fmt: skip

    def begin_epoch(self, now: int, length: int = 0, *, has_requested: bool = False) -> None:
        """Begin an epoch of *length* samples; 0 if unknown. has_requested: the loop has asked for its first batch
        already."""
        self._epochs += 1
        self._length, self._epoch_samples, self._epoch_busy = length, 0, 0
        if not has_requested:
            self._requested_at = 0  # the last request was answered by the end of the epoch before
        self._busy_since = self._requested_at or now

    def set_length(self, length: int) -> None:
        """Set the number of samples of the epoch, now that it is known."""
        self._length = self.last_length = length

    def assume_length(self, length: int) -> None:
        """Set the number of samples of the epoch for the time being."""
        self._length = length

    def record_request(self, now: int) -> None:
        """Record that the loop asks for a batch."""
        self._requested_at = now

    def record_batch(self, now: int, samples: int, *, is_measured: bool = True) -> None:
        """Count the batch that has come after `record_request`. is_measured: whether *samples* was measured."""
        if not self._requested_at or not self._epochs:
            return
        waited, busy = max(0, now - self._requested_at), max(0, now - self._busy_since)
        self._requested_at, self._busy_since = 0, now
        self._epoch_samples += samples
        self._samples += samples
        self._batches += 1
        self._unmeasured += not is_measured
        self._epoch_busy += busy
        self._busy += busy
        self._waited += min(waited, busy)
        if self._epochs == 1:
            self._first_busy, self._first_waited = self._busy, self._waited
        if self._length:
            self._length = max(self._length, self._epoch_samples)


# Name of a link to the page in the helper's directory, for spawned processes that did not inherit the page.
PAGE_NAME: Final = "page"
# Maximum number of consumers of one training process.
SLOTS: Final = 256
PAGE_SIZE: Final = 9 * 4096
# Upper bound of epochs and positions.
MAX_NUMBER: Final = (1 << 32) - 1
_FIRST_SLOT: Final = 1  # word
_WORDS_PER_SLOT: Final = 3  # words
_FIRST_COUNTS: Final = _FIRST_SLOT + _WORDS_PER_SLOT * SLOTS  # word
_COUNTS: Final = struct.Struct(f"={len(LoaderCounts._fields)}Q")
_LOG_OFFSET: Final = 8 * _FIRST_COUNTS + _COUNTS.size * SLOTS  # byte


class WantedSamples(IntEnum):
    """The samples of a consumer whose opened files the helper wants reported."""

    # Samples whose files are unknown to the helper.
    UNKNOWN = 0
    NONE = 1
    # Some of all samples, to compare with the published files.
    SOME = 2


class SharedPage:
    """One slot per consumer for values that change with every batch, and the helper's log lines.

    A slot is three 64-bit words, each of which is written in one store: the epoch and the position in it; a
    `WantedSamples`; 1 once the consumer's loader has ended. As many `LoaderCounts` follow the slots. They are only
    shown to people: counts that are read while they are written may have words of two moments. The helper's log text
    grows at the end of the page; the page's first word is its length in bytes.
    """

    def __init__(self, source: Path | int) -> None:
        """source: the path of the page, for reading only; or a descriptor of it, which stays open. Raises OSError."""
        if isinstance(source, int):
            self._address = _map_page(source, mmap.PROT_READ | mmap.PROT_WRITE)
        else:
            fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._address = _map_page(fd, mmap.PROT_READ)
            finally:
                os.close(fd)
        import ctypes  # slow to import, and `cachefs run` has no page

        memory = memoryview((ctypes.c_char * PAGE_SIZE).from_address(self._address)).cast("B")
        self._memory = memory if isinstance(source, int) else memory.toreadonly()
        self._words = self._memory.cast("Q")

    def close(self) -> None:
        """Unmap the page. A page that is not closed stays mapped until the process ends."""
        self._words.release()
        self._memory.release()
        _libc().munmap(self._address, PAGE_SIZE)

    @staticmethod
    def create() -> int:
        """Return a descriptor of a new page. Raises OSError."""
        fd = os.memfd_create("cachefs-page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, PAGE_SIZE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def set_position(self, slot: int, epoch: int, position: int) -> None:
        """Raises ValueError where one of the two is negative, or larger than MAX_NUMBER."""
        if not (0 <= epoch < MAX_NUMBER and 0 <= position <= MAX_NUMBER):
            raise ValueError(f"epoch {epoch}, position {position}: not between 0 and 2^32 - 2")
        self._words[_FIRST_SLOT + _WORDS_PER_SLOT * slot] = (epoch + 1) << 32 | position

    def clear_slot(self, slot: int) -> None:
        """Clear a slot for a new consumer."""
        first = _FIRST_SLOT + _WORDS_PER_SLOT * slot
        for word in range(first, first + _WORDS_PER_SLOT):
            self._words[word] = 0
        self.set_counts(slot, LoaderCounts())

    def position(self, slot: int) -> tuple[int, int] | None:
        """Return (epoch, position); None before the first `set_position`."""
        word = self._words[_FIRST_SLOT + _WORDS_PER_SLOT * slot]
        return ((word >> 32) - 1, word & MAX_NUMBER) if word else None

    def set_counts(self, slot: int, counts: LoaderCounts) -> None:
        """Raises struct.error where a number is negative, or larger than a word."""
        _COUNTS.pack_into(self._memory, 8 * _FIRST_COUNTS + _COUNTS.size * slot, *counts)

    def counts(self, slot: int) -> LoaderCounts:
        return LoaderCounts(*_COUNTS.unpack_from(self._memory, 8 * _FIRST_COUNTS + _COUNTS.size * slot))

    def set_wanted(self, slot: int, wanted: WantedSamples) -> None:
        self._words[_FIRST_SLOT + _WORDS_PER_SLOT * slot + 1] = wanted

    def wanted_samples(self, slot: int) -> WantedSamples:
        return WantedSamples(self._words[_FIRST_SLOT + _WORDS_PER_SLOT * slot + 1])

    def set_ended(self, slot: int) -> None:
        """Record that the consumer's loader has ended. One store, and so safe while Python collects garbage."""
        self._words[_FIRST_SLOT + _WORDS_PER_SLOT * slot + 2] = 1

    def has_ended(self, slot: int) -> bool:
        """Return whether the loader of the consumer in this slot has ended."""
        return bool(self._words[_FIRST_SLOT + _WORDS_PER_SLOT * slot + 2])

    def append_log(self, line: str) -> None:
        """Append a line to the helper's log text. A line that does not fit is left out."""
        text = line.replace("\n", " ").encode(errors="replace") + b"\n"
        begin = _LOG_OFFSET + self._words[0]
        if begin + len(text) <= PAGE_SIZE:
            self._memory[begin : begin + len(text)] = text
            self._words[0] += len(text)

    @property
    def log_length(self) -> int:
        """The length in bytes of the helper's log text."""
        return self._words[0]

    def log_text(self, begin: int, end: int) -> str:
        """Return bytes *begin* to *end* of the log text, decoded."""
        return bytes(self._memory[_LOG_OFFSET + begin : _LOG_OFFSET + end]).decode(errors="replace")


def _map_page(fd: int, protection: int) -> int:
    """Map the page with this descriptor, and return its address. Raises OSError."""
    if os.fstat(fd).st_size < PAGE_SIZE:
        raise OSError(f"a page has a length of {PAGE_SIZE} bytes, and this is another file, which is shorter")
    address: int | None = _libc().mmap(None, PAGE_SIZE, protection, mmap.MAP_SHARED, fd, 0)
    if address is None or address == sys.maxsize * 2 + 1:  # MAP_FAILED
        raise OSError(f"a page of {PAGE_SIZE} bytes cannot be mapped")
    return address


@cache
def _libc() -> Any:
    import ctypes  # see SharedPage

    libc = ctypes.CDLL(None)
    libc.mmap.argtypes = (*(ctypes.c_void_p, ctypes.c_size_t), *3 * (ctypes.c_int,), ctypes.c_long)
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc
