"""What the service keeps over a restart: jobs that wait or run, what administrators said of datasets, and when copies
were read last. All else it asks the daemons for again."""

import logging
import os
import time
from pathlib import Path
from typing import Final

import msgspec

from cachefs.scheduling_messages import Ask, DatasetPolicy
from cachefs_scheduler.duties.book import Book, JobState, KnownJob

log = logging.getLogger(__name__)

NAME: Final = "state.json"
# Bytes. A job takes some 300.
MOST: Final = 256 << 20


class SavedJob(msgspec.Struct, frozen=True):
    """A job. Times are seconds before the file was written."""

    ask: Ask
    snapshot: str
    since: float
    touched: float
    state: JobState
    nodes: list[str]
    placement: int = 0


class SavedRead(msgspec.Struct, frozen=True, array_like=True):
    """When a snapshot was read last on a node."""

    node: str
    snapshot: str
    seconds: float


class Saved(msgspec.Struct, frozen=True):
    """The whole file."""

    # Unix seconds.
    written: float
    jobs: list[SavedJob] = msgspec.field(default_factory=list)
    policies: list[DatasetPolicy] = msgspec.field(default_factory=list)
    reads: list[SavedRead] = msgspec.field(default_factory=list)


def saved_jobs(book: Book, now: float) -> list[SavedJob]:
    """Those that matter after a restart; now: monotonic seconds."""
    return [
        SavedJob(one.ask, one.snapshot, now - one.since, now - one.touched, one.state, list(one.nodes), one.placement)
        for one in book
        if one.state != JobState.ASKED
    ]


def restored_job(saved: SavedJob, elapsed: float, now: float) -> KnownJob:
    """As it is now. A scheduler has the whole time again to speak of it. elapsed: seconds since it was written."""
    return KnownJob(
        saved.ask, saved.snapshot, now - saved.since - elapsed, now, saved.state, tuple(saved.nodes),
        placement=saved.placement, admitted=now if saved.state == JobState.ADMITTED else 0.0,
    )  # fmt: skip


def write(directory: Path, saved: Saved) -> None:
    """Replace the file as a whole. Blocking. Raises OSError."""
    path = directory / NAME
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(msgspec.json.encode(saved))
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def read(directory: Path) -> Saved:
    """What the service before has left; nothing, where that cannot be read: then the daemons and schedulers tell all
    that matters again, but for the order of the queue. Blocking."""
    path = directory / NAME
    try:
        if path.stat().st_size > MOST:
            raise ValueError(f"it has more than {MOST:,} bytes")
        return msgspec.json.decode(path.read_bytes(), type=Saved)
    except FileNotFoundError:
        return Saved(time.time())
    except (OSError, ValueError) as error:
        log.warning("%s cannot be used, and is set aside: %s", path, error)
        try:
            path.replace(path.with_suffix(".bad"))
        except OSError as failure:
            log.warning("%s cannot be set aside: %s", path, failure.strerror)
        return Saved(time.time())
