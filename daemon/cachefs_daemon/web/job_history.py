"""The history of one job, from its beginning until now, in a fixed amount of memory.

A row is kept each second. Once there are MAX_ROWS, every second row is dropped, and from then on one is kept every two
seconds; later every four, and so on. So the whole run can be drawn at any time, by 120 to 240 rows.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

# 13 KB.
MAX_ROWS: Final = 240
# Seconds between the first rows.
FIRST_PERIOD: Final = 1.0


@dataclass(frozen=True, slots=True)
class JobHistoryRow:
    """A job at one moment. All fields but the first and the last are sums since the job or the daemon began."""

    # Unix seconds.
    when: float
    # Bytes that came for the job: from origins; from other nodes.
    origin: float = 0.0
    peers: float = 0.0
    # Bytes of the job's datasets that were pushed into page caches, for all jobs that read them.
    pushed: float = 0.0
    # Samples that its consumers have read.
    samples: float = 0.0
    # Seconds that its reads have waited, all together.
    waited: float = 0.0
    # The furthest epoch of a consumer.
    epoch: float = 0.0


class JobHistory:
    """Rows of one job, oldest first."""

    def __init__(self) -> None:
        self.period = FIRST_PERIOD  # seconds between two rows
        self._rows = np.zeros((MAX_ROWS, len(JobHistoryRow.__slots__)))
        self._count = 0

    def is_due(self, now: float) -> bool:
        """Return whether another row is due. now: unix seconds; a clock that was set back does not delay the row."""
        since = now - self._rows[self._count - 1, 0] if self._count else self.period
        return not 0 <= since < self.period

    def add_row(self, row: JobHistoryRow) -> None:
        if self._count == MAX_ROWS:
            kept = self._rows[::2].copy()
            self._rows[: len(kept)] = kept
            self._count = len(kept)
            self.period *= 2
        self._rows[self._count] = astuple(row)
        self._count += 1

    def columns(self) -> dict[str, list[float]]:
        """Return the values of each field of Row, oldest first."""
        rows: npt.NDArray[np.float64] = self._rows[: self._count].round(3)
        return {name: rows[:, number].tolist() for number, name in enumerate(JobHistoryRow.__slots__)}


@dataclass(frozen=True, slots=True)
class EpochProgress:
    """The position of a consumer: its epoch, the samples of it that are read, and its samples in all (0: unknown)."""

    epoch: int
    read: int
    length: int


class SampleCount:
    """Sums the samples that consumers have read over their epochs, as far as they were seen."""

    def __init__(self) -> None:
        self.total = 0
        self._positions: dict[str, EpochProgress] = {}  # by consumer

    def add_progress(self, progress: Mapping[str, EpochProgress]) -> int:
        """Add the reads up to places: the present consumers, by name. Return the samples read since the last call."""
        new = sum(_samples_between(self._positions.get(name), position) for name, position in progress.items())
        self._positions = dict(progress)
        self.total += new
        return new


def _samples_between(before: EpochProgress | None, now: EpochProgress) -> int:
    """Return the samples that a consumer has read between two positions; for one that went back, those since then."""
    if before is None:
        return now.read
    if now.epoch == before.epoch:
        return max(0, now.read - before.read)
    return now.read + max(0, before.length - before.read if now.epoch > before.epoch else 0)
