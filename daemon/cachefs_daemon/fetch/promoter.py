"""Moves blocks from the SSD tier closer to their readers before they are read
(cachefs.planning.prefetch.promotion_plan)."""

import asyncio

from cachefs.planning.eviction.tiering import Tiering
from cachefs.planning.prefetch.promotion_plan import LOOK_AGAIN, PromotionPlan
from cachefs_daemon.fetch.pace import Pace
from cachefs_daemon.fetch.readers import Readers
from cachefs_daemon.runtime.locked import Locked
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.block_store import BlockStore


class Promoter:
    """Promotes blocks from the SSD tier into the memory tier, or reads them ahead into the kernel's page cache, as
    planned."""

    def __init__(
        self,
        plan: PromotionPlan,
        pace: Pace,
        blocks: BlockStore,
        tiering: Locked[Tiering],
        threads: Threads,
        readers: Readers,
    ) -> None:
        self._plan = plan
        self._pace = pace
        self._blocks = blocks
        self._tiering = tiering
        self._threads = threads
        self._readers = readers

    async def run(self) -> None:
        """Follow the plan as long as the daemon runs."""
        await self._pace.repeat(self._step)

    async def _step(self) -> None:
        free = self._tiering.unlocked.free_by_tier
        if len(free) < 2 or self._readers.pushing():
            await asyncio.sleep(LOOK_AGAIN)
            return
        self._plan.look_again(asyncio.get_running_loop().time())
        if keys := self._plan.for_free_memory(free[0]):
            await self._threads.ahead(self._blocks.promote, keys)
        if keys := self._plan.for_page_cache(max(self._readers.margins().values(), default=0.0)):
            await self._threads.ahead(self._blocks.read_ahead, keys)
