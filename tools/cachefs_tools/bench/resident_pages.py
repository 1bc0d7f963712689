"""How many bytes of files are in the kernel's page cache. Needs cachestat(2), which Linux has since 6.5."""

import ctypes
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cachefs.errors import CachefsError

# The number of the system call, the same on all machines.
CACHESTAT: Final = 451
PERIOD: Final = 1.0
PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class _Range(ctypes.Structure):
    """The part of a file that is asked about. A length of 0 means up to the end of the file."""

    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    """The answer: numbers of pages."""

    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def resident_bytes(paths: Sequence[Path]) -> int:
    """Bytes of these files in the page cache, in whole pages. Raises CachefsError where the kernel does not tell."""
    libc = ctypes.CDLL(None, use_errno=True)
    whole, pages = _Range(), _Pages()
    total = 0
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            if libc.syscall(CACHESTAT, fd, ctypes.byref(whole), ctypes.byref(pages), 0):
                reason = os.strerror(ctypes.get_errno())
                raise CachefsError(f"cachestat of {path}: {reason}; it needs Linux 6.5 and the file's owner or root")
        finally:
            os.close(fd)
        total += pages.cached * PAGE
    return total


@contextmanager
def watched(paths: Sequence[Path]) -> Iterator[list[int]]:
    """Measure the resident bytes of the files when the block begins, once a second while it runs, and when it ends."""
    samples = [resident_bytes(paths)]
    over = threading.Event()

    def watch() -> None:
        due = time.monotonic()
        while not over.wait(max(0.0, due - time.monotonic())):
            samples.append(resident_bytes(paths))
            due += PERIOD

    thread = threading.Thread(target=watch, name="resident-pages")
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()
    samples.append(resident_bytes(paths))
