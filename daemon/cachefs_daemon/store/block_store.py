"""The blocks of this node, whichever tier they are in: put, find, read, evict, promote.

A block enters the memory tier if that tier's policy admits it, else the SSD tier. What memory evicts moves to the SSD
tier if the policy there admits it. A block that no policy admits still goes to memory, as a *transient* block: first
in, first out, evicted before everything else, so that a reader always gets its bytes through a segment. A hit in the
SSD tier is not copied up: the kernel's page cache in front of the segment is memory already, and a copy would evict hot
blocks. Blocks that are known to be read soon can be moved up all the same (`promote`). With `lru`, the tiers form one
list with the sum of their sizes.
"""

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cachefs.block import MEMORY, SSD, BlockLocation, piece_checksums
from cachefs.errors import StoreFull
from cachefs.planning.eviction.tiering import Tiering
from cachefs.planning.pagecache.states import Coverage
from cachefs_daemon.runtime.locked import Locked
from cachefs_daemon.store.index_writer import IndexWriter
from cachefs_daemon.store.segment_writer import Data
from cachefs_daemon.store.tier import NewBlock, Tier
from cachefs_daemon.store.transfers import COPY_BATCH, Transfers, batches, byte_portions

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlockToStore:
    """A block to be stored."""

    key: bytes
    data: Data
    # Keep it for a while even if no policy admits it.
    may_be_transient: bool = True
    # The snapshot for which the block was fetched.
    snapshot: str = ""
    # The checksums of its pieces, where they are known.
    checksums: bytes = b""
    # True where another node of the cluster keeps the block.
    is_copy: bool = False


class BlockStore:
    """Stores blocks in tiers. Thread-safe and blocking."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        index: IndexWriter,
        tiering: Locked[Tiering],
        transfers: Transfers,
        coverage: Coverage,
    ) -> None:
        """coverage: of page caches; blocks that they hold are not promoted."""
        self.repairs = 0  # blocks that were dropped because their bytes were damaged
        self._tiers = tiers
        self._index = index
        self._tiering = tiering
        self._transfers = transfers
        self._coverage = coverage
        self._counting = threading.Lock()

    def get(self, key: bytes) -> BlockLocation | None:
        """Return where the block is now. Waits for no other thread."""
        return self._index.get(key)

    def put_many(self, blocks: Sequence[BlockToStore]) -> list[BlockLocation | StoreFull | None]:
        """Store blocks, those that are needed soonest first. Return the location of each, which is the old one for
        blocks that are there already; StoreFull where there is no room even for a transient block."""
        outcomes: list[BlockLocation | StoreFull | None] = [*self._index.get_many([block.key for block in blocks])]
        new = [number for number, outcome in enumerate(outcomes) if outcome is None]
        now = time.monotonic()
        with self._tiering as tiering:
            claimed = [
                blocks[n].key for n in new if tiering.quotas.expect_fetch(blocks[n].key, blocks[n].snapshot, now)
            ]
        try:
            for number, outcome in zip(new, self._write_new([blocks[number] for number in new]), strict=True):
                outcomes[number] = outcome
        finally:
            if claimed:
                with self._tiering as tiering:
                    for key in claimed:
                        tiering.quotas.end_expected_fetch(key, is_here=self.get(key) is not None)
        return outcomes

    def _write_new(self, blocks: Sequence[BlockToStore]) -> list[BlockLocation | StoreFull | None]:
        outcomes: list[BlockLocation | StoreFull | None] = [None] * len(blocks)
        new = [NewBlock(one.key, one.checksums or piece_checksums(one.key, one.data), one.data) for one in blocks]
        left = list(range(len(blocks)))
        copies = self._copies_for_spare_room(blocks)
        left = [number for number in left if number not in copies]
        for tier in self._tiers:
            locations = self._transfers.write_many(tier, [new[number] for number in left])
            written = [(number, where) for number, where in zip(left, locations, strict=True) if where is not None]
            entered = self._transfers.publish([(new[number].key, where) for number, where in written])
            for (number, _), where in zip(written, entered, strict=True):
                outcomes[number] = where
            left = [number for number in left if outcomes[number] is None]
        for number in (*left, *copies):
            if blocks[number].may_be_transient or number in copies:
                outcomes[number] = self._write_transient(new[number])
        return outcomes

    def _copies_for_spare_room(self, blocks: Sequence[BlockToStore]) -> set[int]:
        """Return the positions of blocks that other nodes keep, where this node has only spare room for them."""
        copies = {number for number, block in enumerate(blocks) if block.is_copy}
        return copies if copies and not self._tiering.unlocked.can_keep_copies else set()

    def _write_transient(self, block: NewBlock) -> BlockLocation | StoreFull:
        try:
            location = self._transfers.write_transient(block)
        except StoreFull as error:
            return error
        return self._transfers.publish([(block.key, location)], transient=True)[0]

    def read(self, key: bytes, location: BlockLocation) -> bytes | None:
        """Return the block's verified bytes; None if they are damaged or no longer there."""
        return self._transfers.read(key, location)

    def repair(self, key: bytes, location: BlockLocation) -> bool:
        """Drop a block at *location* for which a reader found damaged bytes, if they are damaged indeed."""
        if self.get(key) != location or self.read(key, location) is not None:
            return False
        if not self._transfers.unpublish(key, location):
            return False
        with self._counting:
            self.repairs += 1
        tier = self._tiers[location.tier]
        _log.warning(
            "%s tier: dropped block %s, whose bytes are damaged (segment %d)", tier.name, key.hex(), location.segment
        )
        self._index.commit()
        tier.free_blocks([location])
        return True

    def drop_unresponsive(self, key: bytes, location: BlockLocation) -> bool:
        """Drop a block of the SSD tier for which a reader had no answer. Its bytes are not touched; their room is given
        back once the tier answers. The tier takes no new blocks for a while."""
        if location.tier != SSD or len(self._tiers) <= SSD or not self._transfers.unpublish(key, location):
            return False
        # No commit: the index may be on the disk that hangs. `Maintenance.retry_tier` commits before it frees the
        # bytes.
        self._tiers[SSD].report_hang("a reader waited for a block and got no answer", location)
        return True

    def evict(self, keys: Iterable[bytes]) -> tuple[int, int]:
        """Drop blocks, pinned or not. Return how many blocks and bytes were there."""
        return self._transfers.drop_blocks(keys)

    def promote(self, keys: Iterable[bytes]) -> int:
        """Move blocks from the SSD to the memory tier, unless they are in the page cache, or the memory tier's policy
        prefers the blocks that would be evicted for them. Evicted blocks go to the SSD tier. Return how many were
        moved."""
        moved = 0
        for batch in batches(keys, COPY_BATCH) if len(self._tiers) > SSD else ():
            left = [key for key in batch if not self._coverage.is_covered(key)]
            found = zip(left, self._index.get_many(left), strict=True)
            here = [(key, location) for key, location in found if location is not None and location.tier == SSD]
            for portion in byte_portions(here):
                gone = self._transfers.move_blocks(self._tiers[SSD], self._tiers[MEMORY], portion)
                self._index.commit()
                self._tiers[SSD].free_blocks(gone.values())
                moved += len(gone)
        return moved

    def read_ahead(self, keys: Iterable[bytes]) -> None:
        """Let the kernel read blocks of the SSD tier into its page cache."""
        for key in keys:
            location = self.get(key)
            if location is not None and location.tier == SSD:
                self._tiers[SSD].read_ahead(location)
