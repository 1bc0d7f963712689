"""Readahead: fetches blocks that no job has published, but that readers seem to approach
(cachefs.planning.prefetch.sequential_readahead).

Reads on demand come first, then published plans; and a guess never evicts a block that a policy would keep.
"""

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Final

import numpy as np

from cachefs.block import KEY_SIZE, BlockLocation, block_count, block_key, block_length
from cachefs.errors import CachefsError
from cachefs.job_messages import ReadaheadView
from cachefs.messages import BlockRef, ReadaheadCounts
from cachefs.planning.pagecache.push_plan import FileBlocks
from cachefs.planning.prefetch.readahead_budget import ReadaheadCounters, RuleCounts
from cachefs.planning.prefetch.sequential_readahead import (
    MAX_EXAMINED,
    MissingBlock,
    SequentialReadahead,
    StreamSearch,
    StreamSearchResult,
)
from cachefs.planning.prefetch.streams import StreamBlock, StreamOrder
from cachefs.snapshot import Snapshot
from cachefs_daemon.datasets.catalog import Dataset
from cachefs_daemon.fetch.block_fetch import BlockFetch, BlockFetchOutcome
from cachefs_daemon.fetch.concurrency_limiter import UNPLANNED
from cachefs_daemon.fetch.directory_readahead import DirectoryReadaheadFetcher
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.fetch.reader_callbacks import PageCacheCallbacks
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.storage import Storage

log = logging.getLogger(__name__)

# Shortest interval between two steps, in seconds; and between checks for idle streams.
_MIN_STEP_SECONDS: Final = 0.005
_FORGET_IDLE_SECONDS: Final = 1.0
# Seconds between two commands to a pusher, each of which costs 1 ms.
_PUSH_SECONDS: Final = 0.02
# Blocks fetched of a large file that no reader has reached yet.
_FIRST_BLOCKS: Final = 4
# Key that stands for an unplanned block.
_UNPLANNED_KEY: Final = b"\xff" * KEY_SIZE
# Fractions that guesses may take: of the room that is free or evictable, and of the permits while a plan is published.
_ROOM_DIVISOR: Final = 2
_PERMITS_DIVISOR: Final = 4
# Blocks that may be requested at once per permit, while no plan is published.
_QUEUED_PER_PERMIT: Final = 4
# With less room than this, in bytes, guesses become transient blocks.
_MIN_ROOM: Final = 16 << 20


def readahead_views(book: ReadaheadCounters, datasets: Iterable[Dataset]) -> list[ReadaheadView]:
    """Return the counts by snapshot and rule, most recent snapshots first."""
    names = {known.id: dataset.record.name for dataset in datasets for known in dataset.record.snapshots}
    return [
        ReadaheadView(dataset=names.get(snapshot, ""), snapshot=snapshot, rule=rule, counts=readahead_counts(guesses))
        for snapshot, rule, guesses in book.rows()
    ]


def readahead_counts(guesses: RuleCounts) -> ReadaheadCounts:
    """Convert to a message."""
    return ReadaheadCounts(**asdict(guesses))


class ReadaheadFetcher:
    """Feeds misses and reads into `SequentialReadahead` and `DirectoryReadaheadFetcher`, and fetches the blocks that
    they choose. Used on the event loop."""

    def __init__(
        self,
        fetcher: Fetcher,
        storage: Storage,
        threads: Threads,
        open_snapshot: Callable[[str], Snapshot | None],
        pages: PageCacheCallbacks,
    ) -> None:
        """open_snapshot: returns a held snapshot by its id."""
        self._fetcher = fetcher
        self._blocks = storage.blocks
        self._tiering = storage.tiering
        self._plan = storage.planning.plan
        self._threads = threads
        self._open_snapshot = open_snapshot
        self._page_caches = pages
        self.book = ReadaheadCounters()
        self._readahead = SequentialReadahead(self.book)
        self._directory_readahead = DirectoryReadaheadFetcher(
            fetcher, storage.blocks, threads, open_snapshot, self.book
        )
        self._in_flight = 0
        self._wakeup = asyncio.Event()
        self._directory_readahead.set_fetch_end_callback(self._wakeup.set)
        # By mount and snapshot: fetched guesses to be pushed there.
        self._fetched: dict[tuple[str, str], list[StreamBlock]] = {}
        # Monotonic times of the last push, and of the last check for idle streams.
        self._last_push = self._last_idle_check = -math.inf

    @property
    def counts(self) -> RuleCounts:
        return self._readahead.counts

    def note_demand(self, ref: BlockRef, size: int, key: bytes) -> None:
        """Record that a reader waits for a block of *size* bytes with this *key*; 0 and empty if the block is on the
        node by now."""
        try:
            snapshot = self._open_snapshot(ref.snapshot)
            files = snapshot.files if snapshot is not None else 0
            name, now = (ref.snapshot, ref.entry, ref.number), time.monotonic()
            if self._readahead.note_miss(name, size, files, now) or (
                size and self._directory_readahead.note_miss(name, size, key, now)
            ):
                self._wakeup.set()
            self._pass_on_sequential_reads(now)
            if size and ref.number == 0 and ref.start == 0:
                self._fetcher.in_flight_fetches.add_done_callback(
                    key, functools.partial(self._note_file_start, ref.snapshot, ref.entry)
                )
        except Exception:
            self._reset()

    def _note_file_start(self, snapshot: str, entry: int, fetch: BlockFetch) -> None:
        """Record that the first block of a file has arrived, for a reader that waited for its beginning."""
        try:
            goes_on = not fetch.source.is_whole and isinstance(fetch.outcome, BlockLocation)
            if goes_on and self._readahead.note_file_begun(snapshot, entry, time.monotonic()):
                self._wakeup.set()
        except Exception:
            self._reset()

    def note_reads(self, mount: str, accessed: Sequence[bytes]) -> None:
        """Record that blocks with these keys were read through *mount*."""
        try:
            now = time.monotonic()
            of_streams = self._readahead.note_reads(
                accessed, mount if self._page_caches.is_pushed_to(mount) else "", now
            )
            if self._directory_readahead.note_reads(accessed, now) or of_streams:
                self._wakeup.set()
            self._pass_on_sequential_reads(now)
        except Exception:
            self._reset()

    def _pass_on_sequential_reads(self, now: float) -> None:
        """Pass sequential reads on to the sweeper: a file read from its beginning is evidence of shards, though no
        reader waited."""
        for guess in self._readahead.take_continued():
            self._directory_readahead.note_reads([guess.key], now)  # if it was fetched for another reason too
            self._directory_readahead.note_miss(guess.name, guess.size, guess.key, now)

    def _reset(self) -> None:
        """Reset all state after a bug, which must not fail any read."""
        log.exception("readahead is reset after an internal error")
        self._readahead = SequentialReadahead(self.book)
        self._directory_readahead.reset()

    async def run(self) -> None:
        """Follow the streams as long as the daemon runs."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._step_timeout):
                    await self._wakeup.wait()
            self._wakeup.clear()
            try:
                now = time.monotonic()
                self._forget_idle(now)
                self._push_fetched(now)
                await self._step()
            except Exception:
                self._reset()
                await asyncio.sleep(_FORGET_IDLE_SECONDS)
            await asyncio.sleep(_MIN_STEP_SECONDS)

    def _forget_idle(self, now: float) -> None:
        if now - self._last_idle_check > _FORGET_IDLE_SECONDS:
            self._last_idle_check = now
            self._readahead.end_idle_streams(now)
            self._directory_readahead.update_background_rate(now)

    @property
    def _step_timeout(self) -> float | None:
        """Seconds until the next step without news."""
        if self._fetched:
            return _PUSH_SECONDS
        return _FORGET_IDLE_SECONDS if self._readahead.streams or not self._directory_readahead.is_idle else None

    async def _step(self) -> None:
        room, transient = await self._room_for_blocks()
        await self._follow_streams(room, transient=transient)
        # A transient block is evicted before it is read in another order than its stream's.
        await self._directory_readahead.run_step(
            0 if transient else room, asyncio.get_running_loop().time(), time.monotonic()
        )

    async def _follow_streams(self, room: int, *, transient: bool) -> None:
        """Search along the streams, and fetch the missing blocks. room: see `_room_for_blocks`."""
        if not transient:
            room //= _ROOM_DIVISOR
        permits = self._fetcher.ahead_permits
        most = (
            _QUEUED_PER_PERMIT * permits if self._plan.is_empty else max(1, permits // _PERMITS_DIVISOR)
        ) - self._in_flight
        if most <= 0:
            return
        looked = asyncio.get_running_loop().time()
        searches = self._readahead.next_searches(room, most, time.monotonic())
        if not searches:
            return
        for search, found in zip(
            searches, await self._threads.background(self._find_missing_of_all, searches), strict=True
        ):
            await self._start_fetches(self._readahead.choose_blocks(search, found), looked, transient=transient)

    async def _room_for_blocks(self) -> tuple[int, bool]:
        """Return (bytes, is_transient): bytes that are free or evictable and False, or bytes for transient blocks and
        True."""
        tiering = self._tiering.unlocked
        room = sum(tiering.free_by_tier)
        if room < _MIN_ROOM:
            room = max(room, await self._threads.background(self._evictable_room))
        if room < _MIN_ROOM and (transient := tiering.transient_readahead_bytes) > room:
            return transient, True
        return room, False

    def _evictable_room(self) -> int:
        """Return the evictable bytes. Run in a thread, as a writer may hold the lock."""
        with self._tiering as tiering:
            return tiering.room_for(_UNPLANNED_KEY)

    # --- fetches ------------------------------------------------------------------------------------------------------

    async def _start_fetches(self, guesses: Sequence[StreamBlock], looked: float, *, transient: bool) -> None:
        """Start fetches. looked: loop time at which none of the blocks was in any tier."""
        if not guesses:
            return
        refs = [BlockRef(*guess.name) for guess in guesses]
        self._in_flight += len(guesses)
        try:
            begun = await self._fetcher.start_fetches(refs, [UNPLANNED] * len(refs), looked, may_be_transient=transient)
        except BaseException:
            for guess in guesses:
                self._note_result(guess, None)
            raise
        for guess, begin in zip(guesses, begun, strict=True):
            if isinstance(begin, BlockFetch):
                begin.add_done_callback(functools.partial(self._on_fetch_done, guess))
            else:
                self._note_result(guess, begin)

    def _on_fetch_done(self, guess: StreamBlock, fetch: BlockFetch) -> None:
        self._note_result(guess, fetch.outcome)

    def _note_result(self, guess: StreamBlock, outcome: BlockFetchOutcome) -> None:
        self._in_flight -= 1
        self._wakeup.set()
        try:
            if isinstance(outcome, BlockLocation):
                for mount in self._readahead.note_landed(guess):
                    self._fetched.setdefault((mount, guess.name[0]), []).append(guess)
            else:
                self._readahead.note_undone(guess)
        except Exception:
            self._reset()

    def _push_fetched(self, now: float) -> None:
        if not self._fetched or now - self._last_push < _PUSH_SECONDS:
            return
        self._last_push = now
        fetched, self._fetched = self._fetched, {}
        for (mount, snapshot), guesses in fetched.items():
            entries = np.array([guess.name[1] for guess in guesses], np.int64)
            numbers = np.array([guess.name[2] for guess in guesses], np.int64)
            self._page_caches.push(mount, FileBlocks(snapshot, entries, numbers), sum(guess.size for guess in guesses))

    # --- searches, in threads -----------------------------------------------------------------------------------------

    def _find_missing_of_all(self, searches: Sequence[StreamSearch]) -> list[StreamSearchResult]:
        return [self._find_missing(search) for search in searches]

    def _find_missing(self, search: StreamSearch) -> StreamSearchResult:
        snapshot = self._open_snapshot(search.stream.snapshot)
        if snapshot is None:
            return StreamSearchResult((), 0, has_ended=True)
        find = (
            self._find_missing_in_listing
            if search.stream.order is StreamOrder.LISTING
            else self._find_missing_in_sequence
        )
        try:
            return find(snapshot, search)
        except CachefsError as error:
            log.debug("no readahead in snapshot %s: %s", snapshot.id, error)
            return StreamSearchResult((), 0, has_ended=True)

    def _find_missing_in_listing(self, snapshot: Snapshot, search: StreamSearch) -> StreamSearchResult:
        missing: list[MissingBlock] = []
        reached, size = search.after, 0
        parent = snapshot.entry(reached).parent
        for entry in snapshot.entries_after(reached, MAX_EXAMINED):
            if entry.parent != parent and not search.crosses_directories:
                return StreamSearchResult(missing, reached, has_ended=True)
            reached = entry.number
            blocks = range(0 if entry.is_dir else min(_FIRST_BLOCKS, block_count(entry.size, snapshot.block_size)))
            for one in self._missing_blocks_of_file(
                snapshot, (entry.number, entry.size, entry.content), blocks, reached
            ):
                missing.append(one)
                size += one.size
            if len(missing) >= search.max_blocks or size >= search.max_bytes:
                break
        return StreamSearchResult(missing, reached, has_ended=reached == snapshot.files + snapshot.directories)

    def _find_missing_in_sequence(self, snapshot: Snapshot, search: StreamSearch) -> StreamSearchResult:
        missing: list[MissingBlock] = []
        looked = size = 0
        for entry, number in search.blocks:
            length, content = snapshot.size_and_content(entry)
            if number >= block_count(length, snapshot.block_size):
                return StreamSearchResult(missing, looked, has_ended=True)
            looked += 1
            for one in self._missing_blocks_of_file(snapshot, (entry, length, content), (number,), looked):
                missing.append(one)
                size += one.size
            if len(missing) >= search.max_blocks or size >= search.max_bytes:
                break
        return StreamSearchResult(missing, looked, has_ended=not search.blocks)

    def _missing_blocks_of_file(
        self, snapshot: Snapshot, file: tuple[int, int, bytes], numbers: Sequence[int], reached: int
    ) -> Iterator[MissingBlock]:
        """Yield the missing blocks of a file. file: its entry, size and content id."""
        entry, size, content = file
        for number in numbers:
            key = block_key(content, number)
            if self._blocks.get(key) is None:
                yield MissingBlock(entry, number, key, block_length(size, snapshot.block_size, number), reached)
