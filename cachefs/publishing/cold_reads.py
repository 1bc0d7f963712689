"""Which files the processes of a job read cold while they load batches, for consumers whose files nobody lists.

Libraries in C open files without Python's knowledge. The daemon is asked what processes read: mounts see that, unless
it is in the page cache.
"""

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from cachefs.errors import CachefsError
from cachefs.mount_table import mount_points
from cachefs.publishing import clock
from cachefs.publishing.correlation import Batch, Correlation, Read
from cachefs.publishing.inference import Observed
from cachefs.read_messages import FileRead, ReadsAsked
from cachefs.rpc import ASK_READS, DaemonClient

# Processes of which it is asked, at most, and seconds without a batch after which one is not asked for any more.
MOST_PROCESSES: Final = 1024
SILENT_SECONDS: Final = 120.0
# A daemon that does not answer is asked again after so many seconds; so long it has for an answer.
RETRY_SECONDS: Final = 1.0
TIMEOUT: Final = 2.0
# Directories above a mount that are looked for: a container may see a part of what a mount shows elsewhere.
MOST_ABOVE: Final = 8
# Files that are found nowhere, after which only the places are looked at where others were found.
MOST_LOST: Final = 64


@dataclass(slots=True)
class _Process:
    """A process that loads batches."""

    # When it began one last (monotonic seconds).
    heard: float
    correlation: Correlation = field(default_factory=Correlation)


class ColdReads:
    """Those of one job's processes on this node."""

    def __init__(self, client: DaemonClient, namespace: int) -> None:
        """namespace: the pid namespace of the job's processes, 0 where nobody knows it."""
        self._client = client
        self._namespace = namespace
        self._name = uuid.uuid4().hex
        self._processes: dict[int, _Process] = {}  # by number
        self._paths = _Paths()
        self._quiet_until = 0.0  # monotonic seconds

    def begin(self, slot: int, message: dict[str, Any]) -> None:
        """A process of the consumer in this slot has begun batches. Raises anything for what makes no sense."""
        now, ways = clock.monotonic(), (bool(message["one_by_one"]), bool(message["is_prompt"]))
        begun = [Batch(int(began), slot, tuple(map(int, samples)), *ways) for began, samples in message["begun"]]
        if message["ended"]:
            begun.append(Batch(int(message["ended"]), None))
        process = self._processes.get(message["pid"])
        if process is None:
            if len(self._processes) >= MOST_PROCESSES:
                return
            process = self._processes[int(message["pid"])] = _Process(now)
        process.heard = now
        process.correlation.begin(int(message["thread"]), begun)

    def observed(self, heard_until: int) -> Iterator[tuple[int, Observed]]:
        """Ask the daemon, where processes load batches. Tells the files that samples of consumers have, each with its
        consumer's slot.

        heard_until: all batches that began before were told to `begin`, in nanoseconds of the monotonic clock. On busy
        machines that is long ago, and what later batches read must not be taken for files of those before.
        """
        now = clock.monotonic()
        for number, process in list(self._processes.items()):
            if now > process.heard + SILENT_SECONDS:
                del self._processes[number]
        if not self._processes or not self._namespace:
            return
        for read in self._told(now):
            process_of = self._processes.get(read.pid)
            path = self._paths.of(read) if process_of is not None else None
            if process_of is not None and path is not None:
                process_of.correlation.read([Read(read.when, read.thread, path)])
        for process in self._processes.values():
            yield from process.correlation.settled(heard_until)

    def _told(self, now: float) -> list[FileRead]:
        if now < self._quiet_until:
            return []
        try:
            asked = ReadsAsked(asker=self._name, namespace=self._namespace, pids=list(self._processes))
            return self._client.call(ASK_READS, asked, TIMEOUT).reads
        except CachefsError:
            # Another line says so where that matters: the reporter's.
            self._quiet_until = now + RETRY_SECONDS
            return []


class _Paths:
    """Where the files that mounts tell of are for this job: below the same mount, or below a part of it that a
    container has elsewhere. That it is the same file, its inode number says."""

    def __init__(self) -> None:
        # Where files were found: a mount's path, and how many directories of the told path are above it.
        self._found: list[tuple[str, int]] = []
        self._lost = 0

    def of(self, read: FileRead) -> str | None:
        told = os.fsdecode(read.path).split("/")
        for place in self._found:
            if (path := _below(*place, told, read.inode)) is not None:
                return path
        if self._lost >= MOST_LOST:
            return None
        points = {str(point.path) for point in mount_points()}
        for above in range(min(MOST_ABOVE, len(told))):
            for point in points:
                if (path := _below(point, above, told, read.inode)) is not None:
                    self._found.append((point, above))
                    return path
        self._lost += 1
        return None


def _below(point: str, above: int, told: list[str], inode: int) -> str | None:
    """The file below a mount, without so many directories of the told path; None where it is not there."""
    path = os.path.join(point, *told[above:])
    try:
        return path if os.lstat(path).st_ino == inode else None
    except (OSError, ValueError):
        return None
