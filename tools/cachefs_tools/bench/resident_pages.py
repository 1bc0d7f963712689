"""How many bytes of files are in the kernel's page cache. Needs cachestat(2), which Linux has since 6.5."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cachefs.errors import CachefsError
from cachefs.mount.resident import PAGE, resident_pages

PERIOD: Final = 1.0


def resident_bytes(paths: Sequence[Path]) -> int:
    """Bytes of these files in the page cache, in whole pages. Raises CachefsError where the kernel does not tell."""
    total = 0
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            total += resident_pages(fd, 0, os.fstat(fd).st_size) * PAGE
        except OSError as error:
            reason = f"{error.strerror}; it needs Linux 6.5 and the file's owner or root"
            raise CachefsError(f"cachestat of {path}: {reason}") from None
        finally:
            os.close(fd)
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
