"""Puts fetched blocks into the store, in batches. Blocks that no tier can hold become bypass blocks for their readers.

All blocks that arrive while a thread is busy are stored in one batch. Blocks whose readers already have their bytes
gather for a moment. To hand one block to a thread and back costs as much as to store it: two wake-ups, and two waits
for the interpreter lock. While no batch is in progress, an urgent block does not wait for others.

Stored on the event loop, a block of 110 KB would be in memory in 0.19 ms instead of 0.38. But GETs wait meanwhile:
beside a reader at full speed (and a load of 20 from other work) that gave 580 blocks per second, and threads give 700.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from cachefs.block import BlockLocation
from cachefs.errors import StoreFull
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch.block_fetch import BlockFetch, BypassBlock, BypassBlocks
from cachefs_daemon.fetch.fetch_parts import FetchParts, FetchResult
from cachefs_daemon.store.block_store import BlockStore, BlockToStore

# Result for a block; None if no tier's policy wants it.
StoreOutcome = BlockLocation | StoreFull | None
# Seconds after which more batches are started beside a slow one: it may wait for a disk, which must not delay blocks
# that go to memory. A disk that hangs is found by the writes that try it (see `Tier.write`).
_SLOW_SECONDS: Final = 0.05
_MAX_BATCHES: Final = 8
# Blocks of one batch, and their bytes if more than one. Readers wait until the whole batch is stored: 16 blocks of 4
# MiB take half a second on a disk of 130 MB/s.
_MAX_BATCH_BLOCKS: Final = 16
_MAX_BATCH_BYTES: Final = 4 << 20
# Blocks without waiting readers gather for so many seconds, or until there are so many: stored one by one they took 22
# % more processor time of threads.
_GATHER_SECONDS: Final = 0.005
_GATHER_BLOCKS: Final = 8
# Blocks that may wait here without a permit, at most.
_MAX_WITHOUT_PERMIT: Final = 32

_RunInThread = Callable[
    [Callable[[Sequence[BlockToStore]], list[StoreOutcome]], Sequence[BlockToStore]], Awaitable[list[StoreOutcome]]
]


# Divisor of the bytes that may be in flight: the share of bypass blocks.
BYPASS_DIVISOR: Final = 8
# Seconds for which a refusal is remembered. With a full tier and a policy that never evicts, a block fetched ahead
# would be thrown away, so after a refusal nothing as large is fetched ahead for a moment.
REFUSAL_MEMORY_SECONDS: Final = 1.0


class BlockWriter:
    """Puts fetched blocks into a tier, remembers which were refused, and counts what became of them. Used on the event
    loop."""

    def __init__(self, parts: FetchParts) -> None:
        self.bypass_blocks = BypassBlocks(parts.limiter.capacity // BYPASS_DIVISOR)
        self._threads = parts.threads
        self._errors = parts.errors
        self._counts = parts.counts
        self._writes = TierWrites(parts.store, parts.threads.run)  # for blocks with a waiting reader
        self._writes_ahead = TierWrites(parts.store, parts.threads.ahead, batches_at_once=1)
        self._refused: dict[str, tuple[int, float]] = {}  # by snapshot: bytes of the last refused block, loop time

    @property
    def has_room(self) -> bool:
        """Whether one more block may wait here after giving back its permit."""
        return self._writes.has_room

    def is_likely_refused(self, fetch: BlockFetch) -> bool:
        """Return whether no tier is likely to take the block, as long as no reader waits for it."""
        # A caller that knows when a block is needed has checked the room before.
        if fetch.needed_at < math.inf or fetch.may_be_transient:
            return False
        length, when = self._refused.get(fetch.source.snapshot, (0, -math.inf))
        is_as_large = fetch.source.length >= length
        return is_as_large and asyncio.get_running_loop().time() - when < REFUSAL_MEMORY_SECONDS

    async def store_block(self, fetch: BlockFetch, came_from: str) -> BlockLocation | BypassBlock | None:
        """Store the bytes of a block, and return its location; a bypass block if no tier can hold it and a reader
        waits; None if no tier takes it. came_from: ORIGIN or PEER."""
        became = FetchResult.DISCARDED
        try:
            location = await self._store_or_bypass(fetch)
            if location is not None:
                became = FetchResult.STORED if isinstance(location, BlockLocation) else FetchResult.BYPASSED
        finally:
            self._counts.count_block(came_from, became, fetch.source.length)
        if location is None and fetch.needed_at == math.inf:
            self._note_refusal(fetch.source)
        return location

    def _note_refusal(self, source: BlockSource) -> None:
        now = asyncio.get_running_loop().time()
        self._refused = {key: seen for key, seen in self._refused.items() if now - seen[1] < REFUSAL_MEMORY_SECONDS}
        self._refused[source.snapshot] = source.length, now

    async def _store_or_bypass(self, fetch: BlockFetch) -> BlockLocation | BypassBlock | None:
        source, demanded = fetch.source, fetch.has_reader
        writes = self._writes if demanded else self._writes_ahead
        transient = demanded or fetch.may_be_transient
        block = BlockToStore(
            source.key, fetch.data, transient, source.snapshot, fetch.checksums, is_copy=not fetch.is_kept_here
        )
        try:
            stored = await writes.write_block(block, is_urgent=demanded and fetch.early_block is None)
        except Exception as error:
            if not fetch.has_reader:
                raise
            # A bug, possibly of any block of the batch. The bytes are here, so readers get them.
            self._errors.add("the store", f"internal error ({error!r}); see the daemon's log", bug=error)
            stored = StoreFull("the store has failed")
        if isinstance(stored, StoreFull) and not fetch.has_reader:
            return None
        return await self.bypass(fetch, str(stored)) if isinstance(stored, StoreFull) else stored

    async def bypass(self, fetch: BlockFetch, reason: str) -> BypassBlock:
        """Return the arrived bytes as a bypass block, which no tier has or takes. reason: for the log."""
        block = fetch.early_block
        if block is None:
            block = await self._threads.run(BypassBlock.of, fetch.source.key, fetch.data, fetch.checksums)
        self.bypass_blocks.add(fetch.source.key, block, reason)
        return block


class TierWrites:
    """One queue of blocks to be stored. Used on the event loop."""

    def __init__(self, store: BlockStore, run: _RunInThread, batches_at_once: int = 2) -> None:
        """run: calls a function in a thread; batches_at_once: concurrent batches. Use one where no reader waits: two
        threads wait for each other's locks."""
        self._batches_at_once = batches_at_once
        self._store = store
        self._run = run
        self._waiting: deque[tuple[BlockToStore, asyncio.Future[StoreOutcome]]] = deque()
        self._batches: set[asyncio.Task[None]] = set()
        self._slow_timer: asyncio.TimerHandle | None = None
        self._gather_timer: asyncio.TimerHandle | None = None

    @property
    def has_room(self) -> bool:
        """Whether one more block may wait here after giving back its permit."""
        return len(self._waiting) < _MAX_WITHOUT_PERMIT

    async def write_block(self, block: BlockToStore, *, is_urgent: bool = True) -> StoreOutcome:
        """Store the block and return the result. Raises as the store does. is_urgent: a reader waits for it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[StoreOutcome] = loop.create_future()
        self._waiting.append((block, future))
        if not is_urgent and not self._batches and len(self._waiting) < _GATHER_BLOCKS:
            self._gather_timer = self._gather_timer or loop.call_later(_GATHER_SECONDS, self._start_batch)
        elif len(self._batches) < self._batches_at_once:
            self._start_batch()
        elif self._slow_timer is None:
            self._slow_timer = asyncio.get_running_loop().call_later(_SLOW_SECONDS, self._start_beside_slow)
        return await future

    def _start_beside_slow(self) -> None:
        """Start another batch beside slow ones."""
        self._slow_timer = None
        if self._waiting and len(self._batches) < _MAX_BATCHES:
            self._start_batch()
            self._slow_timer = asyncio.get_running_loop().call_later(_SLOW_SECONDS, self._start_beside_slow)

    def _start_batch(self) -> None:
        if self._gather_timer is not None:
            self._gather_timer.cancel()
            self._gather_timer = None
        task = asyncio.create_task(self._write_batches())
        self._batches.add(task)
        task.add_done_callback(self._batches.discard)

    async def _write_batches(self) -> None:
        while self._waiting:
            batch = self._next_batch()
            try:
                await self._store_batch(batch)
            except BaseException as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                raise

    def _next_batch(self) -> list[tuple[BlockToStore, asyncio.Future[StoreOutcome]]]:
        batch = [self._waiting.popleft()]
        size = len(batch[0][0].data)
        while self._waiting and len(batch) < _MAX_BATCH_BLOCKS:
            size += len(self._waiting[0][0].data)
            if size > _MAX_BATCH_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _store_batch(self, batch: Sequence[tuple[BlockToStore, asyncio.Future[StoreOutcome]]]) -> None:
        try:
            stored = await self._run(self._store.put_many, [block for block, _ in batch])
        except Exception as error:
            if len(batch) > 1:
                # Store each block by itself, so that a bad one does not fail the others. Blocks stored before are found
                # there.
                for one in batch:
                    await self._store_batch([one])
            elif not batch[0][1].done():
                batch[0][1].set_exception(error)
            return
        if len(stored) != len(batch):
            raise AssertionError(f"the store returned {len(stored)} results for {len(batch)} blocks")
        for (_, future), outcome in zip(batch, stored, strict=True):
            if not future.done():  # otherwise the caller was cancelled
                future.set_result(outcome)
