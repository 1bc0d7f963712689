"""Blocks that come while others are being stored go to the store together; nobody waits for ever."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cachefs.block import MEMORY, BlockLocation
from cachefs_daemon.fetch import tier_writes as puts_module
from cachefs_daemon.fetch.tier_writes import StoreOutcome, TierWrites
from cachefs_daemon.store.block_store import BlockToStore
from tests import virtual_time


class Store:
    """Takes what it is given when it is told to."""

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.go = asyncio.Event()
        self.third = asyncio.Event()
        self.error: Exception | None = None
        self.broken: set[bytes] = set()  # keys of blocks that cannot be stored

    def put_many(self, blocks: Sequence[BlockToStore]) -> list[StoreOutcome]:
        if self.error is not None:
            raise self.error
        if any(block.key in self.broken for block in blocks):
            raise ValueError("one of them is broken")
        return [BlockLocation(MEMORY, int(block.key), 0, 1, bytes(8)) for block in blocks]

    async def run(
        self, work: Callable[[Sequence[BlockToStore]], list[StoreOutcome]], blocks: Sequence[BlockToStore]
    ) -> list[StoreOutcome]:
        self.batches.append([block.key for block in blocks])
        if len(self.batches) == 3:
            self.third.set()
        await self.go.wait()
        return work(blocks)


async def begun(puts: TierWrites, count: int, size: int = 1) -> list[asyncio.Task[StoreOutcome]]:
    tasks = [
        asyncio.create_task(puts.write_block(BlockToStore(b"%d" % number, bytes(size)))) for number in range(count)
    ]
    await virtual_time.settle()
    return tasks


def segments(stored: Sequence[Any]) -> list[int]:
    return [one.segment for one in stored]


def test_what_comes_while_threads_are_busy_goes_in_batches() -> None:
    async def scenario() -> None:
        store: Any = Store()
        puts = TierWrites(store, store.run)
        tasks = await begun(puts, 40)
        assert len(store.batches) == 2, "no more threads than that"
        store.go.set()
        assert segments(await asyncio.gather(*tasks)) == list(range(40)), "each gets its own"
        assert max(map(len, store.batches)) == 16

    virtual_time.run(scenario())


def test_blocks_do_not_wait_for_a_disk_that_hangs() -> None:
    async def scenario() -> None:
        store: Any = Store()
        puts = TierWrites(store, store.run)
        hanging = [await begun(puts, 1), await begun(puts, 1)]
        assert len(store.batches) == 2
        hanging.append(await begun(puts, 3))
        assert len(store.batches) == 2
        async with asyncio.timeout(60):
            await store.third.wait()
        assert len(store.batches[2]) == 3, "they do not wait for the first"
        store.go.set()
        for tasks in hanging:
            await asyncio.gather(*tasks)

    virtual_time.run(scenario())


def test_blocks_that_nobody_waits_for_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        store: Any = Store()
        store.go.set()
        puts = TierWrites(store, store.run)

        def put(number: int, *, urgent: bool = False) -> asyncio.Task[StoreOutcome]:
            return asyncio.create_task(puts.write_block(BlockToStore(b"%d" % number, b"x"), is_urgent=urgent))

        tasks = [put(number) for number in range(puts_module._GATHER_BLOCKS)]
        await asyncio.gather(*tasks)
        tasks = [put(20), put(21)]
        await virtual_time.settle()
        assert len(store.batches) == 1
        await asyncio.gather(put(22, urgent=True), *tasks)
        assert list(map(len, store.batches)) == [8, 3], "enough; and one that is waited for takes all along"
        monkeypatch.setattr(puts_module, "_GATHER_SECONDS", 0.001)
        await put(23)

    monkeypatch.setattr(puts_module, "_GATHER_SECONDS", 60)
    virtual_time.run(scenario())


def test_nobody_waits_for_many_bytes_of_others() -> None:
    async def scenario() -> None:
        store: Any = Store()
        puts = TierWrites(store, store.run)
        tasks = await begun(puts, 12, 1 << 20)
        store.go.set()
        await asyncio.gather(*tasks)
        assert list(map(len, store.batches)) == [4, 4, 4]
        tasks = await begun(puts, 5, 5 << 20)
        await asyncio.gather(*tasks)
        assert list(map(len, store.batches[3:])) == [1] * 5, "each is more than a batch"

    virtual_time.run(scenario())


def test_a_block_that_fails_fails_alone() -> None:
    async def scenario() -> None:
        store: Any = Store()
        store.broken = {b"5"}
        puts = TierWrites(store, store.run)
        tasks = await begun(puts, 9)
        store.go.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[5], ValueError)
        assert segments([one for one in results if one is not results[5]]) == [0, 1, 2, 3, 4, 6, 7, 8]

    virtual_time.run(scenario())


def test_an_error_reaches_all_of_its_batch_and_nobody_else() -> None:
    async def scenario() -> None:
        store: Any = Store()
        puts = TierWrites(store, store.run)
        store.error = OSError("broken")
        tasks = await begun(puts, 3)
        store.go.set()
        for task in tasks:
            with pytest.raises(OSError, match="broken"):
                await task
        store.error = None
        assert segments([await puts.write_block(BlockToStore(b"7", b"x"))]) == [7]

    virtual_time.run(scenario())


def test_a_store_that_does_not_say_what_came_of_each_block_leaves_nobody_waiting() -> None:
    async def scenario() -> None:
        store: Any = Store()
        store.put_many = lambda blocks: []
        store.go.set()
        with pytest.raises(AssertionError, match="0 results for 1 blocks"):
            await TierWrites(store, store.run).write_block(BlockToStore(b"7", b"x"))

    virtual_time.run(scenario())


def test_one_that_nobody_waits_for_any_more_is_stored_all_the_same() -> None:
    async def scenario() -> None:
        store: Any = Store()
        puts = TierWrites(store, store.run)
        tasks = await begun(puts, 2)
        tasks[0].cancel()
        store.go.set()
        assert segments([await tasks[1]]) == [1]
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]

    virtual_time.run(scenario())
