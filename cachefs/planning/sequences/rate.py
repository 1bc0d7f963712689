"""Measures the rate of a consumer, and estimates its rate without waits (the demand).

The rate can be observed. The demand cannot while the consumer waits: the readers of a waiting loader would either read
on, or rest as the accelerator wants no more, and both look alike. The rate observed while it hardly waits therefore
bounds the estimate while it waits. Reads that fill a loader no longer count once it is full: jobs of 150 reads per
second were estimated at 200 to 700 in their first four seconds, and up to 2 % more was fetched, since blocks of other
jobs were evicted for theirs. Without that bound, jobs paced at 100 reads per second by an accelerator, whose loaders
sometimes waited, were estimated at 500 to 1,000: blocks for them were fetched, and others evicted, far too early.
"""

import math
from bisect import bisect_right
from typing import Final, NamedTuple

# Seconds over which the rate is measured.
RATE_SECONDS: Final = 3.0
# Seconds over which a pace is measured: a loader reads its whole depth at once as an epoch begins, and as much less
# before.
PACE_SECONDS: Final = 10.0
# Half-life of a pace that was reached, though it may have become invisible since.
PACE_HALF_LIFE_SECONDS: Final = 5.0
# Time in which a pace may double, for a consumer that waits all the time.
GROWTH_SECONDS: Final = 30.0
# A loader is at rest after this many seconds without a read beyond the time that its accelerator takes for all it
# holds, as during a validation. Time at rest does not count.
IDLE_SECONDS: Final = 1.0
# Shorter spans give no rate.
MIN_SPAN_SECONDS: Final = 0.2
# Least part of the time that a waiting consumer counts as busy.
MIN_BUSY_SHARE: Final = 0.5
# A consumer that waits for less than this part of the time reads at its demand.
HARDLY_WAITING_SHARE: Final = 0.1


class _RateSample(NamedTuple):
    when: float  # seconds, without time at rest
    done: int  # reads until then
    waited: float  # seconds until then, of all readers together


class ReadRate:
    """The rate of one consumer."""

    def __init__(self, depth: int = 0) -> None:
        """depth: reads that its loader does at once at the start, however slow its accelerator is."""
        self.value = 0.0  # reads per second, 0 while unknown
        self.demand = 0.0  # reads per second without waits
        self._pace = 0.0  # reads per second while it hardly waits, 0 while unknown
        self._done = 0  # reads so far
        self._waited = 0.0  # seconds so far
        self._marks: list[_RateSample] = []  # of the last seconds
        self._began = math.inf  # time of the first measurement
        self._depth = depth
        self._is_full = depth == 0  # whether its loader is, or was, full
        self._seen = 0  # reads at the last measurement with new reads
        self._read = math.inf  # time of that measurement
        self._rested = 0.0  # seconds at rest so far

    def count_reads(self, reads: int) -> None:
        """Count done reads."""
        self._done += reads

    def measure(self, now: float, waited: float, readers: int) -> None:
        """Update the rates. To be called regularly. now: seconds; waited: seconds that the consumer's *readers*
        parallel readers have waited since the last call."""
        self._waited += waited
        if self._is_idle(now):
            return
        now -= self._rested
        before = self._marks[-1].when if self._marks else now
        self._began = min(self._began, now)
        if not self._is_full and self._done >= self._depth:
            self._is_full, self._marks = True, []
        self._marks.append(_RateSample(now, self._done, self._waited))
        while len(self._marks) > 2 and now - self._marks[1].when >= PACE_SECONDS:
            del self._marks[0]
        index = bisect_right(self._marks, now - RATE_SECONDS, key=lambda mark: mark.when) - 1
        since = self._marks[min(max(0, index), len(self._marks) - 2)] if len(self._marks) > 1 else self._marks[0]
        span = now - since.when
        if span < MIN_SPAN_SECONDS or self._done == since.done:
            return
        self.value = (self._done - since.done) / span
        share = self._waiting_share(since, now, readers)
        if share < HARDLY_WAITING_SHARE:
            first = self._marks[0]
            # A loader begins with a burst, or after a pause for the start of its workers.
            settled = (
                now - self._began >= 2 * PACE_SECONDS
                and self._waiting_share(first, now, readers) < HARDLY_WAITING_SHARE
            )
            pace = (self._done - first.done) / (now - first.when) if settled else self.value
            self.demand = max(pace, self._pace * 0.5 ** ((now - before) / PACE_HALF_LIFE_SECONDS))
            self._pace = self.demand if span >= RATE_SECONDS else 0.0
            return
        unhindered = self.value / max(MIN_BUSY_SHARE, 1 - share)
        if self._pace:
            self._pace *= 2.0 ** ((now - before) / GROWTH_SECONDS)
            unhindered = min(unhindered, self._pace)
        self.demand = max(self.value, unhindered)

    def _is_idle(self, now: float) -> bool:
        """Return whether its loader is full and its accelerator at rest. Time at rest is excluded once reads go on."""
        longest = self._depth / self.demand + IDLE_SECONDS if self._depth and self.demand else math.inf
        idle_seconds = max(0.0, now - self._read - longest)
        if self._done > self._seen:
            self._rested += idle_seconds
            self._seen, self._read = self._done, now
            return False
        return idle_seconds > 0

    def _waiting_share(self, since: _RateSample, now: float, readers: int) -> float:
        """Return the part of the time since *since* for which the readers have waited."""
        return (self._waited - since.waited) / max(1, readers) / (now - since.when)
