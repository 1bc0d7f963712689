"""Keeps processor cores busy during a benchmark, as on a training node."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from cachefs_tools.child_programs import KILL_WITH_PARENT, wait_or_kill


@contextmanager
def keep_cores_busy(count: int) -> Iterator[None]:
    """Run *count* processes that only compute, for as long as the context lasts."""
    command = [*KILL_WITH_PARENT, sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
            wait_or_kill(process)
