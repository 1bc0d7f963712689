"""Learns which files the processes of a job read while they load batches, for consumers whose dataset lists no files.

Libraries in C open files without Python's knowledge. This module asks the daemon for the reads of the job's processes:
mounts see every read that the page cache does not answer.
"""

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from cachefs.errors import CachefsError
from cachefs.mount_table import mount_points
from cachefs.publishing import clock
from cachefs.publishing.files.correlated import BegunBatch, ReadCorrelation, TimedRead
from cachefs.publishing.files.inference import OpenedFiles
from cachefs.read_messages import FileRead, ReadsRequest
from cachefs.rpc import ASK_READS, DaemonClient

# Maximum number of processes asked about, and seconds without a batch after which a process is dropped.
MAX_PROCESSES: Final = 1024
SILENT_SECONDS: Final = 120.0
# Pause in seconds before a daemon that did not answer is asked again, and timeout of a call.
RETRY_SECONDS: Final = 1.0
TIMEOUT: Final = 2.0
# Directories above a mount that are searched: a container may mount a part of a dataset elsewhere.
MAX_LEVELS_ABOVE: Final = 8
# Number of files that were not found, after which only places where others were found are searched.
MAX_UNRESOLVED: Final = 64


@dataclass(slots=True)
class _LoadingProcess:
    """A process that loads batches."""

    # When the process last began a batch (monotonic seconds).
    last_batch_at: float
    correlation: ReadCorrelation = field(default_factory=ReadCorrelation)


class JobColdReads:
    """The files that one job's processes on this node read cold."""

    def __init__(self, client: DaemonClient, namespace: int) -> None:
        """namespace: the pid namespace of the job's processes; 0 where it is unknown."""
        self._client = client
        self._namespace = namespace
        self._name = uuid.uuid4().hex
        self._processes: dict[int, _LoadingProcess] = {}  # by number
        self._paths = _PathResolver()
        self._retry_at = 0.0  # monotonic seconds

    def record_batches(self, slot: int, message: dict[str, Any]) -> None:
        """Record that a process of the consumer in this slot has begun batches. Raises anything for an invalid
        message."""
        now, ways = clock.monotonic(), (bool(message["one_by_one"]), bool(message["is_prompt"]))
        begun = [BegunBatch(int(began), slot, tuple(map(int, samples)), *ways) for began, samples in message["begun"]]
        if message["ended"]:
            begun.append(BegunBatch(int(message["ended"]), None))
        process = self._processes.get(message["pid"])
        if process is None:
            if len(self._processes) >= MAX_PROCESSES:
                return
            process = self._processes[int(message["pid"])] = _LoadingProcess(now)
        process.last_batch_at = now
        process.correlation.add_batches(int(message["thread"]), begun)

    def take_opened(self, received_until: int) -> Iterator[tuple[int, OpenedFiles]]:
        """Ask the daemon, where processes load batches, and yield the files of samples, each with its consumer's slot.

        received_until: all batches that began before this time were passed to `record_batches`, in nanoseconds of the
        monotonic clock. On busy machines this time is long ago, and reads of later batches must not be taken for files
        of earlier ones.
        """
        now = clock.monotonic()
        for number, process in list(self._processes.items()):
            if now > process.last_batch_at + SILENT_SECONDS:
                del self._processes[number]
        if not self._processes or not self._namespace:
            return
        for read in self._ask_reads(now):
            process_of = self._processes.get(read.pid)
            path = self._paths.resolve_path(read) if process_of is not None else None
            if process_of is not None and path is not None:
                process_of.correlation.add_reads([TimedRead(read.when, read.thread, path)])
        for process in self._processes.values():
            yield from process.correlation.take_settled(received_until)

    def _ask_reads(self, now: float) -> list[FileRead]:
        if now < self._retry_at:
            return []
        try:
            asked = ReadsRequest(asker=self._name, namespace=self._namespace, pids=list(self._processes))
            return self._client.call(ASK_READS, asked, TIMEOUT).reads
        except CachefsError:
            # The reporter logs the failure, where it matters.
            self._retry_at = now + RETRY_SECONDS
            return []


class _PathResolver:
    """Resolves paths that mounts report to paths in this job: below the same mount, or below a part of it that a
    container has elsewhere. The inode number confirms that it is the same file."""

    def __init__(self) -> None:
        # Places where files were found: a mount's path, and how many leading directories of the reported path precede
        # it.
        self._found: list[tuple[str, int]] = []
        self._unresolved = 0

    def resolve_path(self, read: FileRead) -> str | None:
        told = os.fsdecode(read.path).split("/")
        for place in self._found:
            if (path := _file_below(*place, told, read.inode)) is not None:
                return path
        if self._unresolved >= MAX_UNRESOLVED:
            return None
        points = {str(point.path) for point in mount_points()}
        for above in range(min(MAX_LEVELS_ABOVE, len(told))):
            for point in points:
                if (path := _file_below(point, above, told, read.inode)) is not None:
                    self._found.append((point, above))
                    return path
        self._unresolved += 1
        return None


def _file_below(point: str, above: int, told: list[str], inode: int) -> str | None:
    """Return the file below a mount, without the reported path's first *above* directories; None if missing."""
    path = os.path.join(point, *told[above:])
    try:
        return path if os.lstat(path).st_ino == inode else None
    except (OSError, ValueError):
        return None
