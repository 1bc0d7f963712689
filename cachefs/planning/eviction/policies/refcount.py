"""Evicts the block that the fewest jobs still need in their epochs (the reference count of Joader: Xu et al., "A Deep
Learning Dataloader with Shared Data Preparation", NeurIPS 2022)."""

import numpy as np

from cachefs.planning.blocks.space import Numbers
from cachefs.planning.eviction.policies.ranked import RankedPolicy
from cachefs.planning.sequences.timeline import Seconds


class Refcount(RankedPolicy):
    """Scores are the negated number of consumers that still read a block in their current epoch."""

    _COPY_WINDOW = -1.0  # a copy stays as long as any consumer will read it

    def _scores(self, snapshot: str, ids: Numbers) -> Seconds:
        score = np.zeros(len(ids))
        for future, where, theirs in self._plan.futures(snapshot, ids):
            score[where] -= future.next_read[theirs] < future.length
        return score
