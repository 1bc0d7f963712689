"""How fast a consumer reads, and how fast it would if it never waited.

The first can be seen. The second cannot while it waits: the readers of a loader that waits would either read on or
rest, as their accelerator wants no more, and both look alike. So what a consumer is known to read while it hardly waits
bounds what it is taken to want while it waits. What a loader reads until it is full counts no longer when it is: jobs
of 150 reads per second were taken to read 200 to 700 in their first four seconds, and up to 2 % more was fetched, since
blocks of other jobs were evicted for theirs. Without that bound, jobs that an accelerator paced at 100 reads per
second and whose loaders sometimes waited were taken to read 500 to 1,000: blocks for them were fetched, and others
evicted, far too early.
"""

import math
from bisect import bisect_right
from typing import Final, NamedTuple

# The rate is that of so many seconds.
RATE_SECONDS: Final = 3.0
# A pace is that of so many seconds: a loader reads its whole depth at once as an epoch begins, and as much less before.
PACE_SECONDS: Final = 10.0
# A pace that was reached is taken for possible for this long, though it may have become invisible since.
RATE_HALF_LIFE: Final = 5.0
# A pace that was reached may double in this time, for who waits for all of it.
GROWTH_SECONDS: Final = 30.0
# A loader that reads nothing for so many seconds longer than its accelerator takes for all that it holds is at rest, as
# while a model is validated. Such time does not count.
REST_SECONDS: Final = 1.0
# Over less than this many seconds a rate says nothing.
SHORTEST_SPAN: Final = 0.2
# Who waits nearly always is taken to be busy for this part of the time.
LEAST_BUSY: Final = 0.5
# Who waits for less than this part of the time reads as fast as it wants.
HARDLY: Final = 0.1


class _Mark(NamedTuple):
    when: float  # seconds, without those at rest
    done: int  # reads until then
    waited: float  # seconds until then, of all readers together


class ReadRate:
    """The rate of one consumer."""

    def __init__(self, depth: int = 0) -> None:
        """depth: reads that its loader does at once as it begins, however slow its accelerator is."""
        self.value = 0.0  # reads per second, 0 until it is known
        self.demand = 0.0  # the same had it not waited
        self._pace = 0.0  # reads per second while it hardly waits, 0 until it has not waited for a while
        self._done = 0  # reads so far
        self._waited = 0.0  # seconds so far
        self._marks: list[_Mark] = []  # of the last seconds
        self._began = math.inf  # when it was first measured
        self._depth = depth
        self._is_full = depth == 0  # its loader is, or was
        self._seen = 0  # reads until it was last seen to read
        self._read = math.inf  # when that was
        self._rested = 0.0  # seconds so far

    def count(self, reads: int) -> None:
        """So many more reads are done."""
        self._done += reads

    def measure(self, now: float, waited: float, readers: int) -> None:
        """To be called every now and then. now: seconds; waited: seconds that the consumer's *readers* parallel readers
        have waited since the last call."""
        self._waited += waited
        if self._rests(now):
            return
        now -= self._rested
        before = self._marks[-1].when if self._marks else now
        self._began = min(self._began, now)
        if not self._is_full and self._done >= self._depth:
            self._is_full, self._marks = True, []
        self._marks.append(_Mark(now, self._done, self._waited))
        while len(self._marks) > 2 and now - self._marks[1].when >= PACE_SECONDS:
            del self._marks[0]
        place = bisect_right(self._marks, now - RATE_SECONDS, key=lambda mark: mark.when) - 1
        since = self._marks[min(max(0, place), len(self._marks) - 2)] if len(self._marks) > 1 else self._marks[0]
        span = now - since.when
        if span < SHORTEST_SPAN or self._done == since.done:
            return
        self.value = (self._done - since.done) / span
        share = self._waiting(since, now, readers)
        if share < HARDLY:
            first = self._marks[0]
            # A loader begins with a burst, or after a pause in which its workers start.
            settled = now - self._began >= 2 * PACE_SECONDS and self._waiting(first, now, readers) < HARDLY
            pace = (self._done - first.done) / (now - first.when) if settled else self.value
            self.demand = max(pace, self._pace * 0.5 ** ((now - before) / RATE_HALF_LIFE))
            self._pace = self.demand if span >= RATE_SECONDS else 0.0
            return
        unhindered = self.value / max(LEAST_BUSY, 1 - share)
        if self._pace:
            self._pace *= 2.0 ** ((now - before) / GROWTH_SECONDS)
            unhindered = min(unhindered, self._pace)
        self.demand = max(self.value, unhindered)

    def _rests(self, now: float) -> bool:
        """Is its loader full, and its accelerator at rest? Where it has just gone on, the rest does not count."""
        longest = self._depth / self.demand + REST_SECONDS if self._depth and self.demand else math.inf
        rest = max(0.0, now - self._read - longest)
        if self._done > self._seen:
            self._rested += rest
            self._seen, self._read = self._done, now
            return False
        return rest > 0

    def _waiting(self, since: _Mark, now: float, readers: int) -> float:
        """The part of the time since then for which the readers have waited."""
        return (self._waited - since.waited) / max(1, readers) / (now - since.when)
