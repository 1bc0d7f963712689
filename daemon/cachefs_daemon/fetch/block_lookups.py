"""Looks up blocks: in a tier, or else at their origin.

A look-up takes 10 us, also beside a busy thread, and to hand it to a thread takes 200 us. So look-ups for waiting
readers run on the event loop. They read pages of the snapshot and of the index that the mount has just read itself, so
the pages are in memory. If memory is short and pages had to come from a slow disk after all, look-ups go to threads for
a while. Reports of bad bytes always do, since they read the tiers.
"""

import math
import resource
import time
from collections.abc import Callable, Sequence
from typing import Final

from cachefs.block import BlockLocation
from cachefs.errors import CachefsError
from cachefs.messages import BlockRef
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.store.block_store import BlockStore

# Longest time in seconds for a look-up on the loop that had to wait for a disk.
MAX_LOOKUP_SECONDS: Final = 0.01
# Seconds for which threads look up after a longer one.
THREADS_SECONDS: Final = 10.0

LookupResult = BlockSource | BlockLocation | CachefsError


class BlockLookups:
    """Looks up blocks. Used on the event loop, except for `look_up` and `find_sources`, which run in threads."""

    def __init__(self, store: BlockStore, resolve: Callable[[BlockRef], BlockSource]) -> None:
        """resolve: returns the source of a block, or raises CachefsError. Called in any thread."""
        self._store = store
        self._resolve = resolve
        self._in_threads_until = -math.inf  # monotonic seconds
        self._disk_reads = count_disk_waits()  # at the last check

    def look_up_now(self, ref: BlockRef) -> LookupResult | None:
        """Return the result without blocking; None if only a thread can look it up."""
        began = time.monotonic()
        if ref.is_tier_slow:
            # A disk hangs, possibly that of the state directory.
            self._in_threads_until = began + THREADS_SECONDS
        if ref.failed_location or ref.is_tier_slow or began < self._in_threads_until:
            return None
        found: LookupResult
        try:
            source = self._resolve(ref)
            found = self._store.get(source.key) or source
        except CachefsError as error:
            found = error
        ended = time.monotonic()
        if ended - began > MAX_LOOKUP_SECONDS:
            self._note_slow(ended)
        return found

    def find_sources_now(self, refs: Sequence[BlockRef]) -> list[LookupResult]:
        """Return the sources of blocks that are in no tier, without blocking. Stops early if look-ups are slow: call
        `find_sources` in a thread for the rest of *refs*."""
        found: list[LookupResult] = []
        began = now = time.monotonic()
        while len(found) < len(refs) and now >= self._in_threads_until and now - began <= MAX_LOOKUP_SECONDS:
            found.append(self._source(refs[len(found)]))
            now = time.monotonic()
        if now - began > MAX_LOOKUP_SECONDS:
            self._note_slow(now)
        return found

    def find_sources(self, refs: Sequence[BlockRef]) -> list[LookupResult]:
        """Return the sources of blocks that are in no tier. Runs in a thread."""
        return [self._source(ref) for ref in refs]

    def _source(self, ref: BlockRef) -> LookupResult:
        try:
            return self._resolve(ref)
        except CachefsError as error:
            return error

    def _note_slow(self, now: float) -> None:
        """Switch to threads, if the delay was due to a disk. On a busy machine processes wait 40 ms for a processor at
        times, where threads would not help."""
        reads, self._disk_reads = self._disk_reads, count_disk_waits()
        if self._disk_reads > reads:
            self._in_threads_until = now + THREADS_SECONDS

    def look_up(self, refs: Sequence[BlockRef]) -> list[LookupResult]:
        """Look up each block. Runs in a thread."""
        return [self._look_up_one(ref) for ref in refs]

    def _look_up_one(self, ref: BlockRef) -> LookupResult:
        try:
            source = self._resolve(ref)
            if ref.is_tier_slow:
                self._store.drop_unresponsive(source.key, BlockLocation.unpack(ref.failed_location))
            elif ref.failed_location:
                self._store.repair(source.key, BlockLocation.unpack(ref.failed_location))
            return self._store.get(source.key) or source
        except CachefsError as error:
            return error
        except ValueError as error:
            return CachefsError(f"block {ref.number} of entry {ref.entry} was reported at an invalid location: {error}")


def count_disk_waits() -> int:
    """Return how often this thread has waited for a page from a disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
