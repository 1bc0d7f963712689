"""Which files a process has read while it loaded a batch: from when batches began, and when files were read.

Both times are of the machine's monotonic clock. A thread that loads a batch waits while a read of its own is answered,
so such a read falls between the beginning of its batch and that of the next one. What is in the page cache is not seen,
so files of a batch may be missing.
"""

import bisect
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from cachefs.publishing.inference import Observed

# Nanoseconds after the end of a batch until its reads have been heard of: mounts tell them ten times a second, and the
# daemon is asked four times a second.
SETTLED: Final = 1_000_000_000
# And after the beginning of a batch that is told at once, until it has been heard of.
PROMPT: Final = 300_000_000
# Batches and reads that are kept of one process, at most; the oldest go first.
MOST_BATCHES: Final = 1024
MOST_READS: Final = 8192
# Batches with as many reads as samples, or a whole number of times as many, before it is believed that each sample has
# so many files.
ENOUGH: Final = 3


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that a thread has begun to load."""

    # Nanoseconds of the monotonic clock.
    began: int
    # Who loads it: the slot of a consumer. None where the thread has ended, and loads nothing from then on.
    slot: int | None
    # In the order in which they are loaded.
    samples: tuple[int, ...] = ()
    # Does the dataset load them one by one?
    one_by_one: bool = True
    # Will be told at once when the thread begins the next one?
    is_prompt: bool = False


@dataclass(frozen=True, slots=True)
class Read:
    """A file that was read, of which a mount has heard."""

    # Nanoseconds of the monotonic clock.
    when: int
    thread: int
    path: str


class Correlation:
    """The batches and the reads of one process."""

    def __init__(self) -> None:
        self._threads: dict[int, _Thread] = {}  # those that load batches, by number
        self._reads: deque[Read] = deque(maxlen=MOST_READS)
        self._evenness: dict[int, _Evenness] = {}  # by slot

    def begin(self, thread: int, batches: Iterable[Batch]) -> None:
        """The thread has begun these, in this order."""
        self._threads.setdefault(thread, _Thread()).batches.extend(batches)

    def read(self, reads: Iterable[Read]) -> None:
        """The process has read these files; in any order."""
        self._reads.extend(reads)

    def settled(self, now: int) -> list[tuple[int, Observed]]:
        """What was read, as far as it is known for which batch, each time with the slot of its consumer. now:
        nanoseconds of the monotonic clock."""
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
        """What the thread has read that was not told yet; where it has read nothing itself, what threads have that load
        no batches, if it is the only one that does. is_over: has the batch ended?"""
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
        # Those of which files were told come last: the fresh ones are likely to be of the next samples.
        begin = min(len(told), count - 1)
        told.update(fresh)
        samples = batch.samples[begin:] + batch.samples[:begin]
        return Observed(samples, fresh, is_complete=False, in_order=False) if fresh else None


class _Thread:
    """A thread that loads batches."""

    def __init__(self) -> None:
        # The last one has not ended yet.
        self.batches: deque[Batch] = deque(maxlen=MOST_BATCHES)
        self.told: set[str] = set()  # files of the first of them that were told

    @property
    def has_ended(self) -> bool:
        return len(self.batches) == 1 and self.batches[0].slot is None

    def known(self, now: int) -> Iterator[tuple[Batch, int, bool]]:
        """Batches of which it is known that they have begun, and that no other has, until a certain time; and whether
        they ended then. Those are taken out."""
        while len(self.batches) > 1 and self.batches[1].began + SETTLED < now:
            yield self.batches[0], self.batches[1].began, True
            self.batches.popleft()
            self.told.clear()
        if self.batches and self.batches[0].is_prompt:
            after = self.batches[1].began if len(self.batches) > 1 else now
            yield self.batches[0], min(after, now - PROMPT), False


class _Evenness:
    """Has each sample of a consumer as many files as any other? Where some files are not seen, as they are in the page
    cache, a batch may have as many as if it were so by chance, and not time after time."""

    def __init__(self) -> None:
        self._each = 1  # files of a sample, at least
        self._even = 0  # batches, one after the other, that have so many for each sample, or no files missing

    def holds(self, files: int, samples: int) -> bool:
        """A batch of so many samples has had so many files. Has each of them the same number? The files of a single
        sample are its own, however many."""
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
