"""Measures the bytes of files in the kernel's page cache, over time."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cachefs_tools.kernel_pages import resident_bytes as resident_bytes

PERIOD_SECONDS: Final = 1.0


@contextmanager
def watch_pages(paths: Sequence[Path]) -> Iterator[list[int]]:
    """Measure the resident bytes of the files when the block begins, once a second while it runs, and when it ends."""
    samples = [resident_bytes(paths)]
    over = threading.Event()

    def watch() -> None:
        due = time.monotonic()
        while not over.wait(max(0.0, due - time.monotonic())):
            samples.append(resident_bytes(paths))
            due += PERIOD_SECONDS

    thread = threading.Thread(target=watch, name="resident-pages")
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()
    samples.append(resident_bytes(paths))
