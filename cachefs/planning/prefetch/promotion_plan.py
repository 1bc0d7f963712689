"""Decides which blocks of the SSD tier to bring nearer to their readers in advance.

Into free room of the memory tier, blocks are copied as far ahead as the plan goes. Beyond that, they are read into the
kernel's page cache shortly before they are needed, so that the mount's read does not wait. A copy into a full memory
tier would push as much back to the SSD, and write the whole dataset to it in every epoch.
"""

import math
from collections.abc import Sequence
from typing import Final

from cachefs.planning.blocks.presence import IN_SSD, Presence
from cachefs.planning.prefetch.lookahead import Lookahead, Upcoming
from cachefs.planning.sequences.plan import Plan

# Seconds after which returned blocks are considered again: they may be back in the SSD tier.
LOOK_AGAIN: Final = 1.0
# Seconds ahead of the readers that blocks are read into the page cache.
WINDOW: Final = 1.0
# Most blocks returned at once.
BLOCKS: Final = 256


class PromotionPlan:
    """Chooses the blocks of the SSD tier to copy to memory, and those to read ahead."""

    def __init__(self, plan: Plan, presence: Presence, memory_ahead: int) -> None:
        """memory_ahead: most bytes that are read ahead at once."""
        self._plan = plan
        self._presence = presence
        self._memory_ahead = memory_ahead
        self._some_time = Lookahead(plan, IN_SSD)  # for free room
        self._soon = Lookahead(plan, IN_SSD)  # for the page cache
        self._looked = -math.inf  # time of the last `look_again`

    def look_again(self, now: float) -> None:
        """Consider returned blocks again, once a second. To be called before each step. now: monotonic seconds."""
        if now - self._looked > LOOK_AGAIN:
            self._looked = now
            self._some_time.rewind()
            self._soon.rewind()

    def for_free_memory(self, free: int) -> list[bytes]:
        """Return keys of blocks to copy into *free* bytes of the memory tier, soonest first."""
        if free <= 0:
            return []
        return self._keys(self._some_time.take(self._presence.states, math.inf, BLOCKS, free))

    def for_page_cache(self, margin: float) -> list[bytes]:
        """Return keys of blocks to read ahead, soonest first. margin: seconds by which readers may be ahead of their
        places in the plan."""
        return self._keys(self._soon.take(self._presence.states, margin + WINDOW, BLOCKS, self._memory_ahead))

    def _keys(self, found: Sequence[Upcoming]) -> list[bytes]:
        return [self._plan.spaces[one.snapshot].key(one.number) for one in found]
