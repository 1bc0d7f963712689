"""Fetches the rest of files and directories that readers seem to want (cachefs.planning.prefetch.area_readahead).

A few blocks at a time, and only while no other read ahead waits for a permit.
"""

import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby

from cachefs.block import BlockLocation
from cachefs.errors import CachefsError
from cachefs.messages import BlockRef
from cachefs.planning.prefetch.area_readahead import AreaBlock, AreaReadahead, AreaSearch, AreaSearchResult, LocatedMiss
from cachefs.planning.prefetch.readahead_budget import BackgroundLimit, ReadaheadCounters
from cachefs.planning.prefetch.streams import FileBlockName
from cachefs.snapshot import Snapshot
from cachefs_daemon.fetch.area_index import AreaIndex
from cachefs_daemon.fetch.block_fetch import BlockFetch, BlockFetchOutcome
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.block_store import BlockStore

log = logging.getLogger(__name__)


class DirectoryReadaheadFetcher:
    """Feeds misses and reads into `AreaReadahead`, and fetches the blocks that it chooses. Used on the event loop."""

    def __init__(
        self,
        fetcher: Fetcher,
        blocks: BlockStore,
        threads: Threads,
        open_snapshot: Callable[[str], Snapshot | None],
        book: ReadaheadCounters,
    ) -> None:
        """open_snapshot: returns a held snapshot by its id."""
        self._fetcher = fetcher
        self._threads = threads
        self._open_snapshot = open_snapshot
        self._book = book
        self._area_index = AreaIndex(lambda key: blocks.get(key) is not None)
        self._readahead = AreaReadahead(book)
        self._background = BackgroundLimit(-math.inf)
        # Blocks to fetch, with the loop time at which no tier had them.
        self._queue: deque[tuple[AreaBlock, float]] = deque()
        self._in_flight = 0  # bytes
        self._on_fetch_end: Callable[[], None] = lambda: None  # called when a fetch has ended

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do until news arrives."""
        return not self._readahead.active_areas and not self._queue

    def reset(self) -> None:
        """Reset all state, after a bug."""
        self._readahead = AreaReadahead(self._book)
        self._queue.clear()

    def set_fetch_end_callback(self, on_end: Callable[[], None]) -> None:
        """Set the function that is called whenever a fetch has ended."""
        self._on_fetch_end = on_end

    def note_miss(self, name: FileBlockName, size: int, key: bytes, now: float) -> bool:
        """Record that a reader waits for a block that no stream explains. Returns whether there is something to do."""
        return self._readahead.note_miss(name, size, key, now)

    def note_reads(self, keys: Sequence[bytes], now: float) -> bool:
        """Record reads of blocks. Returns whether there is something to do."""
        return self._readahead.note_reads(keys, now)

    def update_background_rate(self, now: float) -> None:
        """Measure the background rate and forget idle sweeps. Call about once a second."""
        self._background.update_rate(self._fetcher.fetched_bytes, now)
        self._readahead.end_idle_areas(now)

    async def run_step(self, room: int, looked: float, now: float) -> None:
        """Place new misses, search for missing blocks, and fetch some. room: bytes that are free or evictable; looked:
        loop time of the search."""
        missed = self._readahead.take_misses()
        if missed:
            self._readahead.note_located(await self._threads.background(self._find_areas, missed), now)
        if self._fetcher.has_queued_ahead:
            return
        if not self._queue:
            for search in self._readahead.next_searches(room, self._max_bytes_in_flight, now):
                found = await self._threads.background(self._find_missing, search)
                self._queue.extend((swept, looked) for swept in self._readahead.choose_blocks(search, found))
        await self._start_queued_fetches()

    @property
    def _max_bytes_in_flight(self) -> int:
        return self._background.max_in_flight(has_waiting_reader=self._fetcher.has_waiting_reader)

    async def _start_queued_fetches(self) -> None:
        """Start as many queued fetches as may be in flight."""
        most, chosen, oldest = self._max_bytes_in_flight, list[AreaBlock](), math.inf
        while self._queue and (self._in_flight < most):
            swept, looked = self._queue.popleft()
            chosen.append(swept)
            oldest = min(oldest, looked)
            self._in_flight += swept.size
        if not chosen:
            return
        try:
            begun = await self._fetcher.start_fetches(
                [BlockRef(*swept.name) for swept in chosen], [math.inf] * len(chosen), oldest
            )
        except BaseException:
            for swept in chosen:
                self._note_result(swept, None)
            raise
        for swept, begin in zip(chosen, begun, strict=True):
            if isinstance(begin, BlockFetch):
                begin.add_done_callback(functools.partial(self._on_fetch_done, swept))
            else:
                self._note_result(swept, begin)

    def _on_fetch_done(self, swept: AreaBlock, fetch: BlockFetch) -> None:
        self._note_result(swept, fetch.outcome)

    def _note_result(self, swept: AreaBlock, outcome: BlockFetchOutcome) -> None:
        self._in_flight -= swept.size
        try:
            if isinstance(outcome, BlockLocation):
                self._readahead.note_landed(swept)
            else:
                self._readahead.note_undone(swept)
        except Exception:
            log.exception("readahead is reset after an internal error")
            self.reset()
        self._on_fetch_end()

    # --- work in threads ------------------------------------------------------------------------------------------

    def _find_areas(self, missed: Sequence[tuple[FileBlockName, int]]) -> list[LocatedMiss]:
        placed: list[LocatedMiss] = []
        for snapshot_id, some in groupby(missed, key=lambda one: one[0][0]):
            snapshot = self._open_snapshot(snapshot_id)
            if snapshot is None:
                continue
            try:
                placed += self._area_index.areas_of_blocks(snapshot, some)
            except CachefsError as error:
                log.debug("no readahead in snapshot %s: %s", snapshot_id, error)
        return placed

    def _find_missing(self, search: AreaSearch) -> AreaSearchResult:
        snapshot = self._open_snapshot(search.area.area.snapshot)
        if snapshot is None:
            return AreaSearchResult(len(search.places), ())
        try:
            return self._area_index.find_missing_blocks(snapshot, search)
        except CachefsError as error:
            log.debug("no readahead in snapshot %s: %s", snapshot.id, error)
            return AreaSearchResult(len(search.places), ())
