"""Moves blocks from the SSD tier closer to their readers before they are read
(cachefs.planning.prefetch.fetch_plan)."""

import asyncio

from cachefs.planning.eviction.tiering import Tiering
from cachefs.planning.prefetch.fetch_plan import REFRESH_SECONDS, PromotionPlan
from cachefs_daemon.fetch.reader_callbacks import ReaderCallbacks
from cachefs_daemon.fetch.step_timer import StepTimer
from cachefs_daemon.runtime.locked import Locked
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.block_store import BlockStore


class Promoter:
    """Promotes blocks from the SSD tier into the memory tier, or reads them ahead into the kernel's page cache, as
    planned."""

    def __init__(
        self,
        plan: PromotionPlan,
        step_timer: StepTimer,
        blocks: BlockStore,
        tiering: Locked[Tiering],
        threads: Threads,
        readers: ReaderCallbacks,
    ) -> None:
        self._plan = plan
        self._step_timer = step_timer
        self._blocks = blocks
        self._tiering = tiering
        self._threads = threads
        self._readers = readers

    async def run(self) -> None:
        """Follow the plan as long as the daemon runs."""
        await self._step_timer.repeat_step(self._step)

    async def _step(self) -> None:
        free = self._tiering.unlocked.free_by_tier
        if len(free) < 2 or self._readers.is_pushing():
            await asyncio.sleep(REFRESH_SECONDS)
            return
        self._plan.refresh(asyncio.get_running_loop().time())
        if keys := self._plan.choose_for_memory(free[0]):
            await self._threads.ahead(self._blocks.promote, keys)
        if keys := self._plan.choose_for_page_cache(max(self._readers.margins().values(), default=0.0)):
            await self._threads.ahead(self._blocks.read_ahead, keys)
