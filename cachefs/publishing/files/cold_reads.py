"""Learns which files the processes of a job read while they load batches, for consumers whose dataset lists no files.

Libraries in C open files without Python's knowledge. This module asks the daemon for the reads of the job's processes:
mounts see every read that the page cache does not answer.

It infers which files a process has read for a batch from when batches began and when files were read. Both times are of
the machine's monotonic clock. A thread that loads a batch waits for each of its own reads, so its reads fall between
the beginning of its batch and that of the next one. Reads answered by the page cache are not seen, so files of a batch
may be missing.
"""

import bisect
import os
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from cachefs.errors import CachefsError
from cachefs.mount_table import mount_points
from cachefs.publishing import clock
from cachefs.publishing.files.inference import OpenedFiles
from cachefs.read_messages import FileRead, ReadsRequest
from cachefs.rpc import ASK_READS, DaemonClient

# Nanoseconds after the end of a batch until its reads are known: mounts report reads ten times a second, and the daemon
# is asked four times a second.
SETTLED_NS: Final = 1_000_000_000
# Nanoseconds after the beginning of a batch that is reported at once, until it is known.
PROMPT_NS: Final = 300_000_000
# Maximum number of batches and reads kept of one process; the oldest are dropped first.
MAX_BATCHES: Final = 1024
MAX_READS: Final = 8192
# Number of successive batches whose reads are a whole multiple of their samples, from which on each sample is taken to
# have this multiple of files.
MIN_EVEN_BATCHES: Final = 3
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


@dataclass(frozen=True, slots=True)
class BegunBatch:
    """A batch that a thread has begun to load."""

    # Nanoseconds of the monotonic clock.
    began: int
    # The slot of the consumer that loads it. None where the thread has ended, and loads nothing from then on.
    slot: int | None
    # In loading order.
    samples: tuple[int, ...] = ()
    # Whether the dataset loads the samples one by one.
    is_one_by_one: bool = True
    # Whether the beginning of the thread's next batch will be reported at once.
    is_prompt: bool = False


@dataclass(frozen=True, slots=True)
class TimedRead:
    """A file that was read, as reported by a mount."""

    # Nanoseconds of the monotonic clock.
    when: int
    thread: int
    path: str


class ReadCorrelation:
    """Matches the batches and the reads of one process."""

    def __init__(self) -> None:
        self._threads: dict[int, _LoadingThread] = {}  # threads that load batches, by number
        self._reads: deque[TimedRead] = deque(maxlen=MAX_READS)
        self._files_per_sample: dict[int, _FilesPerSample] = {}  # by slot

    def add_batches(self, thread: int, batches: Iterable[BegunBatch]) -> None:
        """Record that the thread has begun these batches, in this order."""
        self._threads.setdefault(thread, _LoadingThread()).batches.extend(batches)

    def add_reads(self, reads: Iterable[TimedRead]) -> None:
        """Record that the process has read these files, in any order."""
        self._reads.extend(reads)

    def take_settled(self, now: int) -> list[tuple[int, OpenedFiles]]:
        """Return the reads whose batch is known, with the slots of their consumers. now: monotonic nanoseconds."""
        reads = sorted(self._reads, key=_time_of)
        found: list[tuple[int, OpenedFiles]] = []
        for number, thread in list(self._threads.items()):
            for batch, end, is_over in thread.known_batches(now):
                observed = self._opened_files(number, batch, _reads_between(reads, batch.began, end), is_over=is_over)
                if observed is not None and batch.slot is not None:
                    found.append((batch.slot, observed))
            if thread.has_ended:
                del self._threads[number]
        oldest = min((thread.batches[0].began for thread in self._threads.values()), default=0)
        self._reads = deque((read for read in reads if read.when >= oldest), MAX_READS)
        return found

    def _opened_files(
        self, number: int, batch: BegunBatch, reads: list[TimedRead], *, is_over: bool
    ) -> OpenedFiles | None:
        """Return the thread's reads that were not returned yet. Where the thread has read nothing itself and is the
        only one that loads batches, return the reads of the other threads. is_over: whether the batch has ended."""
        own = dict.fromkeys(read.path for read in reads if read.thread == number)
        others = dict.fromkeys(read.path for read in reads if read.thread not in self._threads)
        paths = list(own or (others if len(self._threads) == 1 else {}))
        returned, count = self._threads[number].returned_files, len(batch.samples)
        if not paths or not count or batch.slot is None:
            return None
        if is_over:
            evenness = self._files_per_sample.setdefault(batch.slot, _FilesPerSample())
            if evenness.has_equal_files(len(paths), count) and batch.is_one_by_one and not others:
                return OpenedFiles(batch.samples, tuple(paths), is_complete=False)
        fresh = tuple(path for path in paths if path not in returned)
        # Samples whose files were returned come last: the fresh files are likely to be of the next samples.
        begin = min(len(returned), count - 1)
        returned.update(fresh)
        samples = batch.samples[begin:] + batch.samples[:begin]
        return OpenedFiles(samples, fresh, is_complete=False, is_in_order=False) if fresh else None


class _LoadingThread:
    """The batches of one thread, of which the last one has not ended."""

    def __init__(self) -> None:
        self.batches: deque[BegunBatch] = deque(maxlen=MAX_BATCHES)
        self.returned_files: set[str] = set()  # files of the first batch that were returned

    @property
    def has_ended(self) -> bool:
        return len(self.batches) == 1 and self.batches[0].slot is None

    def known_batches(self, now: int) -> Iterator[tuple[BegunBatch, int, bool]]:
        """Yield each batch that is known to have run alone until a certain time, that time, and whether the batch ended
        then. Removes batches that ended."""
        while len(self.batches) > 1 and self.batches[1].began + SETTLED_NS < now:
            yield self.batches[0], self.batches[1].began, True
            self.batches.popleft()
            self.returned_files.clear()
        if self.batches and self.batches[0].is_prompt:
            after = self.batches[1].began if len(self.batches) > 1 else now
            yield self.batches[0], min(after, now - PROMPT_NS), False


class _FilesPerSample:
    """Decides whether all samples of a consumer have the same number of files. Where the page cache hides some files,
    one batch may look even by chance, but not several in a row."""

    def __init__(self) -> None:
        self._files_each = 1  # files of a sample, at least
        self._even_batches = 0  # successive batches with exactly this many files for each sample

    def has_equal_files(self, files: int, samples: int) -> bool:
        """Return whether each of the *samples* of a batch with this many files has the same number of files. The files
        of a single sample are its own, however many."""
        if samples == 1:
            return True
        each = -(-files // samples)
        if each > self._files_each:
            self._files_each, self._even_batches = each, 0
        if files != samples * self._files_each:
            return False
        self._even_batches += 1
        return self._even_batches >= MIN_EVEN_BATCHES


def _time_of(read: TimedRead) -> int:
    return read.when


def _reads_between(reads: list[TimedRead], begin: int, end: int) -> list[TimedRead]:
    return reads[bisect.bisect_left(reads, begin, key=_time_of) : bisect.bisect_left(reads, end, key=_time_of)]


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
        now, flags = clock.monotonic(), (bool(message["one_by_one"]), bool(message["is_prompt"]))
        begun = [BegunBatch(int(began), slot, tuple(map(int, samples)), *flags) for began, samples in message["begun"]]
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
        for read in self._request_reads(now):
            process_of = self._processes.get(read.pid)
            path = self._paths.resolve_path(read) if process_of is not None else None
            if process_of is not None and path is not None:
                process_of.correlation.add_reads([TimedRead(read.when, read.thread, path)])
        for process in self._processes.values():
            yield from process.correlation.take_settled(received_until)

    def _request_reads(self, now: float) -> list[FileRead]:
        if now < self._retry_at:
            return []
        try:
            request = ReadsRequest(asker=self._name, namespace=self._namespace, pids=list(self._processes))
            return self._client.call(ASK_READS, request, TIMEOUT).reads
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
        parts = os.fsdecode(read.path).split("/")
        for location in self._found:
            if (path := _file_below(*location, parts, read.inode)) is not None:
                return path
        if self._unresolved >= MAX_UNRESOLVED:
            return None
        points = {str(point.path) for point in mount_points()}
        for above in range(min(MAX_LEVELS_ABOVE, len(parts))):
            for point in points:
                if (path := _file_below(point, above, parts, read.inode)) is not None:
                    self._found.append((point, above))
                    return path
        self._unresolved += 1
        return None


def _file_below(point: str, above: int, parts: list[str], inode: int) -> str | None:
    """Return the file below a mount, without the reported path's first *above* directories; None if missing."""
    path = os.path.join(point, *parts[above:])
    try:
        return path if os.lstat(path).st_ino == inode else None
    except (OSError, ValueError):
        return None
