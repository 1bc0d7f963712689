"""Fetched blocks on their way into the store: all that have come while a thread was busy go there in one batch.

To hand one block to a thread and back costs as much as to store it: two wake-ups, and twice a wait for the interpreter
lock. While nothing else is on its way, a block does not wait for others.
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
# Batches that are stored at once, and where one of them takes as long as this: it may wait for a disk, which concerns
# nobody whose block goes to memory, and a disk that hangs is found out by those that try it (see `Tier.write`).
_BATCHES: Final = 2
_LONG_SECONDS: Final = 0.05
_MOST_BATCHES: Final = 8
# Blocks of one batch. Their readers wait until the whole batch is stored.
_MOST: Final = 16

_Run = Callable[[Callable[[Sequence[Put]], list[Stored]], Sequence[Put]], Awaitable[list[Stored]]]


class Puts:
    """One queue of blocks to be stored. Used on the event loop."""

    def __init__(self, store: BlockStore, run: _Run) -> None:
        """run: calls a function in a thread."""
        self._store = store
        self._run = run
        self._waiting: deque[tuple[Put, asyncio.Future[Stored]]] = deque()
        self._batches: set[asyncio.Task[None]] = set()
        self._look: asyncio.TimerHandle | None = None

    async def put(self, block: Put) -> Stored:
        """What came of the block. Raises what the store raises for its batch."""
        future: asyncio.Future[Stored] = asyncio.get_running_loop().create_future()
        self._waiting.append((block, future))
        if len(self._batches) < _BATCHES:
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
        task = asyncio.create_task(self._work())
        self._batches.add(task)
        task.add_done_callback(self._batches.discard)

    async def _work(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(_MOST, len(self._waiting)))]
            try:
                stored = await self._run(self._store.put_many, [block for block, _ in batch])
                if len(stored) != len(batch):
                    raise AssertionError(f"of {len(batch)} blocks, the store has said what came of {len(stored)}")
            except BaseException as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                if not isinstance(error, Exception):
                    raise
                continue
            for (_, future), outcome in zip(batch, stored, strict=True):
                if not future.done():  # else nobody waits any more
                    future.set_result(outcome)
