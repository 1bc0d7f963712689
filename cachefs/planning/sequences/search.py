"""Is what is read the sequence of a consumer at all, and if so, where in it do the latest reads lie?"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import Ids
from cachefs.planning.sequences.epoch import UNKNOWN, Epoch
from cachefs.planning.sequences.visibility import LOWEST_DENSITY, SLACK

# A verdict is made of so many of the latest reads.
ENOUGH: Final = 48
# A place is found where at least this share of the latest reads lies close together: within a third of the epoch at
# most, and so many standard deviations more than would by chance. Looking 20 times a second, anything less is found.
AGREEMENT: Final = 0.35
DEVIATIONS: Final = 8
FEWEST: Final = 8
WIDEST: Final = 1 / 3
# At most so many of the latest reads are looked for, as a part of the reads of the epoch.
LOOKED_FOR: Final = 1 / 16
# Reads of different blocks that are done per read that shows: each is tried in turn.
SPACINGS: Final = (2, 4, 8, 16, 32)
# A consumer that was found where it was not is believed less from then on.
DISTRUST: Final = 0.1
MOST_DISTRUST: Final = 0.5


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where the latest reads lie close together in an epoch."""

    # The part of the latest reads that lies in it; 0: there is no such place.
    share: float
    # The read after its last one, counted from the start of the epoch.
    end: int
    # Reads that show per read that is done.
    density: float


NOWHERE: Final = Cluster(0.0, 0, 1.0)


class Evidence:
    """What the latest reads say for and against one consumer's sequence."""

    def __init__(self, reorder_window: int) -> None:
        self.matched = 0  # reads so far that were where the sequence has them
        self.mismatched = 0  # reads so far that no consumer explains
        # The latest reads that were its own or nobody's, as blocks, and which of them were where the sequence has them.
        self._judged = np.zeros(0, np.int32)
        self._fits = np.zeros(0, np.bool_)
        self._recent = np.zeros(0, np.int32)  # blocks that it has read of late
        self._kept = 2 * (4 * ENOUGH + reorder_window)  # how many of these are remembered
        self._distrust = 0.0  # what is added to AGREEMENT
        self._found_at = -ENOUGH * 8  # reads that were matched when it was last found

    @property
    def judged(self) -> Ids:
        """The latest reads that were its own, or nobody's: blocks in order of the reads, shape (n,), int32."""
        return self._judged

    @property
    def share(self) -> float:
        """Of the latest reads, those that fitted; 1 before there were any."""
        return float(self._fits.mean()) if len(self._fits) else 1.0

    @property
    def is_enough(self) -> bool:
        """Enough was read for a verdict."""
        return len(self._fits) >= ENOUGH

    def knows(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which of the blocks *ids* (shape (n,), int32) the consumer has read of late: shape (n,), bool. They may be
        read once more, piece by piece."""
        return np.isin(ids, self._recent)

    def add(self, ids: Ids, fits: npt.NDArray[np.bool_]) -> None:
        """The blocks *ids* (shape (n,), int32) were read, in this order. fits: whether each was where the sequence has
        it, shape (n,), bool; the others no consumer explains."""
        matched = int(np.count_nonzero(fits))
        self.matched += matched
        self.mismatched += len(fits) - matched
        self._judged = np.concatenate((self._judged, ids))[-ENOUGH:]
        self._fits = np.concatenate((self._fits, fits))[-ENOUGH:]
        self._recent = np.concatenate((self._recent, ids[fits]))[-self._kept :]

    def clear(self) -> None:
        """The consumer is somewhere else: what was read before says nothing."""
        self._judged, self._fits = np.zeros(0, np.int32), np.zeros(0, np.bool_)

    def believes(self, cluster: Cluster) -> bool:
        """Is that where the consumer is?"""
        return cluster.share >= AGREEMENT + self._distrust

    def on_found(self) -> None:
        """The consumer was found somewhere."""
        self._found_at = self.matched

    def on_lost(self) -> None:
        """The consumer is not where it was followed to. If it was found there just before, it was found wrongly."""
        if self.matched - self._found_at < 2 * ENOUGH:
            self._distrust = min(MOST_DISTRUST, self._distrust + DISTRUST)


def densest(epoch: Epoch, ids: Ids, reorder_window: int) -> Cluster:
    """Where in the epoch the reads of the blocks *ids* (shape (n,), int32, in order of the reads) lie closest together.

    reorder_window: reads by which the loader's workers may differ from the order.
    """
    length = len(epoch.blocks)
    ids = ids[-max(FEWEST, int(length * LOOKED_FOR)) :]
    reads = np.sort(epoch.first[ids])
    reads = reads[reads != UNKNOWN].astype(np.int64)
    for spacing in SPACINGS:
        width = int(reorder_window + epoch.repetition * spacing * len(ids))
        chance = width / max(1, length)
        if len(reads) < FEWEST or chance > WIDEST:
            break
        counts = np.searchsorted(reads, reads + width) - np.arange(len(reads))
        start = int(counts.argmax())
        share = float(counts[start]) / len(ids)
        if share >= max(AGREEMENT, chance + DEVIATIONS * math.sqrt(chance * (1 - chance) / len(ids))):
            last = start + int(counts[start]) - 1
            density = max(LOWEST_DENSITY, min(1.0, float(counts[start]) / max(1, reads[last] + 1 - reads[start])))
            # Where few reads show, the width may end in the middle of them.
            apart = np.diff(reads[last:], append=np.inf) > SLACK / density
            return Cluster(share, int(reads[last + int(apart.argmax())]) + 1, density)
    return NOWHERE
