"""Fetched blocks on their way into the store: all that have come while a thread was busy go there in one batch. Blocks
whose readers have their bytes already gather for a moment.

To hand one block to a thread and back costs as much as to store it: two wake-ups, and twice a wait for the interpreter
lock. While nothing else is on its way, a block does not wait for others.

On the event loop a block of 110 KB would be in memory in 0.19 ms in place of 0.38. But GETs wait meanwhile: beside a
reader at full speed (and a load of 20 from other work) 580 blocks came in a second so, and 700 in this way.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from cachefs.block import Location
from cachefs.errors import StoreFull
from cachefs_daemon.store.block_store import BlockStore, Put

# What came of a block; None where no tier's policy wants it.
Stored = Location | StoreFull | None
# Where a batch takes as long as this, more are stored at once: it may wait for a disk, which concerns nobody whose
# block goes to memory, and a disk that hangs is found out by those that try it (see `Tier.write`).
_LONG_SECONDS: Final = 0.05
_MOST_BATCHES: Final = 8
# Blocks of one batch, and their bytes where it has more than one. Their readers wait until the whole batch is stored:
# 16 blocks of 4 MiB take half a second on a disk of 130 MB/s.
_MOST: Final = 16
_MOST_BYTES: Final = 4 << 20
# Blocks that nobody waits for any more gather for so many seconds, or until there are so many: stored one by one they
# took 22 % more processor time of threads.
_GATHER_SECONDS: Final = 0.005
_GATHERED: Final = 8
# Blocks that wait here without a slot, at most.
_FEW: Final = 32

_Run = Callable[[Callable[[Sequence[Put]], list[Stored]], Sequence[Put]], Awaitable[list[Stored]]]


class Puts:
    """One queue of blocks to be stored. Used on the event loop."""

    def __init__(self, store: BlockStore, run: _Run, at_once: int = 2) -> None:
        """run: calls a function in a thread; at_once: batches that are stored at once. Where nobody waits, one: two
        threads wait for each other's locks."""
        self._at_once = at_once
        self._store = store
        self._run = run
        self._waiting: deque[tuple[Put, asyncio.Future[Stored]]] = deque()
        self._batches: set[asyncio.Task[None]] = set()
        self._look: asyncio.TimerHandle | None = None
        self._gathering: asyncio.TimerHandle | None = None

    @property
    def has_room(self) -> bool:
        """May one more block wait here that no longer counts as one in flight?"""
        return len(self._waiting) < _FEW

    async def put(self, block: Put, *, urgent: bool = True) -> Stored:
        """What came of the block. Raises what the store raises for it. urgent: somebody waits for it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Stored] = loop.create_future()
        self._waiting.append((block, future))
        if not urgent and not self._batches and len(self._waiting) < _GATHERED:
            self._gathering = self._gathering or loop.call_later(_GATHER_SECONDS, self._begin)
        elif len(self._batches) < self._at_once:
            self._begin()
        elif self._look is None:
            self._look = asyncio.get_running_loop().call_later(_LONG_SECONDS, self._begin_another)
        return await future

    def _begin_another(self) -> None:
        """Blocks have waited for long."""
        self._look = None
        if self._waiting and len(self._batches) < _MOST_BATCHES:
            self._begin()
            self._look = asyncio.get_running_loop().call_later(_LONG_SECONDS, self._begin_another)

    def _begin(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        task = asyncio.create_task(self._work())
        self._batches.add(task)
        task.add_done_callback(self._batches.discard)

    async def _work(self) -> None:
        while self._waiting:
            batch = self._next_batch()
            try:
                await self._store_batch(batch)
            except BaseException as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                raise

    def _next_batch(self) -> list[tuple[Put, asyncio.Future[Stored]]]:
        batch = [self._waiting.popleft()]
        size = len(batch[0][0].data)
        while self._waiting and len(batch) < _MOST:
            size += len(self._waiting[0][0].data)
            if size > _MOST_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _store_batch(self, batch: Sequence[tuple[Put, asyncio.Future[Stored]]]) -> None:
        try:
            stored = await self._run(self._store.put_many, [block for block, _ in batch])
        except Exception as error:
            if len(batch) > 1:
                # What is wrong with one is not wrong with the others. Those that were stored are found there.
                for one in batch:
                    await self._store_batch([one])
            elif not batch[0][1].done():
                batch[0][1].set_exception(error)
            return
        if len(stored) != len(batch):
            raise AssertionError(f"of {len(batch)} blocks, the store has said what came of {len(stored)}")
        for (_, future), outcome in zip(batch, stored, strict=True):
            if not future.done():  # else nobody waits any more
                future.set_result(outcome)
