"""Batches fetched blocks on their way into the store.

All blocks that arrive while a thread is busy are stored in one batch. Blocks whose readers already have their bytes
gather for a moment. To hand one block to a thread and back costs as much as to store it: two wake-ups, and two waits
for the interpreter lock. While no batch is in progress, an urgent block does not wait for others.

Stored on the event loop, a block of 110 KB would be in memory in 0.19 ms instead of 0.38. But GETs wait meanwhile:
beside a reader at full speed (and a load of 20 from other work) that gave 580 blocks per second, and threads give 700.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from cachefs.block import BlockLocation
from cachefs.errors import StoreFull
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
# Blocks that may wait here without a slot, at most.
_MAX_WITHOUT_PERMIT: Final = 32

_RunInThread = Callable[
    [Callable[[Sequence[BlockToStore]], list[StoreOutcome]], Sequence[BlockToStore]], Awaitable[list[StoreOutcome]]
]


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
        """Whether one more block may wait here after giving back its slot."""
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
            raise AssertionError(f"of {len(batch)} blocks, the store has said what came of {len(stored)}")
        for (_, future), outcome in zip(batch, stored, strict=True):
            if not future.done():  # otherwise the caller was cancelled
                future.set_result(outcome)
