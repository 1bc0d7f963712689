"""Bringing what the plan says will be read, before it is read: earliest deadline first, on two levels.

From the origins to the node: into room that is free, as far ahead as the plan goes; where others must give way, no
further ahead than Little's law asks for (what is read during the origin's latency, times a safety factor), because what
is evicted early might have been evicted better: every block that is read meanwhile is needed only next epoch. Further
only where the origin's bandwidth would not suffice later (see cachefs.planning.prefetch.backlog). So at the end of each
step nothing has gone that is needed sooner than what came for it.

From the SSD tier to memory: into free room of the memory tier, and beyond that shortly ahead into the kernel's page
cache, from where the mount reads without waiting. A copy into a full memory tier would push as much back to the SSD,
and write the whole dataset to it in every epoch.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cachefs.block import Location
from cachefs.errors import CachefsError
from cachefs.messages import BlockRef
from cachefs.planning.blocks.presence import ABSENT, IN_SSD, Presence
from cachefs.planning.eviction.tiering import Tiering
from cachefs.planning.prefetch import backlog
from cachefs.planning.prefetch.backlog import Backlog, Bandwidth
from cachefs.planning.prefetch.lookahead import Lookahead, Name, Upcoming
from cachefs.planning.sequences.plan import Plan
from cachefs_daemon.fetch.fetcher import Fetcher, Outcome
from cachefs_daemon.fetch.slots import FetchSlots
from cachefs_daemon.runtime.locked import Locked
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.block_store import BlockStore

log = logging.getLogger(__name__)

# A step at least, and at most, so often (in seconds).
SLOWEST: Final = 0.05
FASTEST: Final = 0.005
LONGEST_WINDOW: Final = 60.0
# Blocks that were evicted, refused or failed are looked at again after a while.
LOOK_AGAIN: Final = 1.0
# A block that could not be had is not asked for again at once.
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 30.0
SSD_WINDOW: Final = 1.0
SSD_BLOCKS: Final = 256


@dataclass(frozen=True, slots=True)
class PrefetchSettings:
    """safety: times the latency that room is made ahead; memory_ahead: bytes read ahead from SSD at once; max_bytes:
    bytes asked of origins at once."""

    enabled: bool
    safety: float
    memory_ahead: int
    max_bytes: int


class Prefetcher:
    """margin: seconds by which readers may be ahead of where the plan has them; fetched: told of (consumer, bytes) that
    came for its sake; pushing: pages are pushed to mounts straight from the SSD tier, so that a copy in memory would be
    one too many."""

    def __init__(
        self,
        plan: Plan,
        presence: Presence,
        tiering: Locked[Tiering],
        blocks: BlockStore,
        fetcher: Fetcher,
        gate: FetchSlots,
        threads: Threads,
        settings: PrefetchSettings,
        margin: Callable[[], float],
        fetched: Callable[[str, int], None],
        pushing: Callable[[], bool],
    ) -> None:
        self._plan = plan
        self._presence = presence
        self._tiering = tiering
        self._blocks = blocks
        self._fetcher = fetcher
        self._threads = threads
        self._settings = settings
        self._margin = margin
        self._fetched = fetched
        self._pushing = pushing
        # None more than may read at once: what waits at the gate keeps the deadline it came with, and while estimates
        # of the rate grow, all that comes later would overtake it.
        self._max_flights = gate.ahead_slots
        self._some_time = Lookahead(self._plan, ABSENT)
        self._soon = Lookahead(self._plan, ABSENT)
        self._in_time = Lookahead(self._plan, ABSENT)
        self._backlog: Backlog | None = None
        self._bandwidth = Bandwidth()
        self._some_time_on_ssd = Lookahead(self._plan, IN_SSD)
        self._soon_on_ssd = Lookahead(self._plan, IN_SSD)
        self._flights: dict[Name, int] = {}
        self._flying = 0
        self._paused: dict[Name, float] = {}
        self._pause = FIRST_PAUSE
        self._looked = -math.inf
        self._news = asyncio.Event()

    @property
    def window(self) -> float:
        """Seconds ahead of the readers within which others give way."""
        latency = self._fetcher.latency + 2 * self._fetcher.spread
        return min(LONGEST_WINDOW, self._margin() + self._settings.safety * latency)

    def wake(self) -> None:
        """Somebody has read on, or something has come."""
        self._news.set()

    async def run(self) -> None:
        """As long as the daemon."""
        if self._settings.enabled:
            await asyncio.gather(self._repeat(self._from_origins), self._repeat(self._from_ssd))

    async def _repeat(self, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                if not self._plan.is_empty:
                    await step()
                await asyncio.sleep(FASTEST)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SLOWEST):
                        await self._news.wait()
            except CachefsError as error:
                log.warning("prefetching pauses: %s", error)
                await asyncio.sleep(FIRST_PAUSE)
            except Exception:
                log.exception("prefetching pauses")
                await asyncio.sleep(FIRST_PAUSE)

    # --- from the origins ---------------------------------------------------------------------------------------------

    async def _from_origins(self) -> None:
        self._news.clear()
        now = asyncio.get_running_loop().time()
        if now - self._looked > LOOK_AGAIN:
            self._looked = now
            self._some_time.rewind()
            self._paused = {name: until for name, until in self._paused.items() if until > now}
            self._look_for_backlog()
        free = sum(self._tiering.unlocked.free_by_tier) - self._flying
        if free > 0:
            chosen = self._choose(self._some_time, math.inf, free)
            await self._fetch(await self._within_limits(chosen, making_room=False))
        # The window is short, and what is in it changes: it is looked at afresh.
        self._soon.rewind()
        chosen = self._choose(self._soon, self.window, self._settings.max_bytes)
        if chosen:
            await self._fetch_for_others(chosen, chosen[-1].snapshot, chosen[-1].number, spared=0)
        if self._backlog is not None and self._backlog.seconds > self.window:
            chosen = self._choose(self._in_time, self._backlog.seconds, self._settings.max_bytes)
            # Room is made in steps, which must not reach what is read before: that would be missing again.
            spared = self._tiering.unlocked.step
            await self._fetch_for_others(chosen, self._backlog.snapshot, self._backlog.last, spared)
        if len(self._flights) < self._max_flights and self._flying < self._settings.max_bytes // 2:
            self._bandwidth.idle()

    def _look_for_backlog(self) -> None:
        self._bandwidth.measure(self._fetcher.fetched_bytes)
        self._backlog = backlog.find(self._plan, self._presence.states, self._bandwidth.value)
        self._in_time.rewind()

    async def _fetch_for_others(self, chosen: Sequence[Upcoming], snapshot: str, last: int, spared: int) -> None:
        """As far as there is room, or what is needed after the *last* one gives way; all but *spared* bytes of it."""
        space = self._plan.spaces.get(snapshot)
        if not chosen or space is None:
            return
        room = await self._threads.run(self._room_for, space.key(last)) - self._flying - spared
        ends = itertools.accumulate(one.size for one in chosen)
        fitting = [one for one, end in zip(chosen, ends, strict=True) if end <= room]
        await self._fetch(await self._within_limits(fitting, making_room=True))

    def _room_for(self, key: bytes, snapshot: str = "") -> int:
        with self._tiering as tiering:
            return tiering.room_for(key, snapshot)

    def _choose(self, lookahead: Lookahead, seconds: float, room: int) -> list[Upcoming]:
        """Blocks to fetch now, soonest first, of at most *room* bytes."""
        slots = self._max_flights - len(self._flights)
        room = min(room, self._settings.max_bytes - self._flying)
        if slots <= 0 or room <= 0:
            return []
        known = self._flights.keys() | self._paused.keys()
        found = lookahead.take(self._presence.states, seconds, slots, room, known)
        if found and found[0].size > room:
            lookahead.rewind()  # it is to be given again
            return []
        return self._unread(found)

    async def _within_limits(self, chosen: Sequence[Upcoming], *, making_room: bool) -> list[Upcoming]:
        """Those that their datasets' shares of the tiers have room for, or would make it for."""
        last = {one.snapshot: one for one in chosen if self._tiering.unlocked.quotas.allowance(one.snapshot) < math.inf}
        left: dict[str, float] = {}
        for snapshot, one in last.items():
            room = self._tiering.unlocked.quotas.allowance(snapshot)
            if making_room:
                room = await self._threads.run(self._room_for, self._keys([one])[0], snapshot)
            left[snapshot] = room - sum(size for name, size in self._flights.items() if name[0] == snapshot)
        kept = []
        for one in chosen:
            left[one.snapshot] = left.get(one.snapshot, math.inf) - one.size
            if left[one.snapshot] >= 0:
                kept.append(one)
        return kept

    def _unread(self, found: Sequence[Upcoming]) -> list[Upcoming]:
        """Without blocks that were read before their turn: their next read is later than it seems."""
        kept: list[Upcoming] = []
        for snapshot, group in itertools.groupby(found, key=lambda one: one.snapshot):
            blocks = list(group)
            ids = np.array([one.number for one in blocks], np.int32)
            due = self._plan.next_use_of(snapshot, ids)
            kept += [one for one, seconds in zip(blocks, due.tolist(), strict=True) if seconds <= one.seconds + 1e-6]
        return kept

    async def _fetch(self, chosen: Sequence[Upcoming]) -> None:
        if not chosen:
            return
        now = asyncio.get_running_loop().time()
        for one in chosen:
            self._flights[one.snapshot, one.number] = one.size
            self._flying += one.size
        refs = [ref for one in chosen for ref in self._refs(one)]
        try:
            begun = await self._fetcher.start(refs, [now + one.seconds for one in chosen])
        except BaseException:
            for one in chosen:
                self._forget(one)
            raise
        for one, begin in zip(chosen, begun, strict=True):
            if isinstance(begin, asyncio.Task):
                begin.add_done_callback(functools.partial(self._landed, one))
            else:
                self._ended(one, begin)

    def _refs(self, one: Upcoming) -> list[BlockRef]:
        entries, numbers = self._plan.spaces[one.snapshot].refs(np.array([one.number], np.int32))
        return [BlockRef(one.snapshot, int(entries[0]), int(numbers[0]))]

    def _landed(self, one: Upcoming, task: "asyncio.Task[Outcome]") -> None:
        if task.cancelled():
            self._forget(one)
            return
        outcome = task.result()
        if isinstance(outcome, Location):
            self._fetched(one.consumer, one.size)
        self._ended(one, outcome)
        self.wake()

    def _ended(self, one: Upcoming, outcome: Outcome) -> None:
        self._forget(one)
        if isinstance(outcome, Location):
            self._pause = FIRST_PAUSE
            return
        # What was refused was about to be evicted for something sooner.
        pause = LOOK_AGAIN if outcome is None else self._pause
        self._paused[one.snapshot, one.number] = asyncio.get_running_loop().time() + pause
        if outcome is not None:
            self._pause = min(LONGEST_PAUSE, self._pause * 1.1)

    def _forget(self, one: Upcoming) -> None:
        self._flying -= self._flights.pop((one.snapshot, one.number), 0)

    # --- from the SSD tier --------------------------------------------------------------------------------------------

    async def _from_ssd(self) -> None:
        free = self._tiering.unlocked.free_by_tier
        if len(free) < 2 or self._pushing():
            await asyncio.sleep(LOOK_AGAIN)
            return
        now = asyncio.get_running_loop().time()
        if free[0] > 0:
            found = self._some_time_on_ssd.take(self._presence.states, math.inf, SSD_BLOCKS, free[0])
            await self._threads.background(self._blocks.promote, self._keys(found))
        found = self._soon_on_ssd.take(
            self._presence.states, self._margin() + SSD_WINDOW, SSD_BLOCKS, self._settings.memory_ahead
        )
        await self._threads.background(self._blocks.read_ahead, self._keys(found))
        if now - self._looked < SLOWEST:
            self._some_time_on_ssd.rewind()
            self._soon_on_ssd.rewind()

    def _keys(self, found: Sequence[Upcoming]) -> list[bytes]:
        return [self._plan.spaces[one.snapshot].keys(np.array([one.number], np.int32))[0] for one in found]
