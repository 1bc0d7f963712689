"""Fetches planned blocks from their origins before they are read (cachefs.planning.prefetch.fetch_plan)."""

import asyncio
import functools
import math
from collections.abc import Sequence
from typing import Final

from cachefs.block import Location
from cachefs.errors import CachefsError
from cachefs.messages import BlockRef
from cachefs.planning.eviction.tiering import Tiering
from cachefs.planning.prefetch.fetch_plan import Batch, FetchPlan, within_quotas
from cachefs.planning.prefetch.lookahead import Upcoming
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.fetch.flights import Flight, Outcome
from cachefs_daemon.fetch.pace import Pace
from cachefs_daemon.fetch.readers import Readers
from cachefs_daemon.runtime.locked import Locked
from cachefs_daemon.runtime.threads import Threads

# Seconds for which a block queued for a slot may be overtaken by one that is needed sooner. While estimates of the rate
# grow, all later blocks seem to be needed sooner.
OVERTAKEN: Final = 0.1


class Prefetcher:
    """Asks the tiers for room, starts the fetches of the plan, and reports their outcomes to it."""

    def __init__(
        self,
        plan: FetchPlan,
        pace: Pace,
        fetcher: Fetcher,
        tiering: Locked[Tiering],
        threads: Threads,
        readers: Readers,
    ) -> None:
        self._plan = plan
        self._pace = pace
        self._fetcher = fetcher
        self._tiering = tiering
        self._threads = threads
        self._readers = readers

    async def run(self) -> None:
        """Follow the plan as long as the daemon runs."""
        await self._pace.repeat(self._step)

    async def _step(self) -> None:
        looked = _now()
        self._plan.look_again(looked, self._fetcher.fetched_bytes)
        found = self._plan.for_free_room(sum(self._tiering.unlocked.free_by_tier))
        await self._fetch(await self._within_quotas(found, evicting=False), looked)
        looked = _now()
        batch = self._plan.for_window(self._window)
        for part in self._plan.apart(batch) if batch is not None else ():
            await self._fetch_evicting(part, looked, spared=0)
        looked = _now()
        batch = self._plan.for_backlog(self._window)
        if batch is not None:
            # Room is made in steps. A step must not evict blocks that are read before these.
            await self._fetch_evicting(batch, looked, spared=self._tiering.unlocked.step)
        self._plan.note_idle()

    @property
    def _window(self) -> float:
        return self._plan.window(self._readers.margins(), self._fetcher.latency, _now())

    # --- room ---------------------------------------------------------------------------------------------------------

    async def _fetch_evicting(self, batch: Batch, looked: float, spared: int) -> None:
        """Fetch what fits into the room that is free or evictable, minus *spared* bytes. looked: see `_fetch`."""
        room = await self._room_for(batch.key) - spared
        await self._fetch(await self._within_quotas(self._plan.fitting(batch.blocks, room), evicting=True), looked)

    async def _within_quotas(self, blocks: Sequence[Upcoming], *, evicting: bool) -> list[Upcoming]:
        """Return the *blocks* that fit into their datasets' quotas. evicting: include evictable room."""
        quotas = self._tiering.unlocked.quotas
        left: dict[str, float] = {}
        for snapshot, last in {one.snapshot: one for one in blocks}.items():
            room = quotas.allowance(snapshot)
            if room == math.inf:
                continue
            if evicting:
                room = await self._room_for(self._plan.key(last), snapshot)
            left[snapshot] = room - self._plan.bytes_in_flight(snapshot)
        return within_quotas(blocks, left)

    async def _room_for(self, key: bytes, snapshot: str = "") -> int:
        """Return the room for a block. Uses a thread only while another thread holds the lock: the handover takes
        longer than the computation, 0.1 ms."""
        if not self._tiering.take_now():
            return await self._threads.run(self._wait_for_room, key, snapshot)
        try:
            return self._tiering.unlocked.room_for(key, snapshot)
        finally:
            self._tiering.give_back()

    def _wait_for_room(self, key: bytes, snapshot: str) -> int:
        with self._tiering as tiering:
            return tiering.room_for(key, snapshot)

    # --- fetches ------------------------------------------------------------------------------------------------------

    async def _fetch(self, blocks: Sequence[Upcoming], looked: float) -> None:
        """Start fetches. looked: loop time at which none of the *blocks* was in any tier."""
        if not blocks:
            return
        now = _now()
        refs = [BlockRef(one.snapshot, *place) for one, place in zip(blocks, self._plan.places(blocks), strict=True)]
        self._plan.started(blocks)
        try:
            begun = await self._fetcher.start(refs, [now + min(one.seconds, OVERTAKEN) for one in blocks], looked)
        except BaseException:
            for one in blocks:
                self._plan.dropped(one)
            raise
        for one, begin in zip(blocks, begun, strict=True):
            if isinstance(begin, Flight):
                begin.on_landing(functools.partial(self._ended, one))
            else:
                self._report(one, begin)

    def _ended(self, one: Upcoming, flight: Flight) -> None:
        if isinstance(flight.outcome, Location):
            self._readers.fetched(one.consumer, one.number, one.size, flight.via)
        self._report(one, flight.outcome)
        self._pace.wake()

    def _report(self, one: Upcoming, outcome: Outcome) -> None:
        if isinstance(outcome, Location):
            self._plan.landed(one)
        elif isinstance(outcome, CachefsError):
            self._plan.failed(one, _now())
        else:
            self._plan.refused(one, _now())


def _now() -> float:
    return asyncio.get_running_loop().time()
