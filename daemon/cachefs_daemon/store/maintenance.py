"""The store's housekeeping: tiers above their limits, expired blocks, and nearly empty segments."""

import errno
import functools
import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from cachefs.block import MEMORY, SSD, BlockLocation
from cachefs.planning.eviction.tiering import Tiering
from cachefs_daemon.runtime.locked import Locked
from cachefs_daemon.runtime.offload import OffloadThread
from cachefs_daemon.store.block_store import BlockStore
from cachefs_daemon.store.index_writer import IndexWriter
from cachefs_daemon.store.segment_writer import span
from cachefs_daemon.store.tier import Tier
from cachefs_daemon.store.transfers import (
    COPY_BATCH,
    DEMOTE_BATCH,
    YIELD_SECONDS,
    Transfers,
    batches,
    byte_portions,
)

_log = logging.getLogger(__name__)

# Time for copying in one call: on a disk of 200 MB/s some 200 MB.
COMPACTION_SECONDS: Final = 1.0
# Time for moving what a squeezed memory tier evicts to the SSD tier; the rest is dropped, since other programs may take
# the machine's memory faster than the disk writes.
DEMOTION_SECONDS: Final = 2.0
# A disk that takes longer than this for the blocks that move together, 64 MiB with blocks of 4 MiB, is treated like one
# that hangs.
_DEMOTION_TIMEOUT: Final = 2.0


@dataclass(slots=True)
class _FoundBlocks:
    missing: int  # bytes of blocks still to be found
    keys: list[bytes] = field(default_factory=list)

    def add(self, key: bytes, size: int) -> None:
        if self.missing > 0:
            self.keys.append(key)
            self.missing -= size


class Maintenance:
    """Keeps the store in order. Blocking. One call of a method at a time works, for each tier where it takes one;
    others return at once. Each may hang as long as the disk of an SSD tier does, except those for the memory tier."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        index: IndexWriter,
        tiering: Locked[Tiering],
        transfers: Transfers,
        blocks: BlockStore,
    ) -> None:
        self._tiers = tiers
        self._index = index
        self._tiering = tiering
        self._transfers = transfers
        self._blocks = blocks
        self._demotions = OffloadThread("demotions")
        self._limiting = [threading.Lock() for _ in tiers]
        self._keeping_quotas = threading.Lock()
        self._compacting = threading.Lock()
        self._retrying = [threading.Lock() for _ in tiers]

    def enforce_limit(self, number: int) -> None:
        """Keep tier *number*, if it exists, within its limit, which is determined anew. Call every few seconds: other
        programs may fill the machine's memory between two calls."""
        if number >= len(self._tiers):
            return
        with _try_lock(self._limiting[number]) as ours:
            if ours:
                self._tiers[number].refresh_limit()
                self.shrink(self._tiers[number], DEMOTION_SECONDS)

    def enforce_quotas(self) -> None:
        """Drop expired blocks, and blocks of datasets beyond their limits."""
        with _try_lock(self._keeping_quotas) as ours:
            if ours:
                self._drop_expired()
                for tier in self._tiers:
                    self._enforce_tier_quotas(tier)

    def retry_tier(self, number: int) -> None:
        """Retry what tier *number*, if it exists, could not do."""
        if number >= len(self._tiers):
            return
        with _try_lock(self._retrying[number]) as ours:
            if ours:
                self._index.commit()
                self._tiers[number].retry_failed()

    def compact(self, seconds: float = COMPACTION_SECONDS) -> None:
        """Copy the blocks of nearly empty segments forward and unlink the segments, so that files stay few and large.
        Begins no further copy after *seconds*; call every few seconds."""
        with _try_lock(self._compacting) as ours:
            if not ours:
                return
            until = time.monotonic() + seconds
            self._index.drop_dead_readers()
            for tier in self._tiers:
                if not tier.problem:
                    self._compact(tier, until)

    def shrink(self, tier: Tier, seconds: float = math.inf) -> None:
        """Evict blocks until the tier is within its limit. Blocks of the memory tier move to the SSD tier within
        *seconds*, and are dropped after that."""
        until = time.monotonic() + seconds
        while True:
            used = tier.used
            with self._tiering as tiering:
                excess = tiering.excess_bytes(tier)
                victims = tiering.choose_surplus(tier)
                behind = not victims and tiering.catch_up(tier)
            if excess <= 0:
                return
            if behind:
                time.sleep(YIELD_SECONDS)
                continue
            self._evict(tier, victims or self._oldest_blocks(tier, excess), until)
            if tier.used >= used:
                return

    def close(self) -> None:
        """Wait for work in progress."""
        self._demotions.close()

    def _evict(self, tier: Tier, keys: Iterable[bytes], until: float) -> None:
        """Evict blocks. Those of the memory tier move to the SSD tier *until* then (monotonic seconds), but do not wait
        for a disk that hangs."""
        if tier.number != MEMORY or len(self._tiers) <= SSD:
            self._transfers.evict_blocks(tier, keys)
            return
        left = batches(keys, DEMOTE_BATCH)
        while time.monotonic() < until and not self._tiers[SSD].problem and (batch := next(left, None)):
            if not self._demotions.run(functools.partial(self._transfers.evict_blocks, tier, batch), _DEMOTION_TIMEOUT):
                reason = f"blocks take longer than {_DEMOTION_TIMEOUT:.0f} s to be written"
                self._tiers[SSD].pause(TimeoutError(errno.ETIMEDOUT, reason))
                left = chain([batch], left)
        self._transfers.evict_blocks(tier, chain.from_iterable(left), demote=False)

    def _enforce_tier_quotas(self, tier: Tier) -> None:
        while True:
            with self._tiering as tiering:
                surplus = tiering.choose_beyond_quotas(tier)
                behind = not surplus and tiering.catch_up(tier)
            if not surplus and not behind:
                return
            self._transfers.evict_blocks(tier, surplus)
            time.sleep(YIELD_SECONDS)

    def _drop_expired(self) -> None:
        now = time.monotonic()
        blocks = freed = 0
        while True:
            with self._tiering as tiering:
                expired = tiering.choose_expired(now)
            if expired is None:
                break
            dropped, size = self._blocks.evict(expired)
            if expired and not dropped:
                break  # they are being written just now
            blocks, freed = blocks + dropped, freed + size
            time.sleep(YIELD_SECONDS)
        if blocks:
            _log.info("dropped %d blocks (%d bytes) that were not read within their ttl", blocks, freed)

    def _oldest_blocks(self, tier: Tier, size: int) -> list[bytes]:
        """Return the oldest blocks, of *size* bytes, where the policy names none. The limit is physical: where all
        blocks are pinned, pinned ones are returned, but not to make room for transient blocks."""
        unpinned = _FoundBlocks(size)
        pinned = _FoundBlocks(size if tier.free < 0 else 0)
        for number in tier.live_segments():
            blocks = dict(self._live_blocks(tier, number))
            with self._tiering as tiering:
                free = set(tiering.filter_unpinned(blocks))
            for key, location in blocks.items():
                (unpinned if key in free else pinned).add(key, span(location.length))
            if unpinned.missing <= 0:
                break
        return unpinned.keys or pinned.keys

    def _compact(self, tier: Tier, until: float) -> None:
        try:
            for number in tier.sparse_segments():
                if not self._copy_forward(tier, number, until):
                    return
                tier.remove_segment(number)
                if time.monotonic() > until:
                    return
        except OSError as error:
            _log.warning("%s tier: cannot compact: %s", tier.name, error)

    def _copy_forward(self, tier: Tier, number: int, until: float) -> bool:
        """Empty a segment. Return False where there is no room for its blocks elsewhere now, or no time left."""
        for portion in chain.from_iterable(map(byte_portions, batches(self._live_blocks(tier, number), COPY_BATCH))):
            gone = self._transfers.move_blocks(tier, tier, portion)
            self._index.commit()
            tier.free_blocks(gone.values())
            left = [(key, location) for key, location in portion if key not in gone]
            if not all(self._is_gone(key, location) for key, location in left) or time.monotonic() > until:
                return False
        return True

    def _is_gone(self, key: bytes, location: BlockLocation) -> bool:
        """Return whether a block that could not be moved is no longer there. A damaged block is dropped."""
        return self._blocks.repair(key, location) or self._index.get(key) != location

    def _live_blocks(self, tier: Tier, number: int) -> Iterator[tuple[bytes, BlockLocation]]:
        """Yield the blocks of a segment that the index still has there, with their locations; none where the segment
        was deleted by another program. Raises OSError."""
        try:
            _, ranges = tier.survey(number)
        except FileNotFoundError:
            return
        for record in tier.records(number, ranges):
            location = record.location(tier.number, number)
            if self._index.get(record.key) == location:
                yield record.key, location


@contextmanager
def _try_lock(lock: threading.Lock) -> Iterator[bool]:
    """Try to hold the lock during the context. Yields whether it is held."""
    ours = lock.acquire(blocking=False)
    try:
        yield ours
    finally:
        if ours:
            lock.release()
