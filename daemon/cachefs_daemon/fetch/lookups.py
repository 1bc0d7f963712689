"""Where a block is: in a tier, or else at its origin.

A look-up takes 10 us, also beside a busy thread, and to hand it to a thread 200 us. So for one who waits it is done on
the event loop. What it reads are pages of the snapshot and of the index that a mount has read itself a moment before it
asks, so they are in memory. Where they had to come from a slow disk all the same, since memory is short, look-ups go to
threads for a while. So do complaints of bad bytes, which read the tiers.
"""

import math
import resource
import time
from collections.abc import Callable, Sequence
from typing import Final

from cachefs.block import Location
from cachefs.errors import CachefsError
from cachefs.messages import BlockRef
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.store.block_store import BlockStore

# Seconds that a look-up on the loop may take where it had to wait for a disk.
LONGEST: Final = 0.01
# Seconds for which threads look up after one that took longer.
IN_THREADS: Final = 10.0

Found = BlockSource | Location | CachefsError


class LookUps:
    """Used on the event loop, but for `look_up` and `find_sources`."""

    def __init__(self, store: BlockStore, resolve: Callable[[BlockRef], BlockSource]) -> None:
        """resolve: where a block comes from; it raises CachefsError. It is called in any thread."""
        self._store = store
        self._resolve = resolve
        self._in_threads_until = -math.inf  # monotonic seconds
        self._disk_reads = disk_reads()  # when last asked

    def at_once(self, ref: BlockRef) -> Found | None:
        """Without waiting for anything. None where only a thread can tell."""
        began = time.monotonic()
        if ref.slow:
            # A disk hangs. It may be that of the state directory too.
            self._in_threads_until = began + IN_THREADS
        if ref.bad or ref.slow or began < self._in_threads_until:
            return None
        found: Found
        try:
            source = self._resolve(ref)
            found = self._store.get(source.key) or source
        except CachefsError as error:
            found = error
        ended = time.monotonic()
        if ended - began > LONGEST:
            self._note_slow(ended)
        return found

    def sources_at_once(self, refs: Sequence[BlockRef]) -> list[Found]:
        """Where blocks that are in no tier come from, without waiting for anything. `find_sources` is to be asked for
        those at the end of *refs* that are missing."""
        found: list[Found] = []
        began = now = time.monotonic()
        while len(found) < len(refs) and now >= self._in_threads_until and now - began <= LONGEST:
            found.append(self._source(refs[len(found)]))
            now = time.monotonic()
        if now - began > LONGEST:
            self._note_slow(now)
        return found

    def find_sources(self, refs: Sequence[BlockRef]) -> list[Found]:
        """In a thread: where blocks that are in no tier come from."""
        return [self._source(ref) for ref in refs]

    def _source(self, ref: BlockRef) -> Found:
        try:
            return self._resolve(ref)
        except CachefsError as error:
            return error

    def _note_slow(self, now: float) -> None:
        """On a busy machine the processor itself is waited for, 40 ms at times: threads would not help."""
        reads, self._disk_reads = self._disk_reads, disk_reads()
        if self._disk_reads > reads:
            self._in_threads_until = now + IN_THREADS

    def look_up(self, refs: Sequence[BlockRef]) -> list[Found]:
        """In a thread: of each block."""
        return [self._find(ref) for ref in refs]

    def _find(self, ref: BlockRef) -> Found:
        try:
            source = self._resolve(ref)
            if ref.slow:
                self._store.give_up(source.key, Location.unpack(ref.bad))
            elif ref.bad:
                self._store.repair(source.key, Location.unpack(ref.bad))
            return self._store.get(source.key) or source
        except CachefsError as error:
            return error
        except ValueError as error:
            return CachefsError(f"block {ref.number} of entry {ref.entry} was complained of wrongly: {error}")


def disk_reads() -> int:
    """How often this thread has waited for a page to come from a disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
