"""The blocks of this node: which tier each goes to, what gives way for it, and how to get it back.

A block enters the memory tier if that tier's policy admits it, else the SSD tier. What memory gives up moves to the
SSD if the policy there admits it. A block nobody admits still goes to memory, as a *passing* block: first in, first
out, ahead of everything else, so that a reader always gets its bytes through a segment. A hit in the SSD tier is not
copied up by itself: the kernel's page cache in front of the segment is memory already, and a copy would evict what is
hot. Who knows what is read next can have it copied (`promote`). With `lru`, tiers are one list of both their sizes.

The order of writes is what makes a crash harmless and a reader's race detectable: bytes, then index entry; index entry
gone and committed, then hole. See cachefs_daemon.store.recovery for what is left to do after a crash.
"""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from cachefs.block import MEMORY, SSD, Location, piece_checksums
from cachefs.errors import StoreFull
from cachefs.planning.blocks.presence import state_of
from cachefs.planning.blocks.space import NO_BLOCK, BlockSpace
from cachefs.planning.eviction.policies import Policy, open_policy
from cachefs.planning.eviction.policies.uses import Uses
from cachefs.planning.eviction.quotas import Quota, Quotas
from cachefs.planning.eviction.tiering import Tiering
from cachefs.planning.pagecache.coverage import Coverage
from cachefs.planning.sequences.plan import Plan
from cachefs_daemon.store.recovery import open_index, reconcile
from cachefs_daemon.store.segment_writer import span
from cachefs_daemon.store.state_dir import StateDirectory
from cachefs_daemon.store.tier import Tier, TierConfig

__all__ = ["BlockStore", "StoreConfig", "TierConfig", "TierUsage"]

_log = logging.getLogger(__name__)

# Room made by one thread may be taken by another before it is reserved.
_ATTEMPTS: Final = 16
# How long a block somebody waits for waits for room. A block is written in well under a millisecond per megabyte.
_PATIENCE_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.002
# Blocks that share a commit when many leave: a commit costs 40 us, and holes wait for it.
_BATCH: Final = 256
# Blocks whose state is looked up under the lock at once: 2 ms.
_WATCH_BATCH: Final = 1024
# Fewer where each needs room for a second copy until the commit.
_COPY_BATCH: Final = 4


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """state_dir: of the index and the lock; block_size: largest block, in bytes; ssd: None for a node without."""

    state_dir: Path
    block_size: int
    memory: TierConfig
    ssd: TierConfig | None


@dataclass(frozen=True, slots=True)
class TierUsage:
    """One tier, in bytes and blocks. limit: the budget after cgroup and free-space limits; problem: empty if none."""

    name: str
    directory: Path
    budget: int
    limit: int
    used: int
    blocks: int
    segments: int
    evicted: int
    policy: str
    problem: str


class BlockStore:
    """Thread-safe and blocking. The lock covers decisions and bookkeeping; bytes are moved outside it.

    index_path: the LMDB file that mounts read; repairs: blocks dropped because their bytes were wrong; plan: what the
    policies know of the future; page_cached: what the memory tier gives up first; both for others to fill.
    """

    def __init__(self, config: StoreConfig) -> None:
        """Open and recover. Raises ConfigError, Busy, or another CachefsError."""
        self.repairs = 0
        self.plan = Plan()
        self.page_cached = Coverage(self.plan)
        self._uses = Uses()
        self._lock = threading.Lock()
        self._maintaining = threading.Lock()
        with ExitStack() as undo:
            self._state = StateDirectory(config.state_dir)
            undo.callback(self._state.close)
            self._memory = Tier(MEMORY, config.memory, config.block_size)
            undo.callback(self._memory.close)
            self._tiers = [self._memory]
            self._ssd = None
            if config.ssd is not None and config.ssd.budget > 0:
                self._ssd = Tier(SSD, config.ssd, config.block_size)
                undo.callback(self._ssd.close)
                self._tiers.append(self._ssd)
            self._index = open_index(self._state)
            undo.callback(self._index.close)
            self.index_path = self._index.path
            limits = Quotas([tier.capacity for tier in self._tiers], self._open_policies, self.plan)
            policies = self._open_policies()
            self._placement = Tiering(self._tiers, policies, self._uses, limits, self.get, config.block_size)
            self._recover()
            undo.pop_all()

    def get(self, key: bytes) -> Location | None:
        return self._index.get(key)

    def put(
        self, key: bytes, data: bytes | bytearray | memoryview, *, transient: bool = True, snapshot: str = ""
    ) -> Location | None:
        """Store a block and say where; where it was, if it was there already.

        transient: keep it for a while even if no policy admits it; without, the answer is then None. snapshot: for
        which it was fetched. Raises StoreFull where there is no room even for that.
        """
        found = self.get(key)
        if found is not None:
            return found
        with self._lock:
            claimed = self._placement.limits.claim(key, snapshot, time.monotonic())
        try:
            return self._bring(key, data, transient)
        finally:
            if claimed:
                with self._lock:
                    if self.get(key) is None:
                        self._placement.limits.forget(key)

    def _bring(self, key: bytes, data: bytes | bytearray | memoryview, transient: bool) -> Location | None:
        checksums = piece_checksums(key, data)
        for tier in self._tiers:
            location = self._write(tier, key, checksums, data)
            if location is not None:
                return self._enter(key, location)
        if not transient:
            return None
        location = self._write_passing(key, checksums, data)
        return self._enter(key, location, passing=True)

    def read(self, key: bytes, location: Location) -> bytes | None:
        """The block's bytes, verified; None if they are not right (or no longer there)."""
        return self._tiers[location.tier].read(key, location) if location.tier < len(self._tiers) else None

    def repair(self, key: bytes, location: Location) -> bool:
        """A reader found bad bytes: drop the block, if it is still said to be there and its bytes are bad indeed."""
        if self.get(key) != location or self.read(key, location) is not None or not self._leave(key, location):
            return False
        with self._lock:
            self.repairs += 1
        tier = self._tiers[location.tier]
        _log.warning(
            "%s tier: dropped block %s, whose bytes are damaged (segment %d)", tier.name, key.hex(), location.segment
        )
        self._index.commit()
        tier.free_blocks([location])
        return True

    def accessed(self, keys: Sequence[bytes]) -> None:
        """Readers used these blocks, oldest use first."""
        with self._lock:
            self._placement.accessed(keys)
            self._placement.limits.accessed(keys, time.monotonic())

    def evict(self, keys: Iterable[bytes]) -> tuple[int, int]:
        """Drop blocks, pinned or not. Blocks and bytes that were there."""
        blocks = freed = 0
        for batch in _batches(keys):
            gone = [location for key in batch if (location := self._drop(key)) is not None]
            self._index.commit()
            for tier in self._tiers:
                tier.free_blocks(location for location in gone if location.tier == tier.number)
            blocks += len(gone)
            freed += sum(location.length for location in gone)
        return blocks, freed

    def promote(self, keys: Iterable[bytes]) -> int:
        """Move blocks from the SSD to the memory tier, as far as they are not in the page cache and its policy prefers
        them to what goes for them, which goes to the SSD. How many were moved."""
        moved = 0
        for batch in _batches(keys, _COPY_BATCH) if self._ssd is not None else ():
            gone = []
            for key in batch:
                location = self.get(key) if not self.page_cached.holds_key(key) else None
                data = self.read(key, location) if location is not None and location.tier == SSD else None
                if location is None or data is None:
                    continue
                copy = self._write(self._memory, key, location.checksums, data)
                if copy is not None and self._move(key, location, copy):
                    gone.append(location)
            self._index.commit()
            self._tiers[SSD].free_blocks(gone)
            moved += len(gone)
        return moved

    def read_ahead(self, keys: Iterable[bytes]) -> None:
        """Have blocks of the SSD tier in the kernel's page cache when a reader comes."""
        for key in keys:
            location = self.get(key)
            if location is not None and location.tier == SSD:
                self._tiers[SSD].read_ahead(location)

    @property
    def free(self) -> tuple[int, ...]:
        """Bytes per tier that nobody uses or is about to."""
        return tuple(self._placement.free(tier) for tier in self._tiers)

    @property
    def step(self) -> int:
        """Bytes that are freed at once beyond what a block needs, at most."""
        return self._placement.step

    def room_for(self, key: bytes, snapshot: str = "") -> int:
        """About how many bytes are free, or taken by blocks that would be given up for this one of *snapshot*."""
        with self._lock:
            return self._placement.room_for(key, snapshot)

    def allowance(self, snapshot: str) -> float:
        """Bytes by which the blocks of *snapshot* may still become more; inf where its dataset has no limit."""
        return self._placement.limits.allowance(snapshot)

    def set_limit(self, limit: Quota) -> None:
        with self._lock:
            self._placement.limits.set(limit)

    def remove_limit(self, dataset: str) -> None:
        with self._lock:
            self._placement.limits.remove(dataset)

    def claim(self, keys: Iterable[bytes], snapshot: str) -> None:
        """Count those of these blocks that are here, and count for no limited dataset, for that of *snapshot*."""
        for batch in _batches(keys):
            with self._lock:
                self._placement.claim(batch, snapshot, time.monotonic())

    def watch(self, space: BlockSpace) -> npt.NDArray[np.uint8]:
        """The state of each block of *space* (see cachefs.planning.blocks.presence), kept up to date until `unwatch`.
        Takes 3 us per block on this node, so call it in a thread; until it returns, some count as absent that are
        not."""
        residents = self._placement.residents
        with self._lock:
            residents.watch(space)
        for batch in _batches(self.keys(), _WATCH_BATCH):
            ids = space.ids(batch)
            here = np.flatnonzero(ids != NO_BLOCK)
            with self._lock:
                if space.snapshot in residents.states:
                    states = [state_of(self.get(batch[index])) for index in here.tolist()]
                    residents.set_all(space.snapshot, ids[here], states)
        return residents.states.get(space.snapshot, np.zeros(space.count, np.uint8))

    def unwatch(self, snapshot: str) -> None:
        with self._lock:
            self._placement.residents.unwatch(snapshot)

    @property
    def residents(self) -> Mapping[str, npt.NDArray[np.uint8]]:
        """What `watch` returned, by snapshot."""
        return self._placement.residents.states

    def pin(self, keys: Iterable[bytes]) -> None:
        """Keep these blocks, once a policy has admitted them, until unpinned or evicted by name."""
        with self._lock:
            self._placement.pin(keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            self._placement.unpin(keys)

    def blocks_of(self, content: bytes) -> list[tuple[bytes, Location]]:
        return self._index.blocks_of(content)

    def keys(self) -> list[bytes]:
        return self._index.keys()

    def usage(self) -> list[TierUsage]:
        return [
            TierUsage(
                tier.name, tier.directory, tier.config.budget, tier.limit, tier.used, tier.blocks, tier.segments,
                tier.evicted, tier.config.policy, tier.problem,
            )
            for tier in self._tiers
        ]  # fmt: skip

    def maintain(self) -> None:
        """Housekeeping, to be called every few seconds. Does nothing while the last call, on a slow disk, runs."""
        if not self._maintaining.acquire(blocking=False):
            return
        try:
            self._index.drop_dead_readers()
            self._drop_expired()
            for tier in self._tiers:
                tier.refresh_limit()
                self._shrink(tier)
                with self._lock:
                    surplus = self._placement.beyond_limits(tier)
                self._give_up(tier, surplus)
                tier.retry()
                if not tier.problem:
                    self._compact(tier)
        finally:
            self._maintaining.release()

    def close(self) -> None:
        """Call it last, when no other call is under way."""
        if self._index.close():
            self._state.mark_clean()
        for tier in self._tiers:
            tier.close()
        self._state.close()

    def _open_policies(self) -> list[Policy]:
        cached = [self.page_cached if tier is self._memory else None for tier in self._tiers]
        return [
            open_policy(tier.config.policy, self.plan, one, self._uses)
            for tier, one in zip(self._tiers, cached, strict=True)
        ]

    def _recover(self) -> None:
        reconcile(self._index, self._tiers, self._placement.recovered)
        for tier in self._tiers:
            self._shrink(tier)

    # --- coming ---------------------------------------------------------------------------------------------------

    def _write(
        self, tier: Tier, key: bytes, checksums: bytes, data: bytes | bytearray | memoryview, *, passing: bool = False
    ) -> Location | None:
        if tier.problem or not self._make_room(tier, key, span(len(data)), passing):
            return None
        location = tier.write(key, checksums, data)
        if location is None:
            with self._lock:
                self._placement.limits.arrived(key)
        return location

    def _write_passing(self, key: bytes, checksums: bytes, data: bytes | bytearray | memoryview) -> Location:
        """For a moment all room may be reserved for blocks that are being written, of which none can go yet."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (location := self._write(self._memory, key, checksums, data, passing=True)) is None:
            hopeless = self._memory.problem or span(len(data)) > self._memory.limit
            if hopeless or time.monotonic() > deadline:
                reason = self._memory.problem or f"its limit of {self._memory.limit} bytes is in use"
                raise StoreFull(f"the memory tier cannot take a block of {len(data)} bytes: {reason}")
            time.sleep(_POLL_SECONDS)
        return location

    def _make_room(self, tier: Tier, key: bytes, size: int, passing: bool) -> bool:
        """Reserve *size* bytes, if the policy wants the block or it is only passing."""
        for _ in range(_ATTEMPTS):
            with self._lock:
                free = self._placement.room_in(tier, key, size, passing=passing)
                if free is None:
                    return False
                if size <= free and tier.reserve(size):
                    if not passing:
                        self._placement.limits.coming(tier.number, key, size)
                    return True
                victims = self._placement.makers_of_room(tier, size - free, key, passing=passing)
            if not victims:
                return False
            self._give_up(tier, victims)
        return False

    def _enter(self, key: bytes, location: Location, *, passing: bool = False) -> Location:
        with self._lock:
            self._placement.limits.arrived(key)
            found = self._index.get(key)
            if found is None:
                self._index.put(key, location)
                self._placement.entered(key, location, passing=passing)
                return location
        self._tiers[location.tier].free_blocks([location])
        return found

    # --- going ----------------------------------------------------------------------------------------------------

    def _give_up(self, tier: Tier, keys: Iterable[bytes]) -> None:
        """Move blocks to the SSD tier or drop them, and free their room."""
        for batch in _batches(keys):
            gone = [location for key in batch if (location := self._give_up_block(tier, key)) is not None]
            self._index.commit()
            tier.free_blocks(gone)
            with self._lock:
                tier.evicted += len(gone)

    def _give_up_block(self, tier: Tier, key: bytes) -> Location | None:
        """Where it was. Where it is moved within the tier meanwhile it is tried again, since no policy knows it now."""
        while (location := self.get(key)) is not None and location.tier == tier.number:
            lower = self._demote(key, location) if tier is self._memory else None
            if self._leave(key, location) if lower is None else self._move(key, location, lower):
                return location
        return None

    def _drop(self, key: bytes) -> Location | None:
        """Where it was."""
        while (location := self.get(key)) is not None:
            if self._leave(key, location):
                return location
        return None

    def _demote(self, key: bytes, location: Location) -> Location | None:
        """Where in the SSD tier a memory block's copy now is; None where that tier does not take it."""
        if self._ssd is None or (data := self.read(key, location)) is None:
            return None
        return self._write(self._ssd, key, location.checksums, data)

    def _leave(self, key: bytes, location: Location) -> bool:
        """Delete the index entry, if it still says so: then the caller frees the bytes after a commit."""
        with self._lock:
            if self._index.get(key) != location:
                return False
            self._index.delete(key)
            self._placement.left(key, location)
            return True

    def _move(self, key: bytes, old: Location, new: Location) -> bool:
        """Let the index say *new*, if it still says *old*: then the caller frees the old bytes after a commit."""
        with self._lock:
            self._placement.limits.arrived(key)
            if self._index.get(key) == old:
                self._index.put(key, new)
                if old.tier != new.tier:
                    self._placement.moved(key, old, new)
                return True
        self._tiers[new.tier].free_blocks([new])
        return False

    # --- housekeeping ---------------------------------------------------------------------------------------------

    def _shrink(self, tier: Tier) -> None:
        """Give up blocks until the tier is within its limit, which may have sunk."""
        while (excess := -tier.free) > 0:
            used = tier.used
            with self._lock:
                victims = self._placement.surplus(tier, excess)
            # The limit is physical: where the policy names none, the oldest blocks go, pinned or not.
            self._give_up(tier, victims or self._oldest_blocks(tier))
            if tier.used >= used:
                return

    def _drop_expired(self) -> None:
        while True:
            with self._lock:
                expired = self._placement.expired(time.monotonic())
            if not expired:
                return
            blocks, freed = self.evict(expired)
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
        for batch in _batches(self._live_blocks(tier, number), _COPY_BATCH):
            gone, full = [], False
            for key, location in batch:
                data = self.read(key, location)
                if data is None:
                    self.repair(key, location)
                    continue
                copy = self._write(tier, key, location.checksums, data)
                if copy is None:
                    full = True
                elif self._move(key, location, copy):
                    gone.append(location)
            self._index.commit()
            tier.free_blocks(gone)
            if full:
                return False
        return True

    def _live_blocks(self, tier: Tier, number: int) -> Iterator[tuple[bytes, Location]]:
        """None where somebody has deleted the segment. Raises OSError."""
        try:
            _, ranges = tier.survey(number)
        except FileNotFoundError:
            return
        for record in tier.records(number, ranges):
            location = record.location(tier.number, number)
            if self.get(record.key) == location:
                yield record.key, location


_Item = TypeVar("_Item")


def _batches(items: Iterable[_Item], size: int = _BATCH) -> Iterator[list[_Item]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
