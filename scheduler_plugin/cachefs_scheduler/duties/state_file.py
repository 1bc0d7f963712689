"""The state that survives a restart: waiting and running jobs, policy changes, and last reads. The service asks the
daemons for all other state."""

import fcntl
import logging
import os
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from cachefs.errors import AlreadyExists, ConfigError
from cachefs.scheduling_messages import DatasetPolicy, PlacementRequest
from cachefs_scheduler.duties.job_table import AdmissionState, JobTable, KnownJob
from cachefs_scheduler.duties.snapshot_reads import SnapshotReads

log = logging.getLogger(__name__)

FILE_NAME: Final = "state.json"
# Increases with each change that an older service would misread or lose data from.
FORMAT: Final = 1
LOCK_NAME: Final = "lock"
# Bytes. A job takes about 300.
MAX_BYTES: Final = 256 << 20
# Records per piece: 2 ms.
_RECORDS: Final = 1000


class SavedQueueJob(msgspec.Struct, frozen=True):
    """A saved job. Times are seconds before the file was written."""

    ask: PlacementRequest
    snapshot: str
    since: float
    touched: float
    state: AdmissionState
    nodes: list[str]
    placement: int = 0


class SavedSnapshotRead(msgspec.Struct, frozen=True, array_like=True):
    """The arrival of a snapshot on a node, or its last read on any node."""

    # Empty: any node.
    node: str
    snapshot: str
    seconds: float


class SavedState(msgspec.Struct, frozen=True):
    """The whole state file."""

    # Unix seconds.
    written: float
    jobs: list[SavedQueueJob] = msgspec.field(default_factory=list)
    policies: list[DatasetPolicy] = msgspec.field(default_factory=list)
    reads: list[SavedSnapshotRead] = msgspec.field(default_factory=list)
    format: int = FORMAT


class _Head(msgspec.Struct, frozen=True):
    """The fields that are readable in a file of any format."""

    format: int = FORMAT


def state_pieces(
    written: float, jobs: JobTable, policies: Iterable[DatasetPolicy], reads: SnapshotReads, now: float
) -> Iterator[bytes]:
    """Yield `SavedState` as JSON, in pieces that each take some milliseconds, with the jobs that matter after a
    restart.

    written: Unix seconds; now: monotonic seconds. Book and reads may change between two pieces.
    """
    policies_text = msgspec.json.encode(list(policies))
    yield b'{"format":%d,"written":%s,"policies":%s,"jobs":[' % (FORMAT, msgspec.json.encode(written), policies_text)
    yield from _json_elements(
        SavedQueueJob(
            job.request,
            job.snapshot,
            now - job.requested_at,
            now - job.mentioned_at,
            job.state,
            list(job.nodes),
            job.placement,
        )
        for job in jobs
        if job.state != AdmissionState.ASKED
    )
    yield b'],"reads":['
    yield from _json_elements(SavedSnapshotRead(node, one, now - when) for node, one, when in reads.all_records())
    yield b"]}"


def _json_elements(records: Iterable[msgspec.Struct]) -> Iterator[bytes]:
    """Yield the elements of a JSON list."""
    left, comma = iter(records), b""
    while some := list(islice(left, _RECORDS)):
        yield comma + msgspec.json.encode(some)[1:-1]
        comma = b","


def restored_job(saved: SavedQueueJob, elapsed: float, now: float) -> KnownJob:
    """Restore a job as of now; its scheduler has the full timeout again to mention it. elapsed: seconds since the file
    was written."""
    return KnownJob(
        saved.ask, saved.snapshot, now - saved.since - elapsed, now, saved.state, tuple(saved.nodes),
        placement=saved.placement, admitted_at=now if saved.state == AdmissionState.ADMITTED else 0.0,
    )  # fmt: skip


def lock_directory(directory: Path) -> int | None:
    """Lock the directory for this service. Returns a descriptor that holds the lock until closed, or None if the
    directory cannot be locked, as on a read-only file system, where nothing is saved either. Raises AlreadyExists."""
    try:
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise AlreadyExists(
            f"service.state_dir = {str(directory)!r}: another cachefs-scheduler keeps its queue there; stop it, or set "
            "another service.state_dir"
        ) from None
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def write_state(directory: Path, parts: Iterable[bytes]) -> None:
    """Replace the file atomically. Blocking. Raises OSError."""
    path = directory / FILE_NAME
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def read_state(directory: Path) -> SavedState:
    """Read the state of the previous service. Returns an empty state if the file is unreadable: daemons and schedulers
    report everything again except the queue's order. Blocking. Raises ConfigError if a newer service wrote the file."""
    path = directory / FILE_NAME
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
        content = path.read_bytes()
        newer = msgspec.json.decode(content, type=_Head).format
        if newer > FORMAT:
            raise ConfigError(
                f"{path} is of a newer cachefs-scheduler (its format is {newer}, and this one knows {FORMAT}); install "
                "that version again, or set another service.state_dir"
            )
        return msgspec.json.decode(content, type=SavedState)
    except FileNotFoundError:
        return SavedState(time.time())
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s cannot be used, and is set aside: %s", path, error)
        try:
            path.replace(path.with_suffix(".bad"))
        except OSError as failure:
            log.warning("%s cannot be set aside: %s", path, failure.strerror)
        return SavedState(time.time())
