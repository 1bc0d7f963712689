"""Tripwires: reads that are kept out of the kernel's page cache, so that they arrive and tell how far a consumer is.

Reads of pages that were pushed never show. Where a consumer does not say how far it is, one read out of every so many
of its order is therefore not pushed. Intervals are powers of two, so that tripwires of a longer interval are tripwires
of a shorter one too, and a change of rate leaves what is pushed already as it is.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

# Tripwires per second. A few tens are enough: with 14 to 25 a plan is as exact as with heartbeats.
PER_SECOND: Final = 25.0
# Reads from one tripwire to the next, at least and at most.
SHORTEST: Final = 8
LONGEST: Final = 1024
# Reads from one tripwire to the next while nobody knows the rate.
FIRST: Final = 32
# At least so many in a short epoch, as far as SHORTEST allows: few files are all in the page cache before long, and
# that they stay there matters more than where their reader is.
PER_EPOCH: Final = 4
# Tripwires in a row that may be missing, as their pages were there after all.
MISSING: Final = 4

# Tripwires far ahead that say together where a consumer is, and the share of those that lie there which they must be.
IN_A_ROW: Final = 4
_DENSE: Final = 0.6

# An interval is kept while the wanted one is within these parts of it: otherwise a rate near a limit would have pages
# come and go. What was left out before is looked for so many seconds more, until its pages have come.
_KEPT: Final = (0.375, 1.0)
_COMING_SECONDS: Final = 2.0

# Reads, counted from the start of an epoch.
Reads = npt.NDArray[np.int64]


def interval(rate: float) -> int:
    """Reads from one tripwire to the next, at *rate* reads per second (0: unknown), in long epochs."""
    if rate <= 0:
        return FIRST
    wanted = min(LONGEST, max(SHORTEST, rate / PER_SECOND))
    return 1 << (int(np.ceil(wanted)) - 1).bit_length()


def longest_in(epoch: int) -> int:
    """The longest interval for an epoch of so many reads (0: unknown)."""
    return max(SHORTEST, min(LONGEST, 1 << (epoch // PER_EPOCH).bit_length() >> 1)) if epoch else LONGEST


class Interval:
    """How far apart one consumer's tripwires are."""

    def __init__(self) -> None:
        self.now = FIRST  # reads from one tripwire to the next
        self.left_out = FIRST  # the same for what may not have been pushed yet, from when they were closer
        self._changed = -_COMING_SECONDS  # when, in seconds

    def follow(self, rate: float, epoch: int, time: float) -> None:
        """rate: reads per second (0: unknown); epoch: reads of the shortest epoch that is near (0: unknown); time:
        seconds, of the same clock in each call."""
        low, high = (part * self.now * PER_SECOND for part in _KEPT)
        wanted = min(self.now if low <= rate <= high else interval(rate), longest_in(epoch))
        if wanted != self.now:
            self.left_out, self.now, self._changed = min(self.left_out, self.now), wanted, time
        if wanted < self.left_out or time - self._changed > _COMING_SECONDS:
            self.left_out = wanted


def are_tripwires(reads: Reads, every: int) -> npt.NDArray[np.bool_]:
    """Which of *reads* (counted from the start of their epoch, shape (n,), int64) are tripwires, where one of *every*
    reads is: shape (n,), bool. None is where *every* is 0."""
    if not every:
        return np.zeros(len(reads), np.bool_)
    are: npt.NDArray[np.bool_] = reads & (every - 1) == every - 1
    return are


class FarOnes:
    """Tripwires that were read far ahead of a consumer. A single one proves nothing. Where nearly all tripwires of a
    stretch were read, one after another, the consumer is there: it was not seen for a while, as when the daemon was
    away."""

    def __init__(self) -> None:
        self._reads: list[int] = []  # the latest, in the order in which they were read

    def add(self, read: int, every: int, reorder_window: int) -> bool:
        """The tripwire *read* was read, later than those before. Do the last ones say together that the consumer is
        there? every: reads from one tripwire to the next; reorder_window: reads by which its loader's workers may
        differ from the order."""
        needed = IN_A_ROW + reorder_window // every
        self._reads = [*self._reads, read][-needed:]
        span = max(self._reads) - min(self._reads)
        together = len(set(self._reads)) == needed and span <= every * needed / _DENSE
        return together and (reorder_window > 0 or self._reads == sorted(self._reads))

    def clear(self) -> None:
        self._reads = []


def next_ones(reads: Reads, front: int, reach: float) -> Reads:
    """Those of the tripwires *reads* (shape (n,), int64, in ascending order) that a consumer which was at read *front*
    comes to next, one after the other: shape (up to n,), int64. None is further than *reach* ahead of the one before,
    where it would be somebody else's, or prove nothing by itself."""
    passed: list[int] = []
    for read in reads.tolist():
        if read >= front + reach:
            break
        passed.append(read)
        front = max(front, read + 1)
    return np.array(passed, np.int64)
