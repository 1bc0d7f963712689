"""Neighbouring blocks that wait for a slot come with one request, each as it arrives, and alone where that fails."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from cachefs.block import BlockLocation, block_key
from cachefs.errors import OriginUnavailable
from cachefs.messages import BlockRef
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch.concurrency_limiter import ConcurrencyLimiter
from cachefs_daemon.fetch.fetch_parts import FetchParts, SourceLookups
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.origin.base import Data, ObjectRange
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.storage import StoreConfig
from cachefs_daemon.store.tier import TierConfig
from tests import virtual_time
from tests.blockstore import OpenStore
from tests.unit.daemon.fetch.test_fetcher import ObedientOrigin
from tests.waiting import until_async

BLOCK = 10_000
BLOCKS = 12
CONTENT = b"".join(bytes([65 + number]) * BLOCK for number in range(BLOCKS))
CONTENTS = b"c" * 16


class RangedOrigin(ObedientOrigin):
    """It brings several blocks at once, part by part as the test says."""

    can_read_ranges = True

    def __init__(self, width: int, largest: int) -> None:
        super().__init__()
        self.endpoint = Endpoint("test", width, largest=largest)
        self.asked: list[tuple[int, int]] = []  # offset and length of each request, in blocks
        self.parts = asyncio.Semaphore(1000)  # parts that may come
        self.fails_after: int | None = None  # parts

    async def read(self, wanted: ObjectRange, patience: Deadline) -> bytes:
        await super().read(wanted, patience)
        self.asked.append((wanted.offset // BLOCK, 1))
        return CONTENT[wanted.offset : wanted.offset + wanted.length]

    async def read_parts(
        self, wanted: ObjectRange, lengths: Sequence[int], arrived: Callable[[int, Data], None]
    ) -> None:
        self.asked.append((wanted.offset // BLOCK, len(lengths)))
        end = wanted.offset
        for number, length in enumerate(lengths):
            if number == self.fails_after:
                raise OriginUnavailable("cut")
            await self.parts.acquire()
            arrived(number, CONTENT[end : end + length])
            end += length


class Bench:
    def __init__(self, store: OpenStore, width: int, largest: int, capacity: int) -> None:
        self.store = store
        self.origin = RangedOrigin(width, largest)
        self.threads = Threads()
        self.slots = ConcurrencyLimiter(16, capacity)
        self.fetcher = Fetcher(
            FetchParts(store.blocks, SourceLookups(self.resolve), self.threads, self.slots, ErrorLog(), 20)
        )

    def resolve(self, ref: BlockRef) -> BlockSource:
        part = ObjectRange(b"shard", b"v", len(CONTENT), ref.number * BLOCK, BLOCK)
        return BlockSource(block_key(CONTENTS, ref.number), self.origin, part, ref.snapshot)

    def content(self, number: int, outcome: object) -> bytes | None:
        assert isinstance(outcome, BlockLocation), outcome
        return self.store.read(block_key(CONTENTS, number), outcome)


def refs(*numbers: int) -> list[BlockRef]:
    return [BlockRef("snapshot", 1, number) for number in numbers]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[OpenStore]:
    memory = TierConfig(tmp_path / "memory", 16 << 20, 4 << 20, "minio")
    opened = OpenStore(StoreConfig(tmp_path / "state", 1 << 20, memory, None))
    yield opened
    opened.close()


def on_bench(
    store: OpenStore,
    scene: Callable[[Bench], Awaitable[None]],
    width: int = 2,
    largest: int = 4 * BLOCK,
    capacity: int = 1 << 20,
) -> None:
    async def play() -> None:
        bench = Bench(store, width, largest, capacity)
        # A curve by which any request is better the larger it is.
        for size, seconds in ((1000, 1.0), (100_000, 1.01)):
            for _ in range(64):
                bench.origin.endpoint._times.times_of(size).add_request(size, seconds, 0.0)
        try:
            await asyncio.wait_for(scene(bench), 30)
            assert (bench.slots.in_use, bench.slots.bytes_in_use) == (0, 0)
            assert not bench.fetcher.in_flight_fetches._origin_source._merged_reads._waiting
            assert not bench.fetcher.in_flight_fetches._origin_source._merged_reads._parts
        finally:
            await bench.fetcher.close()
            bench.threads.close()

    virtual_time.run(play())


def test_what_waits_comes_in_as_few_requests_as_there_are_slots(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        outcomes = await bench.fetcher.fetch_on_demand(refs(*range(8)), 20)
        assert [bench.content(number, one) for number, one in enumerate(outcomes)] == [
            CONTENT[number * BLOCK : (number + 1) * BLOCK] for number in range(8)
        ]
        assert bench.origin.asked == [(0, 1), (1, 4), (5, 3)]

    on_bench(store, scene)


def test_while_slots_are_free_each_block_has_a_request_of_its_own(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        await bench.fetcher.fetch_on_demand(refs(*range(8)), 20)
        assert sorted(bench.origin.asked) == [(number, 1) for number in range(8)]

    on_bench(store, scene, width=16)


def test_nobody_waits_for_blocks_that_follow(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.origin.parts = asyncio.Semaphore(1)
        following = asyncio.create_task(bench.fetcher.fetch_on_demand(refs(*range(1, 4)), 20))
        first = asyncio.create_task(bench.fetcher.fetch_on_demand(refs(0), 20))
        [one] = await bench.fetcher.fetch_on_demand(refs(1), 20)
        assert bench.content(1, one) == CONTENT[BLOCK : 2 * BLOCK]
        assert not following.done()
        bench.origin.parts.release()
        bench.origin.parts.release()
        bench.origin.parts.release()
        await asyncio.gather(following, first)

    on_bench(store, scene, width=1)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_what_does_not_come_with_others_is_fetched_by_itself(store: OpenStore, after: int) -> None:
    async def scene(bench: Bench) -> None:
        bench.origin.fails_after = after
        outcomes = await bench.fetcher.fetch_on_demand(refs(*range(4)), 20)
        assert [bench.content(number, one) for number, one in enumerate(outcomes)] == [
            CONTENT[number * BLOCK : (number + 1) * BLOCK] for number in range(4)
        ]
        assert bench.origin.asked[0] == (0, 4)
        assert sorted(bench.origin.asked[1:]) == [(number, 1) for number in range(after, 4)]

    on_bench(store, scene, width=1)


def test_bytes_in_flight_stay_within_the_limit(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.origin.parts = asyncio.Semaphore(0)
        fetching = asyncio.create_task(bench.fetcher.fetch_on_demand(refs(*range(8)), 20))
        await until_async(lambda: bench.origin.asked)
        assert bench.slots.bytes_in_use <= 3 * BLOCK
        assert bench.slots.in_use == 1
        for _ in range(100):
            bench.origin.parts.release()
        await fetching
        assert bench.origin.asked[0] == (0, 3)

    on_bench(store, scene, width=1, capacity=3 * BLOCK)


def test_whoever_gives_up_takes_no_other_block_along(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.origin.parts = asyncio.Semaphore(0)
        fetching = asyncio.create_task(bench.fetcher.fetch_on_demand(refs(*range(4)), 20))
        await until_async(lambda: bench.origin.asked)
        flights = list(bench.fetcher.in_flight_fetches._fetches.values())
        flights[0].task.cancel()
        for _ in range(4):
            bench.origin.parts.release()
        outcomes = await fetching
        assert [isinstance(one, BlockLocation) for one in outcomes] == [False, True, True, True]

    on_bench(store, scene, width=1)


def test_a_whole_object_is_never_asked_for_as_a_range(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        await bench.fetcher.fetch_on_demand(refs(*range(BLOCKS)), 20)
        assert bench.origin.asked == [(0, BLOCKS - 1), (BLOCKS - 1, 1)]

    on_bench(store, scene, width=1, largest=100 * BLOCK)
