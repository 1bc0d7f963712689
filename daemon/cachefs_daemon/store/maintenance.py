"""The store's housekeeping: limits that have sunk, blocks whose time is over, segments with little left in them."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence

from cachefs.block import Location
from cachefs.planning.eviction.tiering import Tiering
from cachefs_daemon.runtime.locked import Locked
from cachefs_daemon.store.block_store import BlockStore
from cachefs_daemon.store.index_writer import IndexWriter
from cachefs_daemon.store.tier import Tier
from cachefs_daemon.store.transfers import COPY_BATCH, Transfers, batches

_log = logging.getLogger(__name__)


class Maintenance:
    """Blocking. One call at a time does something; others return at once."""

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
        self._running = threading.Lock()

    def run(self) -> None:
        """To be called every few seconds. Does nothing while the last call, on a slow disk, runs."""
        if not self._running.acquire(blocking=False):
            return
        try:
            self._index.drop_dead_readers()
            self._drop_expired()
            for tier in self._tiers:
                tier.refresh_limit()
                self.shrink(tier)
                with self._tiering as tiering:
                    surplus = tiering.beyond_quotas(tier)
                self._transfers.evict(tier, surplus)
                tier.retry()
                if not tier.problem:
                    self._compact(tier)
        finally:
            self._running.release()

    def shrink(self, tier: Tier) -> None:
        """Evict blocks until the tier is within its limit, which may have sunk."""
        while (excess := -tier.free) > 0:
            used = tier.used
            with self._tiering as tiering:
                victims = tiering.surplus(tier, excess)
            # The limit is physical: where the policy names none, the oldest blocks are evicted, pinned or not.
            self._transfers.evict(tier, victims or self._oldest_blocks(tier))
            if tier.used >= used:
                return

    def _drop_expired(self) -> None:
        while True:
            with self._tiering as tiering:
                expired = tiering.expired(time.monotonic())
            if not expired:
                return
            blocks, freed = self._blocks.evict(expired)
            _log.info("dropped %d blocks (%d bytes) that nobody has read for their time", blocks, freed)

    def _oldest_blocks(self, tier: Tier) -> list[bytes]:
        number = tier.oldest_segment()
        return [key for key, _ in self._live_blocks(tier, number)] if number is not None else []

    def _compact(self, tier: Tier) -> None:
        """Copy what is left in nearly empty segments forward and unlink them, so that files stay few and large."""
        try:
            for number in tier.sparse_segments():
                if not self._copy_forward(tier, number):
                    return
                tier.remove_segment(number)
        except OSError as error:
            _log.warning("%s tier: cannot compact: %s", tier.name, error)

    def _copy_forward(self, tier: Tier, number: int) -> bool:
        """Empty a segment. False where there is no room for its blocks elsewhere now."""
        for batch in batches(self._live_blocks(tier, number), COPY_BATCH):
            gone, full = [], False
            for key, location in batch:
                data = self._blocks.read(key, location)
                if data is None:
                    self._blocks.repair(key, location)
                    continue
                copy = self._transfers.write(tier, key, location.checksums, data)
                if copy is None:
                    full = True
                elif self._transfers.move(key, location, copy):
                    gone.append(location)
            self._index.commit()
            tier.free_blocks(gone)
            if full:
                return False
        return True

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
