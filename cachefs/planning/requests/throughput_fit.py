"""How the throughput of a request grows with its size, and so how large requests should be.

The throughput of a request for s bytes is close to p (1 - exp(-t s)) (FasDL thesis, 2025, eq. 3-5 and 3-6): for small
ones latency decides, and none is quicker than p. From a size on, larger requests bring hardly more.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

# A size's throughput tells something about the curve where the largest is so many times the smallest, at least.
_SPREAD: Final = 2.0
# Share of the highest throughput that is enough: a request of twice that size would bring at most 9 % more.
_GOOD: Final = 0.9
# Seconds of a request; one that is said to be shorter was not measured.
_SHORTEST: Final = 1e-6
# Values of t * s that are tried, as to the largest s: from a curve that is straight to one that is flat, and how many.
_STRAIGHT: Final = 1e-3
_FLAT: Final = 1e4
_TRIED: Final = 141


@dataclass(frozen=True, slots=True)
class Throughput:
    """The curve."""

    # Bytes per second of a very large request.
    p: float
    # Per byte.
    t: float

    def of(self, size: int) -> float:
        """Bytes per second of a request for *size* bytes."""
        return -self.p * math.expm1(-self.t * size)

    def good_size(self, least: int, most: int) -> int:
        """Bytes of a request that is nearly as quick as a larger one, within [least, most]."""
        return int(max(least, min(most, -math.log(1 - _GOOD) / self.t)))


def fit(requests: Iterable[tuple[float, float]]) -> Throughput | None:
    """The curve with the least squared relative error. None where there are too few sizes to tell.

    requests: bytes and seconds of some.
    """
    # Imported where it is used: the process that lists a dataset fits nothing, and numpy is two thirds of its start.
    import numpy as np

    known = [(size, seconds) for size, seconds in requests if size >= 1 and seconds >= _SHORTEST]
    if not known:
        return None
    sizes, times = np.array(known).T
    if sizes.max() < _SPREAD * sizes.min():
        return None
    speeds, ts = sizes / times, np.geomspace(_STRAIGHT, _FLAT, _TRIED) / sizes.max()
    # For a given t, the best p follows: relative errors are p * curve / speed - 1.
    relative = -np.expm1(-np.outer(ts, sizes)) / speeds
    ps = relative.sum(axis=1) / np.square(relative).sum(axis=1)
    errors = np.square(ps[:, None] * relative - 1).sum(axis=1)
    best = int(errors.argmin())
    return Throughput(float(ps[best]), float(ts[best]))
