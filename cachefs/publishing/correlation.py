"""Infers which files a process has read for a batch, from when batches began and when files were read.

Both times are of the machine's monotonic clock. A thread that loads a batch waits for each of its own reads, so its
reads fall between the beginning of its batch and that of the next one. Reads answered by the page cache are not seen,
so files of a batch may be missing.
"""

import bisect
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from cachefs.publishing.inference import Observed

# Nanoseconds after the end of a batch until its reads are known: mounts report reads ten times a second, and the daemon
# is asked four times a second.
SETTLED: Final = 1_000_000_000
# Nanoseconds after the beginning of a batch that is reported at once, until it is known.
PROMPT: Final = 300_000_000
# Maximum number of batches and reads kept of one process; the oldest are dropped first.
MOST_BATCHES: Final = 1024
MOST_READS: Final = 8192
# Number of successive batches whose reads are a whole multiple of their samples, from which on each sample is taken to
# have this multiple of files.
ENOUGH: Final = 3


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that a thread has begun to load."""

    # Nanoseconds of the monotonic clock.
    began: int
    # The slot of the consumer that loads it. None where the thread has ended, and loads nothing from then on.
    slot: int | None
    # In loading order.
    samples: tuple[int, ...] = ()
    # Whether the dataset loads the samples one by one.
    one_by_one: bool = True
    # Whether the beginning of the thread's next batch will be reported at once.
    is_prompt: bool = False


@dataclass(frozen=True, slots=True)
class Read:
    """A file that was read, as reported by a mount."""

    # Nanoseconds of the monotonic clock.
    when: int
    thread: int
    path: str


class Correlation:
    """Matches the batches and the reads of one process."""

    def __init__(self) -> None:
        self._threads: dict[int, _Thread] = {}  # threads that load batches, by number
        self._reads: deque[Read] = deque(maxlen=MOST_READS)
        self._evenness: dict[int, _Evenness] = {}  # by slot

    def begin(self, thread: int, batches: Iterable[Batch]) -> None:
        """Record that the thread has begun these batches, in this order."""
        self._threads.setdefault(thread, _Thread()).batches.extend(batches)

    def read(self, reads: Iterable[Read]) -> None:
        """Record that the process has read these files, in any order."""
        self._reads.extend(reads)

    def settled(self, now: int) -> list[tuple[int, Observed]]:
        """Return the reads whose batch is known, with the slots of their consumers. now: monotonic nanoseconds."""
        reads = sorted(self._reads, key=_when)
        found: list[tuple[int, Observed]] = []
        for number, thread in list(self._threads.items()):
            for batch, end, is_over in thread.known(now):
                observed = self._observed(number, batch, _between(reads, batch.began, end), is_over=is_over)
                if observed is not None and batch.slot is not None:
                    found.append((batch.slot, observed))
            if thread.has_ended:
                del self._threads[number]
        oldest = min((thread.batches[0].began for thread in self._threads.values()), default=0)
        self._reads = deque((read for read in reads if read.when >= oldest), MOST_READS)
        return found

    def _observed(self, number: int, batch: Batch, reads: list[Read], *, is_over: bool) -> Observed | None:
        """Return the thread's reads that were not returned yet. Where the thread has read nothing itself and is the
        only one that loads batches, return the reads of the other threads. is_over: whether the batch has ended."""
        own = dict.fromkeys(read.path for read in reads if read.thread == number)
        others = dict.fromkeys(read.path for read in reads if read.thread not in self._threads)
        paths = list(own or (others if len(self._threads) == 1 else {}))
        told, count = self._threads[number].told, len(batch.samples)
        if not paths or not count or batch.slot is None:
            return None
        if is_over:
            evenness = self._evenness.setdefault(batch.slot, _Evenness())
            if evenness.holds(len(paths), count) and batch.one_by_one and not others:
                return Observed(batch.samples, tuple(paths), is_complete=False)
        fresh = tuple(path for path in paths if path not in told)
        # Samples whose files were returned come last: the fresh files are likely to be of the next samples.
        begin = min(len(told), count - 1)
        told.update(fresh)
        samples = batch.samples[begin:] + batch.samples[:begin]
        return Observed(samples, fresh, is_complete=False, in_order=False) if fresh else None


class _Thread:
    """The batches of one thread, of which the last one has not ended."""

    def __init__(self) -> None:
        self.batches: deque[Batch] = deque(maxlen=MOST_BATCHES)
        self.told: set[str] = set()  # files of the first batch that were returned

    @property
    def has_ended(self) -> bool:
        return len(self.batches) == 1 and self.batches[0].slot is None

    def known(self, now: int) -> Iterator[tuple[Batch, int, bool]]:
        """Yield each batch that is known to have run alone until a certain time, that time, and whether the batch ended
        then. Removes batches that ended."""
        while len(self.batches) > 1 and self.batches[1].began + SETTLED < now:
            yield self.batches[0], self.batches[1].began, True
            self.batches.popleft()
            self.told.clear()
        if self.batches and self.batches[0].is_prompt:
            after = self.batches[1].began if len(self.batches) > 1 else now
            yield self.batches[0], min(after, now - PROMPT), False


class _Evenness:
    """Decides whether all samples of a consumer have the same number of files. Where the page cache hides some files,
    one batch may look even by chance, but not several in a row."""

    def __init__(self) -> None:
        self._each = 1  # files of a sample, at least
        self._even = 0  # successive batches with exactly this many files for each sample

    def holds(self, files: int, samples: int) -> bool:
        """Return whether each of the *samples* of a batch with this many files has the same number of files. The files
        of a single sample are its own, however many."""
        if samples == 1:
            return True
        each = -(-files // samples)
        if each > self._each:
            self._each, self._even = each, 0
        if files != samples * self._each:
            return False
        self._even += 1
        return self._even >= ENOUGH


def _when(read: Read) -> int:
    return read.when


def _between(reads: list[Read], begin: int, end: int) -> list[Read]:
    return reads[bisect.bisect_left(reads, begin, key=_when) : bisect.bisect_left(reads, end, key=_when)]
