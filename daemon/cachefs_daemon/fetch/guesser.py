"""Readahead: fetches blocks that no job has published, but that readers seem to approach
(cachefs.planning.prefetch.guessing).

Reads on demand come first, then published plans; and a guess never evicts a block that a policy would keep.
"""

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from cachefs.block import KEY_SIZE, Location, block_count, block_key, block_length
from cachefs.errors import CachefsError
from cachefs.messages import BlockRef
from cachefs.planning.pagecache.orders import FileBlocks
from cachefs.planning.prefetch.guess_counts import GuessBook, Guesses
from cachefs.planning.prefetch.guessing import LOOKED_AT, Found, Guessing, Missing, Search
from cachefs.planning.prefetch.streams import Guess, Way
from cachefs.snapshot import Snapshot
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.fetch.flights import Flight, Outcome
from cachefs_daemon.fetch.readers import PageCaches
from cachefs_daemon.fetch.sweeper import Sweeper
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.storage import Storage

log = logging.getLogger(__name__)

# Shortest interval between two steps, in seconds; and between checks for idle streams.
_FASTEST: Final = 0.005
_FORGET_SECONDS: Final = 1.0
# Seconds between two commands to a pusher, each of which costs 1 ms.
_PUSH_SECONDS: Final = 0.02
# Blocks fetched of a large file that no reader has reached yet.
_FIRST_BLOCKS: Final = 4
# Key that stands for an unplanned block.
_UNPLANNED: Final = b"\xff" * KEY_SIZE
# Fractions that guesses may take: of the room that is free or evictable, and of the slots while a plan is published.
_PART_OF_ROOM: Final = 2
_PART_OF_SLOTS: Final = 4
# Blocks that may be requested at once per slot, while no plan is published.
_QUEUED: Final = 4
# With less room than this, in bytes, guesses become transient blocks.
_LEAST_ROOM: Final = 16 << 20


class Guesser:
    """Feeds misses and reads into `Guessing` and `Sweeper`, and fetches the blocks that they choose. Used on the event
    loop."""

    def __init__(
        self,
        fetcher: Fetcher,
        storage: Storage,
        threads: Threads,
        held: Callable[[str], Snapshot | None],
        pages: PageCaches,
    ) -> None:
        """held: returns a held snapshot by its id."""
        self._fetcher = fetcher
        self._blocks = storage.blocks
        self._tiering = storage.tiering
        self._plan = storage.foresight.plan
        self._threads = threads
        self._held = held
        self._pages = pages
        self.book = GuessBook()
        self._guessing = Guessing(self.book)
        self._sweeper = Sweeper(fetcher, storage.blocks, threads, held, self.book)
        self._in_flight = 0
        self._news = asyncio.Event()
        self._sweeper.wake_by(self._news.set)
        # By mount and snapshot: fetched guesses to be pushed there.
        self._landed: dict[tuple[str, str], list[Guess]] = {}
        # Monotonic times of the last push, and of the last check for idle streams.
        self._pushed = self._forgot = -math.inf

    @property
    def counts(self) -> Guesses:
        return self._guessing.counts

    def asked(self, ref: BlockRef, size: int, key: bytes) -> None:
        """Record that a reader waits for a block of *size* bytes with this *key*; 0 and empty if the block is on the
        node by now."""
        try:
            snapshot = self._held(ref.snapshot)
            files = snapshot.files if snapshot is not None else 0
            name, now = (ref.snapshot, ref.entry, ref.number), time.monotonic()
            if self._guessing.missed(name, size, files, now) or (size and self._sweeper.missed(name, size, key, now)):
                self._news.set()
            self._tell_gone_on(now)
            if size and ref.number == 0 and ref.start == 0:
                self._fetcher.bringing.on_landing(key, functools.partial(self._entered, ref.snapshot, ref.entry))
        except Exception:
            self._begin_anew()

    def _entered(self, snapshot: str, entry: int, flight: Flight) -> None:
        """Record that the first block of a file has arrived, for a reader that waited for its beginning."""
        try:
            goes_on = not flight.source.is_whole and isinstance(flight.outcome, Location)
            if goes_on and self._guessing.entered(snapshot, entry, time.monotonic()):
                self._news.set()
        except Exception:
            self._begin_anew()

    def on_reads(self, mount: str, accessed: Sequence[bytes]) -> None:
        """Record that blocks with these keys were read through *mount*."""
        try:
            now = time.monotonic()
            of_streams = self._guessing.seen(accessed, mount if self._pages.takes(mount) else "", now)
            if self._sweeper.seen(accessed, now) or of_streams:
                self._news.set()
            self._tell_gone_on(now)
        except Exception:
            self._begin_anew()

    def _tell_gone_on(self, now: float) -> None:
        """Pass sequential reads on to the sweeper: a file read from its beginning is evidence of shards, though no
        reader waited."""
        for guess in self._guessing.take_gone_on():
            self._sweeper.seen([guess.key], now)  # if it was fetched for another reason too
            self._sweeper.missed(guess.name, guess.size, guess.key, now)

    def _begin_anew(self) -> None:
        """Reset all state after a bug, which must not fail any read."""
        log.exception("guessing begins anew")
        self._guessing = Guessing(self.book)
        self._sweeper.begin_anew()

    async def run(self) -> None:
        """Follow the streams as long as the daemon runs."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._patience):
                    await self._news.wait()
            self._news.clear()
            try:
                now = time.monotonic()
                self._forget_idle(now)
                self._push_landed(now)
                await self._step()
            except Exception:
                self._begin_anew()
                await asyncio.sleep(_FORGET_SECONDS)
            await asyncio.sleep(_FASTEST)

    def _forget_idle(self, now: float) -> None:
        if now - self._forgot > _FORGET_SECONDS:
            self._forgot = now
            self._guessing.forget_idle(now)
            self._sweeper.look_back(now)

    @property
    def _patience(self) -> float | None:
        """Seconds until the next step without news."""
        if self._landed:
            return _PUSH_SECONDS
        return _FORGET_SECONDS if self._guessing.streams or not self._sweeper.is_idle else None

    async def _step(self) -> None:
        room, transient = await self._room()
        await self._follow_streams(room, transient=transient)
        # A transient block is evicted before it is read in another order than its stream's.
        await self._sweeper.step(0 if transient else room, asyncio.get_running_loop().time(), time.monotonic())

    async def _follow_streams(self, room: int, *, transient: bool) -> None:
        """Search along the streams, and fetch the missing blocks. room: see `_room`."""
        if not transient:
            room //= _PART_OF_ROOM
        slots = self._fetcher.ahead_slots
        most = (_QUEUED * slots if self._plan.is_empty else max(1, slots // _PART_OF_SLOTS)) - self._in_flight
        if most <= 0:
            return
        looked = asyncio.get_running_loop().time()
        searches = self._guessing.search(room, most, time.monotonic())
        if not searches:
            return
        for search, found in zip(searches, await self._threads.background(self._find_all, searches), strict=True):
            await self._fetch(self._guessing.choose(search, found), looked, transient=transient)

    async def _room(self) -> tuple[int, bool]:
        """Return (bytes, is_transient): bytes that are free or evictable and False, or bytes for transient blocks and
        True."""
        tiering = self._tiering.unlocked
        room = sum(tiering.free_by_tier)
        if room < _LEAST_ROOM:
            room = max(room, await self._threads.background(self._room_to_be_made))
        if room < _LEAST_ROOM and (transient := tiering.transient_ahead) > room:
            return transient, True
        return room, False

    def _room_to_be_made(self) -> int:
        """Return the evictable bytes. Run in a thread, as a writer may hold the lock."""
        with self._tiering as tiering:
            return tiering.room_for(_UNPLANNED)

    # --- fetches ------------------------------------------------------------------------------------------------------

    async def _fetch(self, guesses: Sequence[Guess], looked: float, *, transient: bool) -> None:
        """Start fetches. looked: loop time at which none of the blocks was in any tier."""
        if not guesses:
            return
        refs = [BlockRef(*guess.name) for guess in guesses]
        self._in_flight += len(guesses)
        try:
            begun = await self._fetcher.start(refs, [math.inf] * len(refs), looked, transient=transient)
        except BaseException:
            for guess in guesses:
                self._ended(guess, None)
            raise
        for guess, begin in zip(guesses, begun, strict=True):
            if isinstance(begin, Flight):
                begin.on_landing(functools.partial(self._on_landing, guess))
            else:
                self._ended(guess, begin)

    def _on_landing(self, guess: Guess, flight: Flight) -> None:
        self._ended(guess, flight.outcome)

    def _ended(self, guess: Guess, outcome: Outcome) -> None:
        self._in_flight -= 1
        self._news.set()
        try:
            if isinstance(outcome, Location):
                for mount in self._guessing.landed(guess):
                    self._landed.setdefault((mount, guess.name[0]), []).append(guess)
            else:
                self._guessing.undone(guess)
        except Exception:
            self._begin_anew()

    def _push_landed(self, now: float) -> None:
        if not self._landed or now - self._pushed < _PUSH_SECONDS:
            return
        self._pushed = now
        landed, self._landed = self._landed, {}
        for (mount, snapshot), guesses in landed.items():
            entries = np.array([guess.name[1] for guess in guesses], np.int64)
            numbers = np.array([guess.name[2] for guess in guesses], np.int64)
            self._pages.push(mount, FileBlocks(snapshot, entries, numbers), sum(guess.size for guess in guesses))

    # --- searches, in threads -----------------------------------------------------------------------------------------

    def _find_all(self, searches: Sequence[Search]) -> list[Found]:
        return [self._find(search) for search in searches]

    def _find(self, search: Search) -> Found:
        snapshot = self._held(search.stream.snapshot)
        if snapshot is None:
            return Found((), 0, ended=True)
        find = self._find_files if search.stream.way is Way.LISTING else self._look
        try:
            return find(snapshot, search)
        except CachefsError as error:
            log.debug("nothing is guessed of snapshot %s: %s", snapshot.id, error)
            return Found((), 0, ended=True)

    def _find_files(self, snapshot: Snapshot, search: Search) -> Found:
        missing: list[Missing] = []
        reached, size = search.after, 0
        parent = snapshot.entry(reached).parent
        for entry in snapshot.entries_after(reached, LOOKED_AT):
            if entry.parent != parent and not search.crosses:
                return Found(missing, reached, ended=True)
            reached = entry.number
            blocks = range(0 if entry.is_dir else min(_FIRST_BLOCKS, block_count(entry.size, snapshot.block_size)))
            for one in self._missing(snapshot, (entry.number, entry.size, entry.content), blocks, reached):
                missing.append(one)
                size += one.size
            if len(missing) >= search.count or size >= search.size:
                break
        return Found(missing, reached, ended=reached == snapshot.files + snapshot.directories)

    def _look(self, snapshot: Snapshot, search: Search) -> Found:
        missing: list[Missing] = []
        looked = size = 0
        for entry, number in search.blocks:
            length, content = snapshot.file(entry)
            if number >= block_count(length, snapshot.block_size):
                return Found(missing, looked, ended=True)
            looked += 1
            for one in self._missing(snapshot, (entry, length, content), (number,), looked):
                missing.append(one)
                size += one.size
            if len(missing) >= search.count or size >= search.size:
                break
        return Found(missing, looked, ended=not search.blocks)

    def _missing(
        self, snapshot: Snapshot, file: tuple[int, int, bytes], numbers: Sequence[int], reached: int
    ) -> Iterator[Missing]:
        """Yield the missing blocks of a file. file: its entry, size and content id."""
        entry, size, content = file
        for number in numbers:
            key = block_key(content, number)
            if self._blocks.get(key) is None:
                yield Missing(entry, number, key, block_length(size, snapshot.block_size, number), reached)
