"""Turns what a job publishes into block spaces, samples and epochs for a plan, computed in threads."""

import asyncio
import threading
import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.block import block_key
from cachefs.errors import CachefsError, OriginUnavailable
from cachefs.job_messages import SampleMap
from cachefs.messages import BlockRef
from cachefs.planning.blocks.space import BlockSpace, EpochReads, Ids, Samples
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.sampler import EpochOrder, SamplerSpec, epoch_order
from cachefs.planning.sequences.search import ReadCluster, find_densest
from cachefs.planning.sequences.timeline import PlannedEpoch
from cachefs.snapshot import Snapshot
from cachefs_daemon.fetch.block_fetch import BypassBlock
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.jobs import sample_maps
from cachefs_daemon.jobs.plan_memory import PlanMemory
from cachefs_daemon.ports import LOCAL_PLACEMENT, Placement
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.block_store import BlockStore
from cachefs_daemon.store.presence_watch import PresenceWatch

# A block that an indexer needs is fetched like one that a reader waits for.
INDEX_READ_SECONDS: Final = 60.0
# A block may be evicted, or turn out to be damaged, before its indexer has read it; then it is fetched again.
_INDEX_TRIES: Final = 4


@dataclass(frozen=True, slots=True)
class PreparedEpoch:
    """An epoch in the form that a plan takes."""

    reads: EpochReads
    planned: PlannedEpoch  # the same, arranged for the plan

    @classmethod
    def of(cls, reads: EpochReads, samples: Samples, last: bool) -> "PreparedEpoch":
        """Prepare an epoch. last: no epoch follows. Call in a thread: it takes 0.3 s for 14 million reads."""
        return cls(reads, PlannedEpoch.of(reads.blocks, samples.space, last))


@dataclass(frozen=True, slots=True)
class LocatedEpoch:
    """An epoch in which reads lie close together."""

    number: int
    epoch: PreparedEpoch
    cluster: ReadCluster  # the position of the reads in the epoch


@dataclass(frozen=True, slots=True)
class LoaderParts:
    """The parts of the node that the epoch loader uses."""

    plan: Plan
    presence: PresenceWatch
    # Read files that list samples.
    blocks: BlockStore
    fetcher: Fetcher
    threads: Threads
    # For the plans of all consumers.
    plan_memory: PlanMemory
    placement: Placement = LOCAL_PLACEMENT


class EpochLoader:
    """Loads block spaces and epochs. Consumers that read the same snapshot at the same time share its block space and
    its `tree` map, which are forgotten with the last of these consumers."""

    def __init__(self, parts: LoaderParts) -> None:
        self.plan_memory = parts.plan_memory
        self._placement = parts.placement
        self._plan = parts.plan
        self._presence = parts.presence
        self._blocks = parts.blocks
        self._fetcher = parts.fetcher
        self._threads = parts.threads
        self._spaces: weakref.WeakValueDictionary[str, BlockSpace] = weakref.WeakValueDictionary()
        self._trees: weakref.WeakValueDictionary[str, Samples] = weakref.WeakValueDictionary()
        # By snapshot: held while its space is created, or forgotten.
        self._space_locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    @property
    def first_rate(self) -> float:
        """The rate in reads per second that the plan assumes until a consumer has begun; 0: the plan's own."""
        return self._placement.first_rate

    async def load_samples(self, snapshot: Snapshot, sample_map: SampleMap) -> Samples:
        """Return the blocks of each sample. Raises ConfigError, NotFound, SnapshotDamaged, and the errors of reading
        indexed files."""
        async with self._space_lock(snapshot.id):
            space = self._spaces.get(snapshot.id)
            if space is None:
                space = self._spaces[snapshot.id] = await self._threads.planning(BlockSpace.of, snapshot)
                await self._placement.place_snapshot(space)
            if snapshot.id not in self._presence.watched:
                await self._threads.background(self._presence.watch, space)
            if sample_map.kind == "tree":
                tree = self._trees.get(snapshot.id)
                if tree is None:
                    tree = await self._resolve(sample_map, snapshot, space)
                    self._trees[snapshot.id] = tree
                return tree
        return await self._resolve(sample_map, snapshot, space)

    async def forget_unused(self, used_snapshots: Callable[[], Container[str]]) -> None:
        """Forget the snapshots whose ids are not among *used()*, which is called again for each: while one is
        forgotten, jobs begin that read another."""
        for snapshot in {*self._plan.spaces, *self._presence.watched}:
            if snapshot in used_snapshots():
                continue
            async with self._space_lock(snapshot):
                if snapshot not in used_snapshots():
                    self._plan.remove_space(snapshot)
                    await self._threads.background(self._presence.unwatch, snapshot)

    def _space_lock(self, snapshot: str) -> asyncio.Lock:
        return self._space_locks.setdefault(snapshot, asyncio.Lock())

    async def own_blocks(self, samples: Samples) -> npt.NDArray[np.bool_] | None:
        """See `Samples.block_mask`."""
        return await self._threads.planning(samples.block_mask)

    async def prepare_order(self, samples: Samples, order: EpochOrder, last: bool) -> PreparedEpoch:
        """Return an epoch whose samples come in this *order*: sample numbers, shape (n,), uint32. last: no epoch
        follows. Raises ConfigError."""
        return await self._threads.planning(lambda: PreparedEpoch.of(samples.reads_in_order(order), samples, last))

    async def compute_epoch(self, samples: Samples, spec: SamplerSpec, epoch: int, last: bool) -> PreparedEpoch:
        """Return an epoch that the sampler determines. last: no epoch follows. Raises ConfigError."""
        return await self._threads.planning(
            lambda: PreparedEpoch.of(samples.reads_in_order(epoch_order(spec, epoch)), samples, last)
        )

    async def locate_reads(
        self, samples: Samples, spec: SamplerSpec, epochs: Sequence[int], judged: Ids, reorder_window: int
    ) -> LocatedEpoch | None:
        """Return the first of these epochs in which the reads of the blocks *judged* (shape (n,), int32) lie close
        together.

        reorder_window: reads by which the loader's workers may differ from the order.
        """

        def search() -> LocatedEpoch | None:
            for number in epochs:
                reads = samples.reads_in_order(epoch_order(spec, number))
                epoch = PreparedEpoch.of(reads, samples, number == spec.epochs - 1)
                cluster = find_densest(epoch.planned, judged, reorder_window)
                if cluster.share:
                    return LocatedEpoch(number, epoch, cluster)
            return None

        return await self._threads.planning(search)

    async def _resolve(self, sample_map: SampleMap, snapshot: Snapshot, space: BlockSpace) -> Samples:
        if not sample_map.indexer:
            return await self._threads.planning(sample_maps.resolve, sample_map, snapshot, space, _refuse_read)
        cancelled = threading.Event()
        read = self._file_reader(snapshot, cancelled)
        try:
            # Indexing may wait for an origin for minutes, so it does not run in a thread that others need.
            return await self._threads.indexing(sample_maps.resolve, sample_map, snapshot, space, read)
        finally:
            cancelled.set()

    def _file_reader(self, snapshot: Snapshot, cancelled: threading.Event) -> sample_maps.ReadFile:
        """Return a function that reads files of *snapshot* through the cache, from a thread. Indexers read forward, so
        it keeps one block. Once *cancelled* is set, the thread ends at its next read."""
        loop = asyncio.get_running_loop()
        kept: tuple[int, int, bytes] = (-1, -1, b"")

        def block(entry: int, content: bytes, number: int) -> bytes:
            nonlocal kept
            if kept[:2] != (entry, number):
                ref = BlockRef(snapshot.id, entry, number)
                kept = (entry, number, self._read_block(ref, block_key(content, number), loop))
            return kept[2]

        def read(entry: int, offset: int, length: int) -> bytes:
            if cancelled.is_set():
                raise CachefsError("the caller no longer waits for the records")
            size, content = snapshot.size_and_content(entry)
            end = min(offset + length, size)
            parts = []
            while offset < end:
                number, start = divmod(offset, snapshot.block_size)
                parts.append(block(entry, content, number)[start : start + end - offset])
                offset += len(parts[-1])
            return b"".join(parts)

        return read

    def _read_block(self, ref: BlockRef, key: bytes, loop: asyncio.AbstractEventLoop) -> bytes:
        """Read a block in the indexer's thread, so that threads of readers do not wait for a disk on its behalf."""
        for _ in range(_INDEX_TRIES):
            fetching = self._fetcher.fetch_on_demand([ref], INDEX_READ_SECONDS)
            [found] = asyncio.run_coroutine_threadsafe(fetching, loop).result()
            if isinstance(found, CachefsError):
                raise found
            if isinstance(found, BypassBlock):
                return bytes(found.data)
            data = self._blocks.read(key, found)
            if data is not None:
                return data
            ref = BlockRef(ref.snapshot, ref.entry, ref.number, found.pack())
        raise OriginUnavailable(f"block {ref.number} of entry {ref.entry} was evicted before it could be indexed")


def _refuse_read(entry: int, offset: int, length: int) -> bytes:
    """Stand in for the read function, for maps that list every record."""
    raise AssertionError("only indexers read")
