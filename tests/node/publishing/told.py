"""For scripts that tests run as jobs: wait until the daemon has been told something.

A helper process tells it, which starts and works beside the job, and leaves out what is over by then.
"""

import os
import time

# What this job has told so far: (kind, epoch, consumer's number or ""), and where the notes go on.
_told: set[tuple[str, int, str]] = set()
_position = 0


def was_told(kind: str, epoch: int = 0, number: int = 0) -> bool:
    """Has consumer *number* of this job sent a message of this kind about this epoch?

    The variable TOLD names the notes that tests.recording makes; without it nothing was told.
    """
    global _position
    with open(os.environ.get("TOLD", os.devnull)) as notes:
        notes.seek(_position)
        while (line := notes.readline()).endswith("\n"):
            said, job, consumer, of_epoch = line.split(" ")
            if job == os.environ["CACHEFS_JOB"]:
                _told.add((said, int(of_epoch), consumer.partition(".")[2]))
            _position = notes.tell()
    return (kind, epoch, str(number or "")) in _told


def wait_until_told(kind: str, epoch: int = 0, number: int = 0, seconds: float = 30) -> None:
    """Wait until it was told, or so long. Without the variable TOLD there is nothing to wait for."""
    deadline = time.monotonic() + seconds
    while "TOLD" in os.environ and time.monotonic() < deadline and not was_told(kind, epoch, number):
        time.sleep(0.02)
