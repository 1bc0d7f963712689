"""For scripts that tests run as jobs: wait until the daemon has been told something.

A helper process tells it, which starts and works beside the job, and leaves out what is over by then.
"""

import os
import time
from pathlib import Path


def wait_until_told(kind: str, epoch: int = 0, number: int = 0, seconds: float = 30) -> None:
    """Wait until consumer *number* of this job has sent a message of this kind about this epoch, or so long.

    The variable TOLD names the notes that tests.recording makes; without it there is nothing to wait for.
    """
    if "TOLD" not in os.environ:
        return
    notes = Path(os.environ["TOLD"])
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for line in notes.read_text().splitlines():
            said, job, consumer, of_epoch = line.split(" ")
            if (said, job, int(of_epoch)) == (kind, os.environ["CACHEFS_JOB"], epoch) and (
                consumer.endswith(f".{number}") if number else "." not in consumer
            ):
                return
        time.sleep(0.02)
