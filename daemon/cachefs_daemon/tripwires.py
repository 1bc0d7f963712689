"""Tripwires: reads that are kept out of the kernel's page cache, so that they arrive and tell how far a consumer is.

Reads of pages that were pushed never show. Of a consumer that does not say where it is, every so many reads of its
order are therefore not pushed. Intervals are powers of two, so that those of a longer one are tripwires of a shorter
one too, and a change of rate leaves what is pushed already as it is.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

# A few tens a second are enough: 14 to 25 by which a plan is as exact as one of heartbeats.
PER_SECOND: Final = 25.0
SHORTEST: Final = 8
LONGEST: Final = 1024
# While nobody knows the rate.
FIRST: Final = 32
# Tripwires in a row that may be missing, as their pages were there after all.
MISSING: Final = 4

Reads = npt.NDArray[np.int64]


def interval(rate: float) -> int:
    """Reads from one tripwire to the next, at *rate* reads per second (0: unknown)."""
    if rate <= 0:
        return FIRST
    wanted = min(LONGEST, max(SHORTEST, rate / PER_SECOND))
    return 1 << (int(np.ceil(wanted)) - 1).bit_length()


def are_tripwires(reads: Reads, every: int) -> npt.NDArray[np.bool_]:
    """Which of these reads, counted from the start of their epoch; none where *every* is 0."""
    if not every:
        return np.zeros(len(reads), np.bool_)
    are: npt.NDArray[np.bool_] = reads & (every - 1) == every - 1
    return are


def next_ones(reads: Reads, front: int, reach: float) -> Reads:
    """Those tripwires among *reads* (sorted) that a consumer which was at *front* comes to next, one after the other,
    none further than *reach* ahead: that would be somebody else's, or prove nothing by itself."""
    passed: list[int] = []
    for read in reads.tolist():
        if read >= front + reach:
            break
        passed.append(read)
        front = max(front, read + 1)
    return np.array(passed, np.int64)
