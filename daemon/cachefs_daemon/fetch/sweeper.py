"""Fetches the rest of files and directories that readers seem to want (cachefs.planning.prefetch.sweeping).

A few blocks at a time, and only while no other read ahead waits for a slot.
"""

import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby

from cachefs.block import Location
from cachefs.errors import CachefsError
from cachefs.messages import BlockRef
from cachefs.planning.prefetch.background import Background
from cachefs.planning.prefetch.guess_counts import GuessBook
from cachefs.planning.prefetch.streams import Name
from cachefs.planning.prefetch.sweeping import AreaFound, AreaSearch, Placed, Sweeping, Swept
from cachefs.snapshot import Snapshot
from cachefs_daemon.fetch.areas import Areas
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.fetch.flights import Flight, Outcome
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.block_store import BlockStore

log = logging.getLogger(__name__)


class Sweeper:
    """Feeds misses and reads into `Sweeping`, and fetches the blocks that it chooses. Used on the event loop."""

    def __init__(
        self,
        fetcher: Fetcher,
        blocks: BlockStore,
        threads: Threads,
        held: Callable[[str], Snapshot | None],
        book: GuessBook,
    ) -> None:
        """held: returns a held snapshot by its id."""
        self._fetcher = fetcher
        self._threads = threads
        self._held = held
        self._book = book
        self._areas = Areas(lambda key: blocks.get(key) is not None)
        self._sweeping = Sweeping(book)
        self._background = Background(-math.inf)
        # Blocks to fetch, with the loop time at which no tier had them.
        self._queue: deque[tuple[Swept, float]] = deque()
        self._in_flight = 0  # bytes
        self._on_end: Callable[[], None] = lambda: None  # called when a fetch has ended

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do until news arrives."""
        return not self._sweeping.sweeps and not self._queue

    def begin_anew(self) -> None:
        """Reset all state, after a bug."""
        self._sweeping = Sweeping(self._book)
        self._queue.clear()

    def wake_by(self, on_end: Callable[[], None]) -> None:
        """Set the function that is called whenever a fetch has ended."""
        self._on_end = on_end

    def missed(self, name: Name, size: int, key: bytes, now: float) -> bool:
        """Record that a reader waits for a block that no stream explains. Returns whether there is something to do."""
        return self._sweeping.missed(name, size, key, now)

    def seen(self, keys: Sequence[bytes], now: float) -> bool:
        """Record reads of blocks. Returns whether there is something to do."""
        return self._sweeping.seen(keys, now)

    def look_back(self, now: float) -> None:
        """Measure the background rate and forget idle sweeps. Call about once a second."""
        self._background.measure(self._fetcher.fetched_bytes, now)
        self._sweeping.forget_idle(now)

    async def step(self, room: int, looked: float, now: float) -> None:
        """Place new misses, search for missing blocks, and fetch some. room: bytes that are free or evictable; looked:
        loop time of the search."""
        missed = self._sweeping.take_missed()
        if missed:
            self._sweeping.placed(await self._threads.background(self._place, missed), now)
        if self._fetcher.has_queue:
            return
        if not self._queue:
            for search in self._sweeping.search(room, self._most, now):
                found = await self._threads.background(self._find, search)
                self._queue.extend((swept, looked) for swept in self._sweeping.choose(search, found))
        await self._fetch_some()

    @property
    def _most(self) -> int:
        return self._background.most(is_waited_for=self._fetcher.is_waited_for)

    async def _fetch_some(self) -> None:
        """Start as many queued fetches as may be in flight."""
        most, chosen, oldest = self._most, list[Swept](), math.inf
        while self._queue and (self._in_flight < most):
            swept, looked = self._queue.popleft()
            chosen.append(swept)
            oldest = min(oldest, looked)
            self._in_flight += swept.size
        if not chosen:
            return
        try:
            begun = await self._fetcher.start(
                [BlockRef(*swept.name) for swept in chosen], [math.inf] * len(chosen), oldest
            )
        except BaseException:
            for swept in chosen:
                self._ended(swept, None)
            raise
        for swept, begin in zip(chosen, begun, strict=True):
            if isinstance(begin, Flight):
                begin.on_landing(functools.partial(self._on_landing, swept))
            else:
                self._ended(swept, begin)

    def _on_landing(self, swept: Swept, flight: Flight) -> None:
        self._ended(swept, flight.outcome)

    def _ended(self, swept: Swept, outcome: Outcome) -> None:
        self._in_flight -= swept.size
        try:
            if isinstance(outcome, Location):
                self._sweeping.landed(swept)
            else:
                self._sweeping.undone(swept)
        except Exception:
            log.exception("guessing begins anew")
            self.begin_anew()
        self._on_end()

    # --- work in threads ------------------------------------------------------------------------------------------

    def _place(self, missed: Sequence[tuple[Name, int]]) -> list[Placed]:
        placed: list[Placed] = []
        for snapshot_id, some in groupby(missed, key=lambda one: one[0][0]):
            snapshot = self._held(snapshot_id)
            if snapshot is None:
                continue
            try:
                placed += self._areas.place(snapshot, some)
            except CachefsError as error:
                log.debug("nothing is guessed of snapshot %s: %s", snapshot_id, error)
        return placed

    def _find(self, search: AreaSearch) -> AreaFound:
        snapshot = self._held(search.sweep.area.snapshot)
        if snapshot is None:
            return AreaFound(len(search.places), ())
        try:
            return self._areas.find(snapshot, search)
        except CachefsError as error:
            log.debug("nothing is guessed of snapshot %s: %s", snapshot.id, error)
            return AreaFound(len(search.places), ())
