"""Decides which blocks of the SSD tier to bring nearer to their readers in advance.

Into free room of the memory tier, blocks are copied as far ahead as the plan goes. Beyond that, they are read into the
kernel's page cache shortly before they are needed, so that the mount's read does not wait. A copy into a full memory
tier would push as much back to the SSD, and write the whole dataset to it in every epoch.
"""

import math
from collections.abc import Sequence
from typing import Final

from cachefs.planning.blocks.presence import IN_SSD, Presence
from cachefs.planning.prefetch.lookahead import Lookahead, UpcomingBlock
from cachefs.planning.sequences.plan import Plan

# Seconds after which returned blocks are considered again: they may be back in the SSD tier.
REFRESH_SECONDS: Final = 1.0
# Seconds ahead of the readers that blocks are read into the page cache.
WINDOW_SECONDS: Final = 1.0
# Most blocks returned at once.
MAX_BLOCKS: Final = 256


class PromotionPlan:
    """Chooses the blocks of the SSD tier to copy to memory, and those to read ahead."""

    def __init__(self, plan: Plan, presence: Presence, page_cache_bytes: int) -> None:
        """page_cache_bytes: most bytes that are read ahead at once."""
        self._plan = plan
        self._presence = presence
        self._page_cache_bytes = page_cache_bytes
        self._for_memory = Lookahead(plan, IN_SSD)  # for free room
        self._for_page_cache = Lookahead(plan, IN_SSD)  # for the page cache
        self._refreshed_at = -math.inf  # time of the last `refresh`

    def refresh(self, now: float) -> None:
        """Consider returned blocks again, once a second. To be called before each step. now: monotonic seconds."""
        if now - self._refreshed_at > REFRESH_SECONDS:
            self._refreshed_at = now
            self._for_memory.rewind()
            self._for_page_cache.rewind()

    def choose_for_memory(self, free: int) -> list[bytes]:
        """Return keys of blocks to copy into *free* bytes of the memory tier, soonest first."""
        if free <= 0:
            return []
        return self._keys(self._for_memory.take_blocks(self._presence.states, math.inf, MAX_BLOCKS, free))

    def choose_for_page_cache(self, margin: float) -> list[bytes]:
        """Return keys of blocks to read ahead, soonest first. margin: seconds by which readers may be ahead of their
        places in the plan."""
        return self._keys(
            self._for_page_cache.take_blocks(
                self._presence.states, margin + WINDOW_SECONDS, MAX_BLOCKS, self._page_cache_bytes
            )
        )

    def _keys(self, found: Sequence[UpcomingBlock]) -> list[bytes]:
        return [self._plan.spaces[one.snapshot].key(one.number) for one in found]
