"""Blocks into tiers, from one tier to another, and out of them: the one place where bytes, index and decisions change.

The order of steps is what makes a crash harmless and a reader's race detectable: bytes first, then the index entry; the
index entry gone and committed, then the hole. See cachefs_daemon.store.recovery for what is left to do after a crash.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, TypeVar

from cachefs.block import MEMORY, SSD, Location
from cachefs.errors import StoreFull
from cachefs.planning.eviction.tiering import Place, Tiering
from cachefs_daemon.runtime.locked import Locked
from cachefs_daemon.store.index_writer import IndexWriter
from cachefs_daemon.store.segment_writer import span
from cachefs_daemon.store.tier import FileSystemFull, NewBlock, Tier

# Room made by one thread may be taken by another before it is reserved.
_ATTEMPTS: Final = 16
# Tries where the file system turns out to be full: whoever fills it may take what is evicted for us, too.
_FULL_ATTEMPTS: Final = 3
# Seconds for which a block that somebody waits for may wait for room. A block is written in well under a millisecond
# per megabyte, and there is another way to the reader.
_PATIENCE_SECONDS: Final = 0.1
_POLL_SECONDS: Final = 0.002
# Blocks that share a commit when many leave: a commit costs 40 us, and holes wait for it. They leave in one go under
# the store's lock: 10 us each.
_BATCH: Final = 64
# Fewer where their bytes are in memory meanwhile.
_DEMOTED: Final = 16
# A thread that takes the store's lock again and again must give others the time to take it: a lock is not fair.
LET_OTHERS_SECONDS: Final = 0.0005
# Fewer where each needs room for a second copy until the commit.
COPY_BATCH: Final = 4


class Transfers:
    """Thread-safe and blocking. The lock of *tiering* covers decisions and bookkeeping; bytes are moved outside it."""

    def __init__(self, tiers: Sequence[Tier], index: IndexWriter, tiering: Locked[Tiering]) -> None:
        self._tiers = tiers
        self._index = index
        self._tiering = tiering
        self._memory = tiers[MEMORY]
        self._ssd = tiers[SSD] if len(tiers) > SSD else None

    # --- in -----------------------------------------------------------------------------------------------------------

    def write(self, tier: Tier, block: NewBlock, *, transient: bool = False) -> Location | None:
        """Write a block into a tier, with room made for it; no reader finds it before `enter` or `move`. None where the
        tier's policy does not want it, or the tier cannot take it."""
        full: OSError | None = None
        for _ in range(_FULL_ATTEMPTS):
            if tier.problem:
                return None
            if not self._make_room(tier, [block], transient)[0]:
                break
            try:
                location = tier.write(block)
            except FileSystemFull as error:
                full, location = error, None
            if location is not None:
                return location
            self._gone(tier, [block])
            if full is None:
                return None
        if full is not None:
            tier.suspend(full)
        return None

    def write_many(self, tier: Tier, blocks: Sequence[NewBlock]) -> list[Location | None]:
        """The same for many blocks, with one look for room and one opened file for most of them."""
        found: list[Location | None] = [None] * len(blocks)
        if tier.problem or not blocks:
            return found
        wanted = [number for number, fits in enumerate(self._make_room(tier, blocks, False)) if fits]
        locations = tier.write_many([blocks[number] for number in wanted])
        for number, location in zip(wanted, locations, strict=False):
            found[number] = location
        if left := wanted[len(locations) :]:
            self._gone(tier, [blocks[number] for number in left])
            for number in left:
                found[number] = self.write(tier, blocks[number])
        return found

    def write_transient(self, block: NewBlock) -> Location:
        """Write a block that no policy admits into the memory tier. For a moment all room there may be reserved for
        blocks that are being written, none of which can be evicted yet. Raises StoreFull."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (location := self.write(self._memory, block, transient=True)) is None:
            hopeless = self._memory.problem or block.span > self._memory.limit
            if hopeless or time.monotonic() > deadline:
                reason = self._memory.problem or f"its limit of {self._memory.limit} bytes is in use"
                raise StoreFull(f"the memory tier cannot take a block of {len(block.data)} bytes: {reason}")
            time.sleep(_POLL_SECONDS)
        return location

    def enter(self, written: Sequence[tuple[bytes, Location]], *, transient: bool = False) -> list[Location]:
        """Let readers find blocks that were written; where they are, if somebody else has brought one meanwhile."""
        found: list[Location] = []
        superfluous: list[Location] = []
        with self._tiering as tiering:
            for key, location in written:
                tiering.quotas.arrived(key)
                there = self._index.get(key)
                if there is None:
                    self._index.put(key, location)
                    tiering.entered(key, Place(location.tier, span(location.length)), transient=transient)
                else:
                    superfluous.append(location)
                found.append(there or location)
        for location in superfluous:
            self._tiers[location.tier].free_blocks([location])
        return found

    def _gone(self, tier: Tier, blocks: Sequence[NewBlock]) -> None:
        """Blocks for which there was room could not be written."""
        with self._tiering as tiering:
            for block in blocks:
                tiering.quotas.arrived(block.key)

    def _make_room(self, tier: Tier, blocks: Sequence[NewBlock], transient: bool) -> list[bool]:
        """For which of the blocks room is reserved: those that the policy wants, or all if they are transient."""
        reserved = [False] * len(blocks)
        waiting = list(range(len(blocks)))
        attempts = _ATTEMPTS
        while waiting and attempts:
            with self._tiering as tiering:
                left = []
                for number in waiting:
                    free = tiering.room_in(tier, blocks[number].key, blocks[number].span, transient=transient)
                    if free is not None and self._reserve(tiering, tier, blocks[number], free, transient):
                        reserved[number] = True
                    elif free is not None:
                        left.append(number)
                waiting = left
                victims = self._victims(tiering, tier, [blocks[number] for number in waiting], transient)
                behind = bool(waiting) and not victims and tiering.catch_up(tier)
            if victims:
                attempts -= 1
                self.evict(tier, victims)
            elif behind:
                time.sleep(LET_OTHERS_SECONDS)
            else:
                del waiting[:1]  # nothing is evicted for it
        return reserved

    @staticmethod
    def _reserve(tiering: Tiering, tier: Tier, block: NewBlock, free: int, transient: bool) -> bool:
        if block.span > free or not tier.reserve(block.span):
            return False
        if not transient:
            tiering.quotas.coming(tier.number, block.key, block.span)
        return True

    def _victims(self, tiering: Tiering, tier: Tier, blocks: Sequence[NewBlock], transient: bool) -> list[bytes]:
        """Whom to evict for the first of the blocks, and for as many of the others as is possible."""
        victims: list[bytes] = []
        left = 0  # bytes that are free or come free, less those of the blocks so far
        for number, block in enumerate(blocks):
            if not number:
                left = tiering.room_in(tier, block.key, block.span, transient=transient) or 0
            if block.span > left:
                more = tiering.evicted_for(tier, block.span - left, block.key, transient=transient)
                if not more:
                    break
                victims += more
                left += sum(self._span_of(key) for key in more)
            left -= block.span
        return victims

    def _span_of(self, key: bytes) -> int:
        location = self._index.get(key)
        return span(location.length) if location is not None else 0

    # --- from one place to another ------------------------------------------------------------------------------------

    def read(self, key: bytes, location: Location) -> bytes | None:
        """The block's bytes, verified; None if they are not right (or no longer there)."""
        return self._tiers[location.tier].read(key, location) if location.tier < len(self._tiers) else None

    def move(self, key: bytes, old: Location, new: Location) -> bool:
        """Let the index say *new*, if it still says *old*: then the caller frees the old bytes after a commit."""
        with self._tiering as tiering:
            tiering.quotas.arrived(key)
            if self._index.get(key) == old:
                self._index.put(key, new)
                if old.tier != new.tier:
                    tiering.moved(key, old.tier, Place(new.tier, span(new.length)))
                return True
        self._tiers[new.tier].free_blocks([new])
        return False

    # --- out ----------------------------------------------------------------------------------------------------------

    def evict(self, tier: Tier, keys: Iterable[bytes], *, demote: bool = True) -> None:
        """Move blocks of *tier* to the SSD tier or, always where not *demote*, drop them, and free their room."""
        demote = demote and tier is self._memory and self._ssd is not None
        for batch in batches(keys, _DEMOTED if demote else _BATCH):
            gone = self._demote(batch) if demote else self._leave(batch, tier.number)
            self._index.commit()
            tier.free_blocks(gone)
            with self._tiering as tiering:
                tiering.counts[tier.number].evicted += len(gone)

    def drop(self, keys: Iterable[bytes]) -> tuple[int, int]:
        """Drop blocks, whichever tier they are in. How many blocks and bytes were there."""
        blocks = freed = 0
        for batch in batches(keys):
            gone = self._leave(batch)
            self._index.commit()
            for tier in self._tiers:
                tier.free_blocks(location for location in gone if location.tier == tier.number)
            blocks += len(gone)
            freed += sum(location.length for location in gone)
        return blocks, freed

    def leave(self, key: bytes, location: Location) -> bool:
        """Delete the index entry, if it still says so: then the caller frees the bytes after a commit."""
        with self._tiering as tiering:
            if self._index.get(key) != location:
                return False
            self._index.delete(key)
            tiering.left(key, location.tier)
            return True

    def _leave(self, keys: Sequence[bytes], tier: int | None = None) -> list[Location]:
        """Delete the index entries of blocks, or of those in *tier*. Where they were: the caller frees the bytes after
        a commit."""
        gone: list[Location] = []
        with self._tiering as tiering:
            for key in keys:
                location = self._index.get(key)
                if location is not None and tier in (None, location.tier):
                    self._index.delete(key)
                    tiering.left(key, location.tier)
                    gone.append(location)
        return gone

    def _demote(self, keys: Sequence[bytes]) -> list[Location]:
        """Move blocks of the memory tier to the SSD tier, or drop those that it does not take. Where they were."""
        assert self._ssd is not None
        found = [
            (key, location, data)
            for key in keys
            if (location := self._index.get(key)) is not None
            and location.tier == MEMORY
            and (data := self.read(key, location)) is not None
        ]
        copies = self.write_many(self._ssd, [NewBlock(key, place.checksums, data) for key, place, data in found])
        gone = []
        for (key, location, _), copy in zip(found, copies, strict=True):
            # One that was moved within the tier meanwhile is dropped: no policy knows it now.
            if copy is not None and self.move(key, location, copy):
                gone.append(location)
        return gone + self._leave(keys, MEMORY)


_Item = TypeVar("_Item")


def batches(items: Iterable[_Item], size: int = _BATCH) -> Iterator[list[_Item]]:
    """All *items*, in lists of at most *size*."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
