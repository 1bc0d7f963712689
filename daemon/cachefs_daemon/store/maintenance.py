"""The store's housekeeping: limits that have sunk, blocks whose time is over, segments with little left in them."""

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

from cachefs.block import MEMORY, SSD, Location
from cachefs.planning.eviction.tiering import Tiering
from cachefs_daemon.runtime.aside import Aside
from cachefs_daemon.runtime.locked import Locked
from cachefs_daemon.store.block_store import BlockStore
from cachefs_daemon.store.index_writer import IndexWriter
from cachefs_daemon.store.segment_writer import span
from cachefs_daemon.store.tier import Tier
from cachefs_daemon.store.transfers import (
    COPY_BATCH,
    DEMOTED_TOGETHER,
    LET_OTHERS_SECONDS,
    Transfers,
    batches,
    portions,
)

_log = logging.getLogger(__name__)

# One call copies for as long: on a disk of 200 MB/s some 200 MB.
COMPACTION_SECONDS: Final = 1.0
# For as long what a squeezed memory tier evicts moves to the SSD tier; what is left then is dropped. Whoever takes the
# machine's memory may be faster than the disk.
DEMOTION_SECONDS: Final = 2.0
# A disk that takes longer than this for as many as move together, 64 MiB of blocks of 4 MiB, is treated like one that
# hangs.
_DEMOTION_PATIENCE: Final = 2.0


@dataclass(slots=True)
class _Found:
    """Blocks to evict."""

    missing: int  # bytes of blocks that are still to be found
    keys: list[bytes] = field(default_factory=list)

    def add(self, key: bytes, size: int) -> None:
        if self.missing > 0:
            self.keys.append(key)
            self.missing -= size


class Maintenance:
    """Blocking. Of each method, for each tier it can be called for, one call at a time does something; others return at
    once. Each may hang as long as the disk of an SSD tier does, but what is called for the memory tier."""

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
        self._demotions = Aside("demotions")
        self._limiting = [threading.Lock() for _ in tiers]
        self._keeping_quotas = threading.Lock()
        self._compacting = threading.Lock()
        self._retrying = [threading.Lock() for _ in tiers]

    def keep_limit(self, number: int) -> None:
        """Keep what tier *number* uses within its limit, which is asked anew; does nothing where there is no such tier.
        To be called every few seconds: while nobody looks, others may fill the machine's memory."""
        if number >= len(self._tiers):
            return
        with _only_one(self._limiting[number]) as ours:
            if ours:
                self._tiers[number].refresh_limit()
                self.shrink(self._tiers[number], DEMOTION_SECONDS)

    def keep_quotas(self) -> None:
        """Drop blocks whose time is over, and what datasets have beyond their limits."""
        with _only_one(self._keeping_quotas) as ours:
            if ours:
                self._drop_expired()
                for tier in self._tiers:
                    self._keep_quotas(tier)

    def retry(self, number: int) -> None:
        """Try again what tier *number* could not do; nothing where there is no such tier."""
        if number >= len(self._tiers):
            return
        with _only_one(self._retrying[number]) as ours:
            if ours:
                self._index.commit()
                self._tiers[number].retry()

    def compact(self, seconds: float = COMPACTION_SECONDS) -> None:
        """Copy what is left in nearly empty segments forward and unlink them, so that files stay few and large. Begins
        no further copy after *seconds*, so call it every few seconds, too."""
        with _only_one(self._compacting) as ours:
            if not ours:
                return
            until = time.monotonic() + seconds
            self._index.drop_dead_readers()
            for tier in self._tiers:
                if not tier.problem:
                    self._compact(tier, until)

    def shrink(self, tier: Tier, seconds: float = math.inf) -> None:
        """Evict blocks until the tier is within its limit, which may have sunk. What the memory tier evicts moves to
        the SSD tier for as long as *seconds*, and is then dropped."""
        until = time.monotonic() + seconds
        while True:
            used = tier.used
            with self._tiering as tiering:
                excess = tiering.excess(tier)
                victims = tiering.surplus(tier)
                behind = not victims and tiering.catch_up(tier)
            if excess <= 0:
                return
            if behind:
                time.sleep(LET_OTHERS_SECONDS)
                continue
            self._evict(tier, victims or self._oldest_blocks(tier, excess), until)
            if tier.used >= used:
                return

    def close(self) -> None:
        """Wait for what is still under way."""
        self._demotions.close()

    def _evict(self, tier: Tier, keys: Iterable[bytes], until: float) -> None:
        """Evict blocks. Those of the memory tier move to the SSD tier *until* then (monotonic seconds), and do not wait
        for its disk where it hangs."""
        if tier.number != MEMORY or len(self._tiers) <= SSD:
            self._transfers.evict(tier, keys)
            return
        left = batches(keys, DEMOTED_TOGETHER)
        while time.monotonic() < until and not self._tiers[SSD].problem and (batch := next(left, None)):
            if not self._demotions.run(functools.partial(self._transfers.evict, tier, batch), _DEMOTION_PATIENCE):
                reason = f"blocks take longer than {_DEMOTION_PATIENCE:.0f} s to be written"
                self._tiers[SSD].suspend(TimeoutError(errno.ETIMEDOUT, reason))
                left = chain([batch], left)
        self._transfers.evict(tier, chain.from_iterable(left), demote=False)

    def _keep_quotas(self, tier: Tier) -> None:
        while True:
            with self._tiering as tiering:
                surplus = tiering.beyond_quotas(tier)
                behind = not surplus and tiering.catch_up(tier)
            if not surplus and not behind:
                return
            self._transfers.evict(tier, surplus)
            time.sleep(LET_OTHERS_SECONDS)

    def _drop_expired(self) -> None:
        now = time.monotonic()
        blocks = freed = 0
        while True:
            with self._tiering as tiering:
                expired = tiering.expired(now)
            if expired is None:
                break
            dropped, size = self._blocks.evict(expired)
            if expired and not dropped:
                break  # They are being written just now.
            blocks, freed = blocks + dropped, freed + size
            time.sleep(LET_OTHERS_SECONDS)
        if blocks:
            _log.info("dropped %d blocks (%d bytes) that nobody has read for their time", blocks, freed)

    def _oldest_blocks(self, tier: Tier, size: int) -> list[bytes]:
        """The oldest blocks, of *size* bytes, where the policy names none. The limit is physical: where there are only
        pinned ones, it is them, but not for room that transient blocks might want."""
        unpinned = _Found(size)
        pinned = _Found(size if tier.free < 0 else 0)
        for number in tier.live_segments():
            blocks = dict(self._live_blocks(tier, number))
            with self._tiering as tiering:
                free = set(tiering.unpinned(blocks))
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
        """Empty a segment. False where there is no room for its blocks elsewhere now, or no time any more."""
        for portion in chain.from_iterable(map(portions, batches(self._live_blocks(tier, number), COPY_BATCH))):
            gone = self._transfers.copy(tier, tier, portion)
            self._index.commit()
            tier.free_blocks(gone.values())
            left = [(key, location) for key, location in portion if key not in gone]
            if not all(self._is_gone(key, location) for key, location in left) or time.monotonic() > until:
                return False
        return True

    def _is_gone(self, key: bytes, location: Location) -> bool:
        """Is a block that could not be moved not there any more? A damaged one goes."""
        return self._blocks.repair(key, location) or self._index.get(key) != location

    def _live_blocks(self, tier: Tier, number: int) -> Iterator[tuple[bytes, Location]]:
        """The blocks in a segment that the index still has there, with their places. Yields nothing where somebody has
        deleted the segment. Raises OSError."""
        try:
            _, ranges = tier.survey(number)
        except FileNotFoundError:
            return
        for record in tier.records(number, ranges):
            location = record.location(tier.number, number)
            if self._index.get(record.key) == location:
                yield record.key, location


@contextmanager
def _only_one(lock: threading.Lock) -> Iterator[bool]:
    """Holds the lock meanwhile, where nobody else does: is it ours?"""
    ours = lock.acquire(blocking=False)
    try:
        yield ours
    finally:
        if ours:
            lock.release()
