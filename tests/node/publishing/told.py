"""For scripts that tests run as jobs: wait until the daemon has been told something.

A helper process tells it, which starts and works beside the job, and leaves out what is over by then.
"""

import os
import time
from pathlib import Path


def was_told(kind: str, epoch: int = 0, number: int = 0) -> bool:
    """Has consumer *number* of this job sent a message of this kind about this epoch?

    The variable TOLD names the notes that tests.recording makes; without it nothing was told.
    """
    for line in Path(os.environ.get("TOLD", os.devnull)).read_text().splitlines():
        said, job, consumer, of_epoch = line.split(" ")
        if (said, job, int(of_epoch)) == (kind, os.environ["CACHEFS_JOB"], epoch) and (
            consumer.endswith(f".{number}") if number else "." not in consumer
        ):
            return True
    return False


def wait_until_told(kind: str, epoch: int = 0, number: int = 0, seconds: float = 30) -> None:
    """Wait until it was told, or so long. Without the variable TOLD there is nothing to wait for."""
    deadline = time.monotonic() + seconds
    while "TOLD" in os.environ and time.monotonic() < deadline and not was_told(kind, epoch, number):
        time.sleep(0.02)
