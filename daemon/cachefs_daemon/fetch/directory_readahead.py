"""Fetches the rest of files and directories that readers seem to want (cachefs.planning.prefetch.area_readahead).

A few blocks at a time, and only while no other read ahead waits for a permit.
"""

import functools
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final

from cachefs.block import BlockLocation, block_count, block_key, block_length
from cachefs.errors import CachefsError, NotFound
from cachefs.messages import BlockRef
from cachefs.planning.prefetch.area_readahead import (
    MAX_BLOCKS_OF_FILE,
    AreaBlock,
    AreaPosition,
    AreaReadahead,
    AreaSearch,
    AreaSearchResult,
    LocatedMiss,
    MissingAreaBlock,
)
from cachefs.planning.prefetch.areas import Area
from cachefs.planning.prefetch.readahead_budget import BackgroundLimit, ReadaheadCounters, ReadaheadRule
from cachefs.planning.prefetch.streams import FileBlockName
from cachefs.snapshot import ROOT, Entry, Snapshot
from cachefs_daemon.fetch.block_fetch import BlockFetch, BlockFetchOutcome
from cachefs_daemon.fetch.concurrency_limiter import UNPLANNED
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.block_store import BlockStore

# Directory levels above a file that are examined: train/CLASS/VIDEO/FRAME.
_LEVELS: Final = 3
# Entries at each end of a directory that are searched for subdirectories.
_ENTRIES_SEARCHED: Final = 32
# Spans kept in the cache.
_MAX_SPANS: Final = 4096

# Number of the first entry, and of the one after the last.
_Span = tuple[int, int]
log = logging.getLogger(__name__)


class AreaIndex:
    """Maps blocks of a snapshot to the areas that contain them, and finds the blocks of an area that are missing on
    this node, with a cache of directory spans. Used by one thread at a time.

    An area is a file, or the files of a directory, as defined in cachefs.planning.prefetch.area_readahead.
    """

    def __init__(self, is_here: Callable[[bytes], bool]) -> None:
        """is_here: returns whether the block with this key is in a tier."""
        self._is_here = is_here
        self._spans: OrderedDict[tuple[str, int, int], _Span] = OrderedDict()  # by snapshot, directory, and depth

    # --- areas of blocks ------------------------------------------------------------------------------------------

    def areas_of_blocks(self, snapshot: Snapshot, missed: Iterable[tuple[FileBlockName, int]]) -> list[LocatedMiss]:
        """Return the areas of blocks of the snapshot, given by name and size. Raises CachefsError."""
        return [self._areas_of_block(snapshot, name, size) for name, size in missed]

    def _areas_of_block(self, snapshot: Snapshot, name: FileBlockName, size: int) -> LocatedMiss:
        _, number, block = name
        entry = snapshot.entry(number)
        blocks = block_count(entry.size, snapshot.block_size)
        positions = []
        if blocks > 1:
            positions.append(AreaPosition(Area(ReadaheadRule.REST, snapshot.id, number, blocks), block, 0))
        if block == 0 or (blocks > 1 and block == 1):
            positions += self._positions_of_file(snapshot, entry, has_blocks=blocks > 1, is_begin=block == 0)
        return LocatedMiss(name, size, entry.size, positions)

    def _positions_of_file(
        self, snapshot: Snapshot, entry: Entry, *, has_blocks: bool, is_begin: bool
    ) -> Iterator[AreaPosition]:
        first, end = self._span(snapshot, entry.parent, 1)
        if has_blocks:
            yield AreaPosition(
                Area(ReadaheadRule.SHARDS, snapshot.id, first, end - first), entry.number - first, entry.number
            )
        if not is_begin:
            return
        yield AreaPosition(Area(ReadaheadRule.SET, snapshot.id, first, end - first), entry.number - first, entry.number)
        above, known = entry.parent, {(first, end)}
        for depth in range(2, _LEVELS + 1):
            if above == ROOT:
                return
            directory, above = above, snapshot.entry(above).parent
            first, end = span = self._span(snapshot, above, depth)
            if span not in known and first <= entry.number < end:
                known.add(span)
                yield AreaPosition(
                    Area(ReadaheadRule.SET, snapshot.id, first, end - first), entry.number - first, directory
                )

    def _span(self, snapshot: Snapshot, directory: int, depth: int) -> _Span:
        """Return the entries *depth* levels below a directory. Their numbers are consecutive."""
        key = (snapshot.id, directory, depth)
        span = self._spans.get(key)
        if span is None:
            span = self._spans[key] = self._find_span(snapshot, directory, depth)
            if len(self._spans) > _MAX_SPANS:
                self._spans.popitem(last=False)
        self._spans.move_to_end(key)
        return span

    def _find_span(self, snapshot: Snapshot, directory: int, depth: int) -> _Span:
        entry = snapshot.entry(directory)
        begin, end = entry.first_child, entry.first_child + entry.child_count
        if depth == 1:
            return begin, end
        first = self._first_span_below(snapshot, range(begin, min(end, begin + _ENTRIES_SEARCHED)), depth - 1)
        last = self._first_span_below(snapshot, range(end - 1, max(begin, end - _ENTRIES_SEARCHED) - 1, -1), depth - 1)
        return (first[0], last[1]) if first is not None and last is not None else (0, 0)

    def _first_span_below(self, snapshot: Snapshot, entries: Iterable[int], depth: int) -> _Span | None:
        """Return the span at *depth* below the first of the *entries* that has one."""
        for number in entries:
            if snapshot.entry(number).is_dir:
                first, end = self._span(snapshot, number, depth)
                if end > first:
                    return first, end
        return None

    # --- missing blocks -------------------------------------------------------------------------------------------

    def find_missing_blocks(self, snapshot: Snapshot, search: AreaSearch) -> AreaSearchResult:
        """Find missing blocks of an area. Raises CachefsError."""
        area, missing, looked, size = search.area.area, list[MissingAreaBlock](), 0, 0
        for position in search.positions:
            if size >= search.max_bytes:
                break
            looked += 1
            file, numbers = (
                (area.first, (position,)) if area.rule is ReadaheadRule.REST else (area.first + position, None)
            )
            for one in self._missing_blocks_of_file(snapshot, position, file, numbers):
                missing.append(one)
                size += one.size
        return AreaSearchResult(looked, missing)

    def _missing_blocks_of_file(
        self, snapshot: Snapshot, position: int, file: int, numbers: Sequence[int] | None
    ) -> Iterator[MissingAreaBlock]:
        """Yield missing blocks of a file. numbers: the blocks to check; None: the first MAX_BLOCKS_OF_FILE."""
        try:
            length, content = snapshot.size_and_content(file)
        except NotFound:
            return  # a directory
        if numbers is None:
            numbers = range(min(MAX_BLOCKS_OF_FILE, block_count(length, snapshot.block_size)))
        for number in numbers:
            key = block_key(content, number)
            if not self._is_here(key):
                yield MissingAreaBlock(position, file, number, key, block_length(length, snapshot.block_size, number))


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
                [BlockRef(*swept.name) for swept in chosen], [UNPLANNED] * len(chosen), oldest
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
            return AreaSearchResult(len(search.positions), ())
        try:
            return self._area_index.find_missing_blocks(snapshot, search)
        except CachefsError as error:
            log.debug("no readahead in snapshot %s: %s", snapshot.id, error)
            return AreaSearchResult(len(search.positions), ())
