"""Evicts the block that is probably read last, where the order is known only for a moment ahead.

Estimated sample distance (ALSD, DPFlow, 2024, ch. 3.4.3) puts each block into one of four parts for each job. In this
project's reading, at a position with r reads of an epoch of n left, the next c reads certain:

    certain   among the next c reads: the distance is known
    likely    later in this epoch, in an unknown order: in a window from c to r
    visited   read in this epoch, and again in the next one: in a window from r to r + n
    unknown   in no known epoch: after r, on average at `KnownFuture.beyond`

The thesis averages the distances over the jobs. Here the score is the expected time until the *first* read by any job,
in seconds by each job's rate. It is the soonest certain read, or the first of the expected ones if that comes before.
The longest expected time until the next read is the optimal choice for independent reads (Aho, Denning and Ullman,
"Principles of optimal page replacement", 1971), and Belady's choice where all reads are certain.

The first of several expected reads is estimated by their hazard rates, which add up (Cox and Oakes, "Analysis of
Survival Data", 1984, ch. 2). A read whose window starts in a seconds, and which comes d seconds later on average, has
the rate 1/d from then on. Windows are taken in order of their starts, and with each one the estimate is
a + 1 / sum(1/d) over the windows so far. The least estimate counts, as a window has no influence on reads before it.

The policy must know which blocks an epoch reads, but not in which order. Figures:
docs/decisions/0065-alsd-over-jobs.md.
"""

import math
from collections.abc import Iterator
from typing import ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import Numbers
from cachefs.planning.cluster.ownership import Ownership
from cachefs.planning.eviction.policies.ranked import RankedPolicy
from cachefs.planning.pagecache.states import MemoryCoverage
from cachefs.planning.sequences.plan import BLOCKS_PER_PART, Plan
from cachefs.planning.sequences.timeline import UNKNOWN_READ, KnownFuture, Seconds

# Reads whose order is certain, as loaders have drawn them ahead: 8 workers with 2 batches of 64 each.
CERTAIN_READS: Final = 1024


class Alsd(RankedPolicy):
    """Scores are expected seconds until the next read."""

    name: ClassVar = "alsd"
    description: ClassVar = (
        "uses published sequences as `clairvoyant` does, where only a part of their order is certain"
    )

    def __init__(
        self,
        plan: Plan,
        coverage: MemoryCoverage | None = None,
        ownership: Ownership | None = None,
        certain: int = CERTAIN_READS,
    ) -> None:
        super().__init__(plan, coverage, ownership)
        self._certain = certain

    def _scores(self, snapshot: str, ids: Numbers) -> Seconds:
        parts = [ids[start : start + BLOCKS_PER_PART] for start in range(0, len(ids), BLOCKS_PER_PART)]
        return np.concatenate([np.zeros(0), *(self._first_reads(snapshot, part) for part in parts)])

    def _first_reads(self, snapshot: str, ids: Numbers) -> Seconds:
        """Return the expected seconds until the first read of each of the blocks *ids* (shape (n,)): shape (n,)."""
        soonest = np.full(len(ids), np.inf)
        windows: list[_Window] = []
        for future, where, theirs in self._plan.futures(snapshot, ids):
            reads = future.next_read[theirs.astype(np.intp, copy=False)]
            is_certain = reads < min(future.position + self._certain, UNKNOWN_READ)
            seconds = np.where(is_certain, np.subtract(reads, future.position, dtype=np.float64) / future.rate, np.inf)
            soonest[where] = np.minimum(soonest[where], seconds)
            for window in _windows(future, reads, self._certain):
                blocks = np.zeros(len(ids), np.bool_)
                blocks[where] = window.blocks
                windows.append(window._replace(blocks=blocks))
        rates = np.zeros(len(ids))
        with np.errstate(divide="ignore"):
            for window in sorted(windows, key=lambda window: window.start):
                np.add(rates, window.rate, out=rates, where=window.blocks)
                # For blocks that are not in this window the estimate is later than their last one.
                np.minimum(soonest, window.start + 1 / rates, out=soonest)
        return soonest


class _Window(NamedTuple):
    """A window in which a consumer does one of its next reads of each of some blocks, in an unknown order."""

    # Seconds until it begins.
    start: float
    # Reads of each block per second after that: 1 / mean seconds from the start to the read.
    rate: float
    # Which blocks: shape (n,).
    blocks: npt.NDArray[np.bool_]


def _windows(future: KnownFuture, reads: npt.NDArray[np.int32], certain: int) -> Iterator[_Window]:
    """Yield the windows of a consumer whose next *certain* reads are certain. reads: number of its next read of each of
    some blocks, shape (n,)."""
    left = max(0, future.length - future.position)
    border = min(future.position + certain, UNKNOWN_READ)
    is_visited = reads >= max(future.length, border)
    is_unknown = reads == UNKNOWN_READ
    following = max(left, certain)
    # (start, mean distance from the start, blocks), in reads. Means are at least half a read, also where later epochs
    # than the next are known.
    for start, mean, blocks in (
        (certain, (left - certain) / 2, (reads >= border) & (reads < future.length)),
        (following, max(left + future.length - following, 1) / 2, is_visited & ~is_unknown),
        (left, max(future.beyond - future.position - left, 0.5), is_unknown),
    ):
        if math.isfinite(mean) and blocks.any():
            yield _Window(start / future.rate, future.rate / mean, blocks)
