"""Fits the throughput of requests as a function of their size, to find how large requests should be.

The throughput of a request for s bytes is close to p (1 - exp(-t s)) (FasDL thesis, 2025, eq. 3-5 and 3-6): latency
dominates small ones, and none is quicker than p. Beyond a certain size, larger requests gain hardly anything.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

# Least ratio of the largest to the smallest size for a meaningful fit.
_MIN_SPREAD: Final = 2.0
# Share of the highest throughput that is enough: a request of twice that size would bring at most 9 % more.
_GOOD_SHARE: Final = 0.9
# Least seconds of a request; shorter ones were not measured.
_MIN_SECONDS: Final = 1e-6
# Range and number of the tried values of t * s, at the largest s: from a straight curve to a flat one.
_STRAIGHT: Final = 1e-3
_FLAT: Final = 1e4
_TRIED_VALUES: Final = 141


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

    known = [(size, seconds) for size, seconds in requests if size >= 1 and seconds >= _MIN_SECONDS]
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
