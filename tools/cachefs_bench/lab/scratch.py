"""A temporary directory of a lab, which is removed even if the process that created it is killed.

A child waits for the end of a pipe that only its parent holds. If the directory still exists then, the child unmounts
what is below it and removes it, and a minute later removes memory tiers without users.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from cachefs.errors import CachefsError
from cachefs.mount import kernel
from cachefs.mount_table import mount_points
from cachefs_bench.lab.scratch_node import LOCK_SECONDS, remove_unused_directories

# Prefix of memory tiers' directories in /dev/shm.
MEMORY_PREFIX: Final = "cachefs-lab-"
# Processes of the lab may write for a moment after their parent has ended.
_TRIES: Final = 20
_PAUSE: Final = 0.5


@contextmanager
def scratch_directory(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Create a directory in *parent* (None: the usual place for temporary files)."""
    directory = tempfile.TemporaryDirectory(prefix=prefix, dir=parent)
    command = [sys.executable, "-m", "cachefs_bench.lab.scratch", directory.name]
    try:
        guard = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    except BaseException:
        directory.cleanup()
        raise
    assert guard.stdin is not None
    try:
        yield Path(directory.name)
    finally:
        directory.cleanup()
        guard.kill()
        guard.wait()
        guard.stdin.close()


def _clean_up(directory: Path) -> None:
    for _ in range(_TRIES):
        for point in mount_points():
            if point.path.is_relative_to(directory):
                with suppress(CachefsError, OSError):
                    kernel.unmount(point.path, lazy=True)
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            break
        time.sleep(_PAUSE)
    time.sleep(LOCK_SECONDS)
    remove_unused_directories(MEMORY_PREFIX)


if __name__ == "__main__":
    while os.read(sys.stdin.fileno(), 1):
        pass
    _clean_up(Path(sys.argv[1]))
