"""Moves blocks into tiers, between them and out of them: the one place where bytes, index and decisions change.

The order of steps makes a crash harmless and a reader's race detectable: bytes first, then the index entry; the index
entry gone and committed, then the hole. See cachefs_daemon.store.recovery for the work after a crash.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Final, TypeVar

from cachefs.block import MEMORY, SSD, BlockLocation
from cachefs.errors import StoreFull
from cachefs.planning.eviction.tiering import IncomingBlock, Tiering, TierLocation
from cachefs_daemon.runtime.locked import Locked
from cachefs_daemon.store.index_writer import IndexWriter
from cachefs_daemon.store.segment_writer import span
from cachefs_daemon.store.tier import FileSystemFull, NewBlock, Tier

# Attempts, since room made by one thread may be taken by another before it is reserved.
_ATTEMPTS: Final = 16
# Attempts where the file system turns out to be full: another program that fills it may also take what is evicted for
# us.
_FULL_ATTEMPTS: Final = 3
# Seconds for which a block with a waiting reader may wait for room. A block is written in well under a millisecond per
# megabyte, and it can reach the reader in another way.
_ROOM_WAIT_SECONDS: Final = 0.1
_POLL_SECONDS: Final = 0.002
# Blocks that share a commit when many leave: a commit costs 40 us, and holes wait for it. They leave in one go under
# the store's lock: 10 us each.
_BLOCKS_PER_BATCH: Final = 64
# Fewer where their bytes move, so that room is freed while others still move.
DEMOTE_BATCH: Final = 16
# Bytes that are in memory at once on their way to another tier; and the number of buffers that are kept for them.
_PORTION_BYTES: Final = 4 << 20
_BUFFERS: Final = 2
# Pause of a thread that takes the store's lock repeatedly, so that others can take it: a lock is not fair.
YIELD_SECONDS: Final = 0.0005
# Fewer, and no more than a portion, where each needs room for a second copy until the commit.
COPY_BATCH: Final = 16

_Block = tuple[bytes, BlockLocation]


class Transfers:
    """Moves blocks. Thread-safe and blocking. *tiering*'s lock covers decisions and bookkeeping, but no I/O."""

    def __init__(self, tiers: Sequence[Tier], index: IndexWriter, tiering: Locked[Tiering]) -> None:
        self._tiers = tiers
        self._index = index
        self._tiering = tiering
        self._memory = tiers[MEMORY]
        self._ssd = tiers[SSD] if len(tiers) > SSD else None
        self._buffers = _BufferPool()

    # --- into tiers ---------------------------------------------------------------------------------------------------

    def write(self, tier: Tier, block: NewBlock, *, transient: bool = False) -> BlockLocation | None:
        """Write a block into a tier, with room made for it; no reader finds it before `publish` or `_update_locations`.
        Return None where the tier's policy does not want it, or the tier cannot take it."""
        full: OSError | None = None
        for _ in range(_FULL_ATTEMPTS):
            if tier.problem:
                return None
            if not self._make_room(tier, [IncomingBlock(block.key, block.span)], transient)[0]:
                break
            try:
                location = tier.write(block)
            except FileSystemFull as error:
                full, location = error, None
            if location is not None:
                return location
            self._release_quotas([block.key])
            if full is None:
                return None
        if full is not None:
            tier.pause(full)
        return None

    def write_many(self, tier: Tier, blocks: Sequence[NewBlock]) -> list[BlockLocation | None]:
        """Write many blocks as `write` does, with one search for room and one opened file for most of them."""
        found: list[BlockLocation | None] = [None] * len(blocks)
        if tier.problem or not blocks:
            return found
        fits = self._make_room(tier, [IncomingBlock(block.key, block.span) for block in blocks], False)
        wanted = [number for number, fit in enumerate(fits) if fit]
        for number, location in zip(wanted, self._write_reserved(tier, [blocks[n] for n in wanted]), strict=True):
            found[number] = location
        return found

    def _write_reserved(self, tier: Tier, blocks: Sequence[NewBlock]) -> list[BlockLocation | None]:
        found: list[BlockLocation | None] = [*tier.write_many(blocks)]
        if left := blocks[len(found) :]:
            self._release_quotas([block.key for block in left])
            found += [self.write(tier, block) for block in left]
        return found

    def reserve(self, tier: Tier, blocks: Sequence[IncomingBlock]) -> list[tuple[int, int] | None]:
        """Reserve room in which a fetch process writes the blocks; no reader finds them before `publish`. Return
        segment and offset of each; None where the tier's policy does not want it, or the tier cannot take it."""
        found: list[tuple[int, int] | None] = [None] * len(blocks)
        if tier.problem or not blocks:
            return found
        fits = self._make_room(tier, blocks, False)
        wanted = [number for number, fit in enumerate(fits) if fit]
        spans = tier.allocate_spans([blocks[number].size for number in wanted])
        self._release_quotas([blocks[number].key for number in wanted[len(spans) :]])
        for number, allocated in zip(wanted, spans, strict=False):
            found[number] = allocated
        return found

    def write_transient(self, block: NewBlock) -> BlockLocation:
        """Write a block that no policy admits into the memory tier. For a moment all room there may be reserved for
        blocks that are being written, none of which can be evicted yet. Raises StoreFull."""
        deadline = time.monotonic() + _ROOM_WAIT_SECONDS
        while (location := self.write(self._memory, block, transient=True)) is None:
            hopeless = self._memory.problem or block.span > self._memory.limit
            if hopeless or time.monotonic() > deadline:
                reason = self._memory.problem or f"its limit of {self._memory.limit} bytes is in use"
                raise StoreFull(f"the memory tier cannot take a block of {len(block.data)} bytes: {reason}")
            time.sleep(_POLL_SECONDS)
        return location

    def publish(
        self, written: Sequence[tuple[bytes, BlockLocation]], *, transient: bool = False
    ) -> list[BlockLocation]:
        """Make written blocks visible. Return their locations: others for blocks that arrived in another way."""
        if not written:
            return []
        with self._tiering as tiering:
            there = self._index.get_many([key for key, _ in written])
            new = {key: location for (key, location), known in zip(written, there, strict=True) if known is None}
            self._index.apply_changes(new)
            for key, _ in written:
                tiering.quotas.note_written(key)
            for key, location in new.items():
                tiering.note_entered(key, TierLocation(location.tier, span(location.length)), transient=transient)
        found = [new[key] if known is None else known for (key, _), known in zip(written, there, strict=True)]
        for (_, location), published in zip(written, found, strict=True):
            if published is not location:
                self._tiers[location.tier].free_blocks([location])
        return found

    def _release_quotas(self, keys: Sequence[bytes]) -> None:
        """Release the quota of blocks that had room but could not be written."""
        with self._tiering as tiering:
            for key in keys:
                tiering.quotas.note_written(key)

    def _make_room(self, tier: Tier, blocks: Sequence[IncomingBlock], transient: bool) -> list[bool]:
        """Return for which blocks room is reserved: those that the policy wants, or all if they are transient."""
        reserved = [False] * len(blocks)
        waiting = list(range(len(blocks)))
        attempts = _ATTEMPTS + len(blocks)
        while waiting and attempts:
            with self._tiering as tiering:
                for number in waiting:
                    reserved[number] = self._reserve(tiering, tier, blocks[number], transient)
                waiting = [number for number in waiting if not reserved[number]]
                if waiting and not transient:
                    incoming = [blocks[number] for number in waiting]
                    waiting = [waiting[index] for index in tiering.rank_incoming(tier, incoming)]
                incoming = [blocks[number] for number in waiting]
                victims = tiering.choose_victims(tier, incoming, transient=transient) if incoming else []
                behind = bool(waiting) and not victims and tiering.catch_up(tier)
            if victims:
                attempts -= 1
                self.evict_blocks(tier, victims)
            elif behind:
                time.sleep(YIELD_SECONDS)
            else:
                del waiting[:1]  # nothing is evicted for it
        return reserved

    @staticmethod
    def _reserve(tiering: Tiering, tier: Tier, block: IncomingBlock, transient: bool) -> bool:
        if block.size > tiering.room_in(tier, block.key, transient=transient) or not tier.reserve(block.size):
            return False
        if not transient:
            tiering.quotas.note_reserved(tier.number, block.key, block.size)
        return True

    # --- between tiers ------------------------------------------------------------------------------------------------

    def read(self, key: bytes, location: BlockLocation) -> bytes | None:
        """Return the block's verified bytes; None if they are damaged or no longer there."""
        return self._tiers[location.tier].read(key, location) if location.tier < len(self._tiers) else None

    def move_blocks(self, source: Tier, target: Tier, blocks: Sequence[_Block]) -> dict[bytes, BlockLocation]:
        """Move blocks out of *source*, as far as *target* takes them (it may be the same). Return the old locations of
        those that moved: the caller frees these bytes after a commit."""
        moved: dict[bytes, BlockLocation] = {}
        # Most refused blocks are refused before their bytes are read.
        for portion in byte_portions(self._reserve_wanted(target, blocks)):
            moved |= self._move_portion(source, target, portion)
        return moved

    def _update_locations(self, moves: Sequence[tuple[bytes, BlockLocation, BlockLocation]]) -> list[bool]:
        """Change the index to *new* for each (key, old, new) where it still has *old*. Return which have moved."""
        with self._tiering as tiering:
            there = self._index.get_many([key for key, _, _ in moves])
            moved = [here == old for here, (_, old, _) in zip(there, moves, strict=True)]
            self._index.apply_changes({key: new for (key, _, new), done in zip(moves, moved, strict=True) if done})
            for (key, old, new), done in zip(moves, moved, strict=True):
                tiering.quotas.note_written(key)
                if done and old.tier != new.tier:
                    tiering.note_moved(key, old.tier, TierLocation(new.tier, span(new.length)))
        for (_, _, new), done in zip(moves, moved, strict=True):
            if not done:
                self._tiers[new.tier].free_blocks([new])
        return moved

    # --- out of tiers -------------------------------------------------------------------------------------------------

    def evict_blocks(self, tier: Tier, keys: Iterable[bytes], *, demote: bool = True) -> None:
        """Move blocks of *tier* to the SSD tier, or drop them (always without *demote*), and free their room."""
        demote = demote and tier is self._memory and self._ssd is not None
        for batch in batches(keys, DEMOTE_BATCH if demote else _BLOCKS_PER_BATCH):
            gone = self._demote(batch) if demote else self._unpublish_many(batch, tier.number)
            self._index.commit()
            tier.free_blocks(gone)
            with self._tiering as tiering:
                tiering.counts[tier.number].evicted += len(gone)

    def drop_blocks(self, keys: Iterable[bytes]) -> tuple[int, int]:
        """Drop blocks, whichever tier they are in. Return how many blocks and bytes were there."""
        blocks = freed = 0
        for batch in batches(keys):
            gone = self._unpublish_many(batch)
            self._index.commit()
            for tier in self._tiers:
                tier.free_blocks(location for location in gone if location.tier == tier.number)
            blocks += len(gone)
            freed += sum(location.length for location in gone)
        return blocks, freed

    def unpublish(self, key: bytes, location: BlockLocation) -> bool:
        """Delete the block's index entry, if it still has this location. The caller frees the bytes after a commit."""
        with self._tiering as tiering:
            if self._index.get(key) != location:
                return False
            self._index.delete(key)
            tiering.note_left(key, location.tier)
            return True

    def _unpublish_many(self, keys: Sequence[bytes], tier: int | None = None) -> list[BlockLocation]:
        """Delete the index entries of blocks, or of those in *tier*. Return the old locations: the caller frees the
        bytes after a commit."""
        with self._tiering as tiering:
            there = zip(keys, self._index.get_many(keys), strict=True)
            gone = {key: location for key, location in there if location is not None and tier in (None, location.tier)}
            self._index.apply_changes(dict.fromkeys(gone))
            for key, location in gone.items():
                tiering.note_left(key, location.tier)
        return [*gone.values()]

    def _demote(self, keys: Sequence[bytes]) -> list[BlockLocation]:
        """Move blocks of the memory tier to the SSD tier, or drop those it refuses. Return their old locations."""
        found = zip(keys, self._index.get_many(keys), strict=True)
        here = [(key, location) for key, location in found if location is not None and location.tier == MEMORY]
        moved = self.move_blocks(self._memory, self._ssd, here) if self._ssd is not None else {}
        # A block that was moved within the tier meanwhile is dropped: no policy knows it now.
        return [*moved.values(), *self._unpublish_many([key for key in keys if key not in moved], MEMORY)]

    def _reserve_wanted(self, tier: Tier, blocks: Sequence[_Block]) -> list[_Block]:
        """Return those of these blocks that *tier* takes, with room reserved there."""
        if tier.problem or not blocks:
            return []
        incoming = [IncomingBlock(key, span(location.length)) for key, location in blocks]
        fits = self._make_room(tier, incoming, False)
        return [block for block, fit in zip(blocks, fits, strict=True) if fit]

    def _move_portion(self, source: Tier, target: Tier, blocks: Sequence[_Block]) -> dict[bytes, BlockLocation]:
        """Move blocks into room that *target* has reserved. Return the old locations of those that moved."""
        buffer = self._buffers.get_buffer(sum(location.length for _, location in blocks))
        contents = source.read_many(blocks, memoryview(buffer))
        read_blocks = [(block, data) for block, data in zip(blocks, contents, strict=True) if data is not None]
        if len(read_blocks) < len(blocks):
            damaged = [block for block, data in zip(blocks, contents, strict=True) if data is None]
            self._release_quotas([key for key, _ in damaged])
            target.release(sum(span(location.length) for _, location in damaged))
        copies = self._write_reserved(target, [NewBlock(key, old.checksums, data) for (key, old), data in read_blocks])
        self._buffers.put_back(buffer)
        written = [(key, old, new) for ((key, old), _), new in zip(read_blocks, copies, strict=True) if new is not None]
        return {key: old for (key, old, _), done in zip(written, self._update_locations(written), strict=True) if done}


class _BufferPool:
    """Reuses the memory through which blocks move to another tier. Reading 110 KB into fresh memory takes 98 us, as the
    kernel has to map its pages; into memory that was used before, 21."""

    def __init__(self) -> None:
        self._kept: list[bytearray] = []

    def get_buffer(self, size: int) -> bytearray:
        with suppress(IndexError):
            buffer = self._kept.pop()
            if len(buffer) >= size:
                return buffer
        return bytearray(max(size, _PORTION_BYTES))

    def put_back(self, buffer: bytearray) -> None:
        if len(buffer) == _PORTION_BYTES and len(self._kept) < _BUFFERS:
            self._kept.append(buffer)


def byte_portions(blocks: Sequence[_Block]) -> Iterator[list[_Block]]:
    """Yield all blocks, in lists of at most _PORTION_BYTES bytes, or of one block."""
    portion: list[_Block] = []
    size = 0
    for block in blocks:
        if portion and size + block[1].length > _PORTION_BYTES:
            yield portion
            portion, size = [], 0
        portion.append(block)
        size += block[1].length
    if portion:
        yield portion


_Item = TypeVar("_Item")


def batches(items: Iterable[_Item], size: int = _BLOCKS_PER_BATCH) -> Iterator[list[_Item]]:
    """Yield all *items*, in lists of at most *size*."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
