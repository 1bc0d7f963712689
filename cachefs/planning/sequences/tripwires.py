"""Tripwires: reads that are kept out of the kernel's page cache, so that they are observed and reveal a consumer's
position.

Reads of pushed pages are never observed. Where a consumer does not report its position, one read out of every so many
of its order is therefore not pushed. Intervals are powers of two, so that tripwires of a longer interval are tripwires
of a shorter one too, and a change of rate does not affect pages that were pushed already.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

# Tripwires per second. A few tens are enough: with 14 to 25 a plan is as exact as with heartbeats.
TRIPWIRES_PER_SECOND: Final = 25.0
# Bounds of the reads from one tripwire to the next.
MIN_INTERVAL: Final = 8
MAX_INTERVAL: Final = 1024
# Reads from one tripwire to the next while the rate is unknown.
UNKNOWN_RATE_INTERVAL: Final = 32
# Least tripwires in a short epoch, as far as MIN_INTERVAL allows: few files are soon all in the page cache, and keeping
# them there matters more than the position of their reader.
MIN_TRIPWIRES_PER_EPOCH: Final = 4
# Most consecutive tripwires that may be missing, as their pages were cached after all.
MAX_MISSING: Final = 4

# Tripwires far ahead that together reveal a consumer's position, and the least share that they must be of those there.
FAR_TRIPWIRES: Final = 4
_MIN_DENSITY: Final = 0.6

# An interval is kept while the wanted one is within these parts of it; otherwise pages would come and go at a rate near
# a limit. Reads left out before are still expected for _COMING_SECONDS, until their pages are pushed.
_KEPT_RANGE: Final = (0.375, 1.0)
_COMING_SECONDS: Final = 2.0

# Reads, counted from the start of an epoch.
EpochReadNumbers = npt.NDArray[np.int64]


def interval_for_rate(rate: float) -> int:
    """Return the reads from one tripwire to the next, at *rate* reads per second (0: unknown), in long epochs."""
    if rate <= 0:
        return UNKNOWN_RATE_INTERVAL
    wanted = min(MAX_INTERVAL, max(MIN_INTERVAL, rate / TRIPWIRES_PER_SECOND))
    return 1 << (int(np.ceil(wanted)) - 1).bit_length()


def max_interval_in(epoch: int) -> int:
    """Return the longest interval for an epoch of *epoch* reads (0: unknown)."""
    return (
        max(MIN_INTERVAL, min(MAX_INTERVAL, 1 << (epoch // MIN_TRIPWIRES_PER_EPOCH).bit_length() >> 1))
        if epoch
        else MAX_INTERVAL
    )


class TripwireInterval:
    """The distance of one consumer's tripwires."""

    def __init__(self) -> None:
        self.current = UNKNOWN_RATE_INTERVAL  # reads from one tripwire to the next
        self.left_out = (
            UNKNOWN_RATE_INTERVAL  # a closer distance from before, for reads that may not have been pushed yet
        )
        self._changed = -_COMING_SECONDS  # time of the last change, in seconds

    def update(self, rate: float, epoch: int, time: float) -> None:
        """Adapt the distance. rate: reads per second (0: unknown); epoch: reads of the shortest epoch nearby (0:
        unknown); time: seconds, of the same clock in each call."""
        low, high = (part * self.current * TRIPWIRES_PER_SECOND for part in _KEPT_RANGE)
        wanted = min(self.current if low <= rate <= high else interval_for_rate(rate), max_interval_in(epoch))
        if wanted != self.current:
            self.left_out, self.current, self._changed = min(self.left_out, self.current), wanted, time
        if wanted < self.left_out or time - self._changed > _COMING_SECONDS:
            self.left_out = wanted


def are_tripwires(reads: EpochReadNumbers, interval: int) -> npt.NDArray[np.bool_]:
    """Return which of *reads* (counted from the start of their epoch, shape (n,), int64) are tripwires, where one of
    *interval* reads is: shape (n,), bool. All False where *interval* is 0."""
    if not interval:
        return np.zeros(len(reads), np.bool_)
    are: npt.NDArray[np.bool_] = reads & (interval - 1) == interval - 1
    return are


class FarTripwires:
    """Tripwires that were read far ahead of a consumer. A single one proves nothing. Where nearly all tripwires of a
    stretch were read in turn, the consumer is there: it was not observed for a while, as during an outage of the
    daemon."""

    def __init__(self) -> None:
        self._reads: list[int] = []  # the latest, in the order of the reads

    def add_tripwire(self, read: int, interval: int, reorder_window: int) -> bool:
        """Add a tripwire that was read after those before. Returns whether the last ones together prove that the
        consumer is there. interval: reads from one tripwire to the next; reorder_window: reads by which its loader's
        workers may differ from the order."""
        needed = FAR_TRIPWIRES + reorder_window // interval
        self._reads = [*self._reads, read][-needed:]
        span = max(self._reads) - min(self._reads)
        together = len(set(self._reads)) == needed and span <= interval * needed / _MIN_DENSITY
        return together and (reorder_window > 0 or self._reads == sorted(self._reads))

    def clear(self) -> None:
        self._reads = []


def next_tripwires(reads: EpochReadNumbers, front: int, reach: float) -> EpochReadNumbers:
    """Return those of the tripwires *reads* (shape (n,), int64, in ascending order) that a consumer at read *front*
    reads next, one after the other: shape (up to n,), int64. Each is at most *reach* ahead of the one before; a more
    distant one could be another reader's, or prove nothing by itself."""
    passed: list[int] = []
    for read in reads.tolist():
        if read >= front + reach:
            break
        passed.append(read)
        front = max(front, read + 1)
    return np.array(passed, np.int64)
