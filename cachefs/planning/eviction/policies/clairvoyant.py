"""Evicts the block that is read last (Belady, "A study of replacement algorithms for a virtual-storage computer",
1966).

The plan tells when a block is read next: the soonest of all consumers decides. A block is taken only if it is read
sooner than the blocks evicted for it, so no block is taken that would be evicted again before it is read.
"""

from typing import ClassVar

from cachefs.planning.blocks.space import Numbers
from cachefs.planning.eviction.policies.ranked import RankedPolicy
from cachefs.planning.sequences.timeline import Seconds


class Clairvoyant(RankedPolicy):
    """Scores are seconds until the next read."""

    name: ClassVar = "clairvoyant"
    description: ClassVar = (
        "keeps the blocks that running jobs have published to read soonest, and without such jobs works as `minio`"
    )

    def _scores(self, snapshot: str, ids: Numbers) -> Seconds:
        return self._plan.next_use_of(snapshot, ids)
