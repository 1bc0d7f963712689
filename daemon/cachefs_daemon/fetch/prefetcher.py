"""Fetches planned blocks from their origins before they are read (cachefs.planning.prefetch.fetch_plan)."""

import asyncio
import functools
import math
from collections.abc import Sequence
from typing import Final

from cachefs.block import BlockLocation
from cachefs.errors import CachefsError
from cachefs.messages import BlockRef
from cachefs.planning.eviction.tiering import Tiering
from cachefs.planning.prefetch.fetch_plan import REFRESH_SECONDS, FetchBatch, FetchPlan, PromotionPlan, fit_into_quotas
from cachefs.planning.prefetch.lookahead import UpcomingBlock
from cachefs.planning.sequences.plan import job_of_consumer
from cachefs_daemon.fetch.block_fetch import BlockFetch, BlockFetchOutcome
from cachefs_daemon.fetch.concurrency_limiter import ReadPurpose
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.fetch.reader_callbacks import ReaderCallbacks
from cachefs_daemon.fetch.step_timer import StepTimer
from cachefs_daemon.runtime.locked import Locked
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.block_store import BlockStore

# Seconds for which a block queued for a permit may be overtaken by one that is needed sooner. While estimates of the
# rate grow, all later blocks seem to be needed sooner.
OVERTAKE_SECONDS: Final = 0.1


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


class Prefetcher:
    """Asks the tiers for room, starts the fetches of the plan, and reports their outcomes to it."""

    def __init__(
        self,
        plan: FetchPlan,
        step_timer: StepTimer,
        fetcher: Fetcher,
        tiering: Locked[Tiering],
        threads: Threads,
        readers: ReaderCallbacks,
    ) -> None:
        self._plan = plan
        self._step_timer = step_timer
        self._fetcher = fetcher
        self._tiering = tiering
        self._threads = threads
        self._readers = readers

    async def run(self) -> None:
        """Follow the plan as long as the daemon runs."""
        await self._step_timer.repeat_step(self._step)

    async def _step(self) -> None:
        looked = _now()
        self._plan.refresh(looked, self._fetcher.fetched_bytes)
        found = self._plan.choose_for_free_room(sum(self._tiering.unlocked.free_by_tier))
        await self._start_fetches(await self._within_quotas(found, evicting=False), looked)
        looked = _now()
        batch = self._plan.choose_for_window(self._window)
        for part in self._plan.split_copies(batch) if batch is not None else ():
            await self._fetch_evicting(part, looked, spared=0)
        looked = _now()
        for batch in self._plan.choose_for_backlog(self._window):
            # Room is made in steps. A step must not evict blocks that are read before these.
            await self._fetch_evicting(batch, looked, spared=self._tiering.unlocked.max_extra_bytes)
        self._plan.note_idle()

    @property
    def _window(self) -> float:
        return self._plan.update_window(self._readers.margins(), self._fetcher.latency, _now())

    # --- room ---------------------------------------------------------------------------------------------------------

    async def _fetch_evicting(self, batch: FetchBatch, looked: float, spared: int) -> None:
        """Fetch what fits into the room that is free or evictable, minus *spared* bytes. looked: see
        `_start_fetches`."""
        room = await self._room_for(batch.last_key) - spared
        await self._start_fetches(
            await self._within_quotas(self._plan.fit_into_room(batch.blocks, room), evicting=True), looked
        )

    async def _within_quotas(self, blocks: Sequence[UpcomingBlock], *, evicting: bool) -> list[UpcomingBlock]:
        """Return the *blocks* that fit into their datasets' quotas. evicting: include evictable room."""
        quotas = self._tiering.unlocked.quotas
        left: dict[str, float] = {}
        for snapshot, last in {block.snapshot: block for block in blocks}.items():
            room = quotas.allowance(snapshot)
            if room == math.inf:
                continue
            if evicting:
                room = await self._room_for(self._plan.key_of(last), snapshot)
            left[snapshot] = room - self._plan.bytes_in_flight(snapshot)
        return fit_into_quotas(blocks, left)

    async def _room_for(self, key: bytes, snapshot: str = "") -> int:
        """Return the room for a block. Uses a thread only while another thread holds the lock: the handover takes
        longer than the computation, 0.1 ms."""
        if not self._tiering.try_acquire():
            return await self._threads.run(self._wait_for_room, key, snapshot)
        try:
            return self._tiering.unlocked.room_for(key, snapshot)
        finally:
            self._tiering.release()

    def _wait_for_room(self, key: bytes, snapshot: str) -> int:
        with self._tiering as tiering:
            return tiering.room_for(key, snapshot)

    # --- fetches ------------------------------------------------------------------------------------------------------

    async def _start_fetches(self, blocks: Sequence[UpcomingBlock], looked: float) -> None:
        """Start fetches. looked: loop time at which none of the *blocks* was in any tier."""
        if not blocks:
            return
        now = _now()
        refs = [
            BlockRef(one.snapshot, *file_block)
            for one, file_block in zip(blocks, self._plan.file_blocks_of(blocks), strict=True)
        ]
        self._plan.note_started(blocks)
        try:
            begun = await self._fetcher.start_fetches(refs, [self._purpose(block, now) for block in blocks], looked)
        except BaseException:
            for one in blocks:
                self._plan.note_dropped(one)
            raise
        for one, begin in zip(blocks, begun, strict=True):
            if isinstance(begin, BlockFetch):
                begin.add_done_callback(functools.partial(self._on_fetch_done, one))
            else:
                self._report_outcome(one, begin)

    def _purpose(self, block: UpcomingBlock, now: float) -> ReadPurpose:
        needed_at = now + min(block.seconds, OVERTAKE_SECONDS)
        return ReadPurpose(job_of_consumer(block.consumer), needed_at, now + self._plan.urgent_after(block))

    def _on_fetch_done(self, one: UpcomingBlock, fetch: BlockFetch) -> None:
        if isinstance(fetch.outcome, BlockLocation):
            self._readers.on_fetched(one.consumer, one.number, one.size, fetch.source_peer)
        self._report_outcome(one, fetch.outcome)
        self._step_timer.wake()

    def _report_outcome(self, one: UpcomingBlock, outcome: BlockFetchOutcome) -> None:
        if isinstance(outcome, BlockLocation):
            self._plan.note_landed(one)
        elif isinstance(outcome, CachefsError):
            self._plan.note_failed(one, _now())
        else:
            self._plan.note_refused(one, _now())


def _now() -> float:
    return asyncio.get_running_loop().time()
