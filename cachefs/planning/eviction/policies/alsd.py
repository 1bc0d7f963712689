"""Evicts the block that is probably read last, where the order is known only for a moment ahead.

Estimated sample distance, in this project's reading of it (ALSD, DPFlow, 2024, ch. 3.4.3). For each job the blocks are
in four parts. At a position with r reads of an epoch of n left, the next c of them certain:

    certain   among the next c reads: the distance is known
    likely    later in this epoch, in an unknown order: c + (r - c) / 2
    visited   read in this epoch: in the next one, r + n / 2
    unknown   not in this epoch either: as visited, once more epochs are counted in which it may not be

Distances become seconds by each job's rate, and the soonest job decides. The policy must know which blocks an epoch
reads, but not in which order.
"""

from typing import ClassVar, Final

import numpy as np

from cachefs.planning.blocks.space import Numbers
from cachefs.planning.cluster.ownership import Ownership
from cachefs.planning.eviction.policies.ranked import RankedPolicy
from cachefs.planning.pagecache.states import MemoryCoverage
from cachefs.planning.sequences.plan import Plan
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
        soonest = np.full(len(ids), np.inf)
        for future, where, theirs in self._plan.futures(snapshot, ids):
            soonest[where] = np.minimum(soonest[where], self._estimate(future, theirs))
        return soonest

    def _estimate(self, future: KnownFuture, ids: Numbers) -> Seconds:
        left = max(0, future.length - future.position)
        reads = future.next_read[ids]
        distance = np.subtract(reads, future.position, dtype=np.float64)
        certain = min(self._certain, left)
        distance[distance >= certain] = certain + (left - certain) / 2
        distance[reads >= future.length] = left + future.length / 2
        distance[reads == UNKNOWN_READ] = future.beyond - future.position
        return distance / future.rate
