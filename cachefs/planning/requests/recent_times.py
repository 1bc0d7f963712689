"""Measures the recent durations of requests by size: where the slowest few begin, and whether all have become slower.

Times are counted in classes, each 9 % longer than the one before, and counts are halved from time to time, so about the
last thousand decide. Sizes are comparable where they have the same number of binary digits.
"""

import math
from collections.abc import Iterator
from math import log2
from typing import Final

# Requests after which the slowest few can be determined.
MIN_REQUESTS: Final = 100
# Part of comparable requests that take longer than `late_after`. With the 99th percentile, one slow request in a
# hundred would itself determine the limit.
LATE_SHARE: Final = 0.02
# All have become slower where they take this many times as long as at their best, and this many seconds longer.
_SLOWER_FACTOR: Final = 3.0
_SLOWER_SECONDS: Final = 0.1
# Least seconds after which an earlier best time is forgotten; at most twice as many.
_REMEMBERED: Final = 60.0

_PER_OCTAVE: Final = 8
_MIN_SECONDS: Final = 2.0**-14
_PER_MIN_SECONDS: Final = 1 / _MIN_SECONDS
_CLASSES: Final = 24 * _PER_OCTAVE
# Requests between two evaluations.
_EVALUATION_INTERVAL: Final = 32
# Requests after which all counts are halved.
_HALVING_INTERVAL: Final = 2048
# Weight of each new time in the smoothed one, and the most times longer that a single one counts as.
_SMOOTHING: Final = 1 / 16
_OUTLIER: Final = 4.0


class RecentTimes:
    """The durations of requests of about one size. *now* is seconds of one monotonic clock."""

    __slots__ = ("_best", "_best_since", "_counts", "_earlier_best", "_new", "_total", "late_after", "size", "typical")

    def __init__(self, size: int) -> None:
        """size: of the first one, in bytes."""
        self.size = float(size)  # smoothed
        self.typical = 0.0  # seconds, smoothed; 0 before the first
        self.late_after = math.inf  # seconds exceeded by LATE_SHARE of them; inf before there were MIN_REQUESTS
        self._counts = [0] * _CLASSES
        self._total = 0
        self._new = 0  # requests since the last evaluation
        self._best = self._earlier_best = math.inf  # lowest `typical` since `_best_since`, and in the time before
        self._best_since = -math.inf

    @property
    def is_reliable(self) -> bool:
        """True where there are enough to tell how long such requests take."""
        return self._total > 0

    def add_request(self, size: int, seconds: float, now: float) -> bool:
        """Add a request for *size* bytes. Returns whether requests were just found to have become slower."""
        index = int(_PER_OCTAVE * log2(seconds * _PER_MIN_SECONDS)) if seconds > _MIN_SECONDS else 0
        self._counts[index if index < _CLASSES else -1] += 1
        self.size += _SMOOTHING * (size - self.size)
        typical = self.typical or seconds
        if seconds < _OUTLIER * typical:
            self.typical = typical + _SMOOTHING * (seconds - typical)
        else:
            self.typical = typical * (1 + _SMOOTHING * (_OUTLIER - 1))
        self._new += 1
        return self._new >= _EVALUATION_INTERVAL and self._evaluate(now)

    def _evaluate(self, now: float) -> bool:
        self._total += self._new
        self._new = 0
        self._find_late()
        if self._total >= _HALVING_INTERVAL:
            self._counts = [count // 2 for count in self._counts]
            self._total = sum(self._counts)
        if now - self._best_since >= _REMEMBERED:
            self._earlier_best, self._best, self._best_since = self._best, math.inf, now
        self._best = min(self._best, self.typical)
        return self.typical > _SLOWER_FACTOR * min(self._best, self._earlier_best) + _SLOWER_SECONDS

    def _find_late(self) -> None:
        if self._total < MIN_REQUESTS:
            return
        left = LATE_SHARE * self._total
        for index in range(_CLASSES - 1, -1, -1):
            left -= self._counts[index]
            if left < 0:
                self.late_after = _MIN_SECONDS * 2.0 ** ((index + 1) / _PER_OCTAVE)
                return


class TimesBySize:
    """The durations of requests of all sizes."""

    def __init__(self) -> None:
        self._classes: dict[int, RecentTimes] = {}  # by the number of binary digits of the size

    def times_of(self, size: int) -> RecentTimes:
        """Return the durations of requests for about *size* bytes."""
        found = self._classes.get(size.bit_length())
        if found is None:
            found = self._classes[size.bit_length()] = RecentTimes(size)
        return found

    def typical_times(self) -> Iterator[tuple[float, float]]:
        """Return bytes and seconds of a typical request, for each size with many."""
        return ((one.size, one.typical) for one in self._classes.values() if one.is_reliable)
