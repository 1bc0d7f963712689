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
from cachefs_daemon.store.tier import FileSystemFull, Tier

# Room made by one thread may be taken by another before it is reserved.
_ATTEMPTS: Final = 16
# Tries where the file system turns out to be full: whoever fills it may take what is evicted for us, too.
_FULL_ATTEMPTS: Final = 3
# Seconds for which a block that somebody waits for may wait for room. A block is written in well under a millisecond
# per megabyte, and there is another way to the reader.
_PATIENCE_SECONDS: Final = 0.1
_POLL_SECONDS: Final = 0.002
# Blocks that share a commit when many leave: a commit costs 40 us, and holes wait for it.
_BATCH: Final = 256
# A thread that takes the store's lock again and again must give others the time to take it: a lock is not fair.
LET_OTHERS_SECONDS: Final = 0.0005
# Fewer where each needs room for a second copy until the commit.
COPY_BATCH: Final = 4

Data = bytes | bytearray | memoryview


class Transfers:
    """Thread-safe and blocking. The lock of *tiering* covers decisions and bookkeeping; bytes are moved outside it."""

    def __init__(self, tiers: Sequence[Tier], index: IndexWriter, tiering: Locked[Tiering]) -> None:
        self._tiers = tiers
        self._index = index
        self._tiering = tiering
        self._memory = tiers[MEMORY]
        self._ssd = tiers[SSD] if len(tiers) > SSD else None

    # --- in -----------------------------------------------------------------------------------------------------------

    def write(
        self, tier: Tier, key: bytes, checksums: bytes, data: Data, *, transient: bool = False
    ) -> Location | None:
        """Write a block into a tier, with room made for it; no reader finds it before `enter` or `move`. None where the
        tier's policy does not want it, or the tier cannot take it."""
        full: OSError | None = None
        for _ in range(_FULL_ATTEMPTS):
            if tier.problem:
                return None
            if not self._make_room(tier, key, span(len(data)), transient):
                break
            try:
                location = tier.write(key, checksums, data)
            except FileSystemFull as error:
                full, location = error, None
            if location is not None:
                return location
            with self._tiering as tiering:
                tiering.quotas.arrived(key)
            if full is None:
                return None
        if full is not None:
            tier.suspend(full)
        return None

    def write_transient(self, key: bytes, checksums: bytes, data: Data) -> Location:
        """Write a block that no policy admits into the memory tier. For a moment all room there may be reserved for
        blocks that are being written, none of which can be evicted yet. Raises StoreFull."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (location := self.write(self._memory, key, checksums, data, transient=True)) is None:
            hopeless = self._memory.problem or span(len(data)) > self._memory.limit
            if hopeless or time.monotonic() > deadline:
                reason = self._memory.problem or f"its limit of {self._memory.limit} bytes is in use"
                raise StoreFull(f"the memory tier cannot take a block of {len(data)} bytes: {reason}")
            time.sleep(_POLL_SECONDS)
        return location

    def enter(self, key: bytes, location: Location, *, transient: bool = False) -> Location:
        """Let readers find a block that was written; where it is, if somebody else has brought it meanwhile."""
        with self._tiering as tiering:
            tiering.quotas.arrived(key)
            found = self._index.get(key)
            if found is None:
                self._index.put(key, location)
                tiering.entered(key, Place(location.tier, span(location.length)), transient=transient)
                return location
        self._tiers[location.tier].free_blocks([location])
        return found

    def _make_room(self, tier: Tier, key: bytes, size: int, transient: bool) -> bool:
        """Reserve *size* bytes, if the policy wants the block or it is transient."""
        attempts = _ATTEMPTS
        while attempts:
            with self._tiering as tiering:
                free = tiering.room_in(tier, key, size, transient=transient)
                if free is None:
                    return False
                if size <= free and tier.reserve(size):
                    if not transient:
                        tiering.quotas.coming(tier.number, key, size)
                    return True
                victims = tiering.evicted_for(tier, size - free, key, transient=transient)
                behind = not victims and tiering.catch_up(tier)
            if victims:
                attempts -= 1
                self.evict(tier, victims)
            elif behind:
                time.sleep(LET_OTHERS_SECONDS)
            else:
                return False
        return False

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
        demote = demote and tier is self._memory
        for batch in batches(keys):
            gone = [location for key in batch if (location := self._evict_block(tier, key, demote)) is not None]
            self._index.commit()
            tier.free_blocks(gone)
            with self._tiering as tiering:
                tiering.counts[tier.number].evicted += len(gone)

    def drop(self, keys: Iterable[bytes]) -> tuple[int, int]:
        """Drop blocks, whichever tier they are in. How many blocks and bytes were there."""
        blocks = freed = 0
        for batch in batches(keys):
            gone = [location for key in batch if (location := self._drop_block(key)) is not None]
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

    def _evict_block(self, tier: Tier, key: bytes, demote: bool) -> Location | None:
        """Where it was. Where it is moved within the tier meanwhile it is tried again, since no policy knows it now."""
        while (location := self._index.get(key)) is not None and location.tier == tier.number:
            lower = self._demote(key, location) if demote else None
            if self.leave(key, location) if lower is None else self.move(key, location, lower):
                return location
        return None

    def _demote(self, key: bytes, location: Location) -> Location | None:
        """Where in the SSD tier a memory block's copy now is; None where that tier does not take it."""
        if self._ssd is None or (data := self.read(key, location)) is None:
            return None
        return self.write(self._ssd, key, location.checksums, data)

    def _drop_block(self, key: bytes) -> Location | None:
        """Where it was."""
        while (location := self._index.get(key)) is not None:
            if self.leave(key, location):
                return location
        return None


_Item = TypeVar("_Item")


def batches(items: Iterable[_Item], size: int = _BATCH) -> Iterator[list[_Item]]:
    """All *items*, in lists of at most *size*."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
