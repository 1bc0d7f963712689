"""Who counts pages of the kernel's page cache, and who empties the whole of it, must not do so at the same time.

Test files run side by side, and dropping the caches of the machine takes away pages that others are about to count.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# One for all processes of all runs of a user: nobody may open what another user has made in a sticky directory.
_LOCK = Path(tempfile.gettempdir()) / f"cachefs-tests-page-cache-{os.getuid()}.lock"
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@contextmanager
def steady_page_cache() -> Iterator[None]:
    """Nobody empties the page cache meanwhile."""
    lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield
    finally:
        os.close(lock)


def try_to_empty_page_cache() -> bool:
    """Drop all clean pages, names and inodes that the kernel has cached; False where somebody counts on them now."""
    lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        _DROP_CACHES.write_text("3")
        return True
    finally:
        os.close(lock)
