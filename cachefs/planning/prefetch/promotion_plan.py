"""What to bring from the SSD tier nearer to its readers, before they come.

Into free room of the memory tier blocks are copied as far ahead as the plan goes. Beyond that they are read into the
kernel's page cache shortly before they are needed, from where the mount reads without waiting. A copy into a full
memory tier would push as much back to the SSD, and write the whole dataset to it in every epoch.
"""

import math
from collections.abc import Sequence
from typing import Final

from cachefs.planning.blocks.presence import IN_SSD, Presence
from cachefs.planning.prefetch.lookahead import Lookahead, Upcoming
from cachefs.planning.sequences.plan import Plan

# Seconds after which blocks that were given are looked at again: they may have come back to the SSD tier.
LOOK_AGAIN: Final = 1.0
# Seconds ahead of the readers that blocks are read into the page cache.
WINDOW: Final = 1.0
# Blocks that are given at once.
BLOCKS: Final = 256


class PromotionPlan:
    """Says which blocks of the SSD tier to copy to memory, and which to read ahead."""

    def __init__(self, plan: Plan, presence: Presence, memory_ahead: int) -> None:
        """memory_ahead: bytes that are read ahead at once."""
        self._plan = plan
        self._presence = presence
        self._memory_ahead = memory_ahead
        self._some_time = Lookahead(plan, IN_SSD)  # for free room
        self._soon = Lookahead(plan, IN_SSD)  # for the page cache
        self._looked = -math.inf  # when blocks were looked at again

    def look_again(self, now: float) -> None:
        """Look once a second at blocks that were given before. To be called before each step. now: monotonic
        seconds."""
        if now - self._looked > LOOK_AGAIN:
            self._looked = now
            self._some_time.rewind()
            self._soon.rewind()

    def for_free_memory(self, free: int) -> list[bytes]:
        """Keys of blocks to copy into *free* bytes of the memory tier, soonest first."""
        if free <= 0:
            return []
        return self._keys(self._some_time.take(self._presence.states, math.inf, BLOCKS, free))

    def for_page_cache(self, margin: float) -> list[bytes]:
        """Keys of blocks to read ahead, soonest first. margin: seconds by which readers may be ahead of where the plan
        has them."""
        return self._keys(self._soon.take(self._presence.states, margin + WINDOW, BLOCKS, self._memory_ahead))

    def _keys(self, found: Sequence[Upcoming]) -> list[bytes]:
        return [self._plan.spaces[one.snapshot].key(one.number) for one in found]
