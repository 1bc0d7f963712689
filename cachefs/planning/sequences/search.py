"""Evidence whether a consumer's sequence is being read at all, and a search for the place of the latest reads in it.

`ObservedShare` estimates the share of a consumer's reads that is observed; the page cache answers the others without a
trace.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import Ids
from cachefs.planning.sequences.timeline import UNKNOWN_READ, PlannedEpoch

# How far ahead reads may be beyond what the loader's workers and the number of reads explain.
SLACK_READS: Final = 4
# Least share of the done reads that is assumed to be observed.
MIN_DENSITY: Final = 0.05
# Factor on the weight of all earlier reads with each report.
FADING_FACTOR: Final = 0.9
# Initial weight of the density, in reads.
_INITIAL_READS: Final = 32
# Number of the latest reads on which a verdict is based.
VERDICT_READS: Final = 48
# A place is found where at least this share of the latest reads lies close together: within a third of the epoch at
# most, and this many standard deviations more than by chance. With 20 searches a second, lower limits would find places
# anywhere.
MIN_AGREEMENT: Final = 0.35
DEVIATIONS: Final = 8
MIN_CLUSTER_READS: Final = 8
MAX_CLUSTER_SHARE: Final = 1 / 3
# Most of the latest reads that are searched for, as a part of the reads of the epoch.
MAX_SEARCHED_SHARE: Final = 1 / 16
# Done reads of different blocks per observed read: each is tried in turn.
SPACINGS: Final = (2, 4, 8, 16, 32)
# Each wrong search result raises the required agreement by this.
DISTRUST_STEP: Final = 0.1
MAX_DISTRUST: Final = 0.5


class ObservedShare:
    """The observed share of one consumer's reads."""

    def __init__(self) -> None:
        # Reads ahead of the consumer per read among them that will be observed: pages of the others were pushed.
        self.hidden_ratio = 1.0
        self._density = 1.0  # recently observed reads per done read
        self._seen = self._gained = float(_INITIAL_READS)  # numerator and denominator of the density

    @property
    def max_step(self) -> float:
        """Most distance of an observed read from the one observed before it, in reads of different blocks."""
        return max(SLACK_READS + 2 / self._density, SLACK_READS * self.hidden_ratio)

    def on_reads(self, count: int) -> None:
        """Count observed reads."""
        self._seen = FADING_FACTOR * self._seen + count
        self._gained = FADING_FACTOR * self._gained

    def on_advance(self, gained: int) -> None:
        """Record by how many reads the observed reads have moved the consumer on."""
        self._gained += max(0, gained)
        self._density = min(1.0, max(MIN_DENSITY, self._seen / max(1.0, self._gained)))

    def reset(self, density: float) -> None:
        """Restart from *density*, in observed reads per done read."""
        self._density = density
        self._seen, self._gained = _INITIAL_READS * density, float(_INITIAL_READS)


@dataclass(frozen=True, slots=True)
class ReadCluster:
    """A place in an epoch around which the latest reads lie close together."""

    # Part of the latest reads that lies in it; 0: no such place.
    share: float
    # The read after its last one, counted from the start of the epoch.
    end: int
    # Observed reads per done read.
    density: float


NO_CLUSTER: Final = ReadCluster(0.0, 0, 1.0)


class Evidence:
    """The latest reads as evidence for and against one consumer's sequence."""

    def __init__(self, reorder_window: int) -> None:
        self.matched = 0  # reads so far at their place in the sequence
        self.mismatched = 0  # reads so far without a consumer
        # The latest of both, as blocks, and which of them were at their place.
        self._judged = np.zeros(0, np.int32)
        self._fits = np.zeros(0, np.bool_)
        self._recent = np.zeros(0, np.int32)  # blocks that it has read recently
        self._kept = 2 * (4 * VERDICT_READS + reorder_window)  # most of these
        self._distrust = 0.0  # added to MIN_AGREEMENT
        self._found_at = -VERDICT_READS * 8  # `matched` at the last successful search

    @property
    def judged(self) -> Ids:
        """The latest reads of the consumer, or without a consumer: blocks in order of the reads, shape (n,), int32."""
        return self._judged

    @property
    def share(self) -> float:
        """The share of fitting reads among the latest ones; 1 without any."""
        return float(self._fits.mean()) if len(self._fits) else 1.0

    @property
    def is_enough(self) -> bool:
        """True where there are enough reads for a verdict."""
        return len(self._fits) >= VERDICT_READS

    def are_recent(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return which of the blocks *ids* (shape (n,), int32) the consumer has read recently: shape (n,), bool. They
        may be read once more, piece by piece."""
        return np.isin(ids, self._recent)

    def add_reads(self, ids: Ids, fits: npt.NDArray[np.bool_]) -> None:
        """Add reads of the blocks *ids* (shape (n,), int32), in this order. fits: which were at their place in the
        sequence, shape (n,), bool; the others have no consumer."""
        matched = int(np.count_nonzero(fits))
        self.matched += matched
        self.mismatched += len(fits) - matched
        self._judged = np.concatenate((self._judged, ids))[-VERDICT_READS:]
        self._fits = np.concatenate((self._fits, fits))[-VERDICT_READS:]
        self._recent = np.concatenate((self._recent, ids[fits]))[-self._kept :]

    def clear(self) -> None:
        """Forget the judged reads after a jump of the consumer."""
        self._judged, self._fits = np.zeros(0, np.int32), np.zeros(0, np.bool_)

    def is_credible(self, cluster: ReadCluster) -> bool:
        """Return whether the cluster is accepted as the consumer's place."""
        return cluster.share >= MIN_AGREEMENT + self._distrust

    def on_found(self) -> None:
        """Record a successful search."""
        self._found_at = self.matched

    def on_lost(self) -> None:
        """Record that the consumer is not where it was followed to. A place found just before was then wrong."""
        if self.matched - self._found_at < 2 * VERDICT_READS:
            self._distrust = min(MAX_DISTRUST, self._distrust + DISTRUST_STEP)


def find_densest(epoch: PlannedEpoch, ids: Ids, reorder_window: int) -> ReadCluster:
    """Return the place in the epoch where reads of the blocks *ids* (shape (n,), int32, in order of the reads) are
    densest.

    reorder_window: reads by which the loader's workers may differ from the order.
    """
    length = len(epoch.blocks)
    ids = ids[-max(MIN_CLUSTER_READS, int(length * MAX_SEARCHED_SHARE)) :]
    reads = np.sort(epoch.first[ids])
    reads = reads[reads != UNKNOWN_READ].astype(np.int64)
    for spacing in SPACINGS:
        width = int(reorder_window + epoch.repetition * spacing * len(ids))
        chance = width / max(1, length)
        if len(reads) < MIN_CLUSTER_READS or chance > MAX_CLUSTER_SHARE:
            break
        counts = np.searchsorted(reads, reads + width) - np.arange(len(reads))
        start = int(counts.argmax())
        share = float(counts[start]) / len(ids)
        if share >= max(MIN_AGREEMENT, chance + DEVIATIONS * math.sqrt(chance * (1 - chance) / len(ids))):
            last = start + int(counts[start]) - 1
            density = max(MIN_DENSITY, min(1.0, float(counts[start]) / max(1, reads[last] + 1 - reads[start])))
            # Where few reads are observed, the width may end in the middle of them.
            apart = np.diff(reads[last:], append=np.inf) > SLACK_READS / density
            return ReadCluster(share, int(reads[last + int(apart.argmax())]) + 1, density)
    return NO_CLUSTER
