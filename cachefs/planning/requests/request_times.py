"""Measures the durations of requests by size, and decides by them which requests are late, and how large requests are.

`RecentTimes` tells where the slowest few begin, and whether all have become slower. Times are counted in classes, each
9 % longer than the one before, and counts are halved from time to time, so about the last thousand decide. Sizes are
comparable where they have the same number of binary digits.

`HedgeBudget` decides whether a late request is sent a second time (hedged): the first good answer counts (Jeffrey Dean
and Luiz André Barroso, "The Tail at Scale", Communications of the ACM 56(2), 2013). A second request helps where a few
requests are slow. Where many are, the server or this machine is slow, and more requests make that worse.

`fit_throughput` fits the throughput of requests as a function of their size. The throughput of a request for s bytes is
close to p (1 - exp(-t s)) (FasDL thesis, 2025, eq. 3-5 and 3-6): latency dominates small ones, and none is quicker than
p. Beyond a certain size, larger requests gain hardly anything.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import log2
from typing import Final

# Least ratio of the largest to the smallest size for a meaningful fit.
_MIN_SPREAD: Final = 2.0
# Share of the highest throughput that is enough: a request of twice that size would bring at most 9 % more.
_GOOD_SHARE: Final = 0.9
# Least seconds of a request; shorter ones were not measured.
_MIN_FITTED_SECONDS: Final = 1e-6
# Range and number of the tried values of t * s, at the largest s: from a straight curve to a flat one.
_STRAIGHT: Final = 1e-3
_FLAT: Final = 1e4
_TRIED_VALUES: Final = 141
# Most second requests that may be saved up. More at once would be a burst.
_MAX_SAVED: Final = 8.0
# Part of the requests under way that may be late.
_FEW_SHARE: Final = 0.25
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


@dataclass(frozen=True, slots=True)
class ThroughputCurve:
    """The fitted curve."""

    # Bytes per second of a very large request.
    p: float
    # Per byte.
    t: float

    def bytes_per_second(self, size: int) -> float:
        """Return the bytes per second of a request for *size* bytes."""
        return -self.p * math.expm1(-self.t * size)

    def good_size(self, least: int, most: int) -> int:
        """Return the bytes of a request that is nearly as quick as a larger one, within [least, most]."""
        return int(max(least, min(most, -math.log(1 - _GOOD_SHARE) / self.t)))


def fit_throughput(requests: Iterable[tuple[float, float]]) -> ThroughputCurve | None:
    """Return the curve with the least squared relative error; None where there are too few sizes.

    requests: bytes and seconds of each.
    """
    # Imported here: the process that lists a dataset fits nothing, and numpy is two thirds of its start.
    import numpy as np

    known = [(size, seconds) for size, seconds in requests if size >= 1 and seconds >= _MIN_FITTED_SECONDS]
    if not known:
        return None
    sizes, times = np.array(known).T
    if sizes.max() < _MIN_SPREAD * sizes.min():
        return None
    speeds, ts = sizes / times, np.geomspace(_STRAIGHT, _FLAT, _TRIED_VALUES) / sizes.max()
    # For a given t, the best p follows: relative errors are p * curve / speed - 1.
    relative = -np.expm1(-np.outer(ts, sizes)) / speeds
    ps = relative.sum(axis=1) / np.square(relative).sum(axis=1)
    errors = np.square(ps[:, None] * relative - 1).sum(axis=1)
    best = int(errors.argmin())
    return ThroughputCurve(float(ps[best]), float(ts[best]))


class HedgeBudget:
    """Limits second requests to a share of all requests."""

    def __init__(self, share: float) -> None:
        """share: of the requests that were sent; 0: there is never a second one."""
        self._share = share
        self._saved = 0.0

    def note_sent(self) -> None:
        """Count a first request."""
        if self._saved < _MAX_SAVED:
            self._saved += self._share

    def take_hedge(self) -> bool:
        """Return whether a second request may be sent; if so, count it."""
        if self._saved < 1:
            return False
        self._saved -= 1
        return True


def are_few_late(late: int, in_flight: int) -> bool:
    """Return whether so few of the requests under way are late that the server as a whole is not slow."""
    return late <= max(1.0, _FEW_SHARE * in_flight)


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
