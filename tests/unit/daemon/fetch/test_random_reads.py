"""Who reads here and there in a large file gets its bytes before the rest of the block."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from cachefs.block import PIECE_SIZE, BlockLocation, block_key, pieces_match
from cachefs.errors import CachefsError, ObjectChanged, OriginUnavailable
from cachefs.messages import BlockRef
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch.block_fetch import BlockResult, BypassBlock
from cachefs_daemon.fetch.concurrency_limiter import ConcurrencyLimiter
from cachefs_daemon.fetch.fetch_parts import ORIGIN, FetchParts, FetchResult, SourceLookups
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.fetch.random_reads import MIN_FILE_BLOCKS
from cachefs_daemon.origin.base import ObjectRange, ReportProblem
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.storage import StoreConfig
from cachefs_daemon.store.tier import TierConfig
from tests import virtual_time
from tests.blockstore import OpenStore
from tests.waiting import until_async

BLOCK = 2 << 20
CONTENT = bytes(range(256)) * (BLOCK // 256)


class LargeFile:
    """An origin with one file, whose blocks all have the same bytes."""

    url = "test://origin"
    errors = requests = fallback_reads = 0

    def __init__(self) -> None:
        self.endpoint = Endpoint(self.url, 64)
        self.reads: list[tuple[int, int]] = []  # offset and length of each
        self.failures: list[CachefsError] = []  # of the next reads
        self.size = 100 * BLOCK
        self.broken: dict[int, CachefsError] = {}  # by offset: what the next read there fails with
        self.held: dict[int, asyncio.Event] = {}  # by offset: reads that wait until it is set

    def identity(self, key: bytes) -> bytes:
        return key

    async def list(self, report: ReportProblem) -> AsyncIterator[list[ListedObject]]:
        raise NotImplementedError
        yield

    async def read(self, wanted: ObjectRange, patience: Deadline) -> bytes:
        self.reads.append((wanted.offset, wanted.length))
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, OriginUnavailable):
                await patience.pause(0.01)
            else:
                raise failure
        if (event := self.held.get(wanted.offset)) is not None:
            await event.wait()
        if (error := self.broken.pop(wanted.offset, None)) is not None:
            if isinstance(error, OriginUnavailable):
                await patience.pause(0.01)
            raise error
        return (CONTENT * 2)[wanted.offset % BLOCK :][: wanted.length]

    async def close(self) -> None:
        pass


class Bench:
    """A fetcher that reads in parts."""

    def __init__(self, store: OpenStore) -> None:
        self.store = store
        self.origin = LargeFile()
        self.threads = Threads()
        self.errors = ErrorLog()
        limiter = ConcurrencyLimiter(8, 1 << 30)
        self.fetcher = Fetcher(
            FetchParts(
                store.blocks, SourceLookups(self.resolve), self.threads, limiter, self.errors, 20, reads_parts=True
            )
        )

    def resolve(self, ref: BlockRef) -> BlockSource:
        place = ObjectRange(b"file", b"v1", self.origin.size, ref.number * BLOCK, BLOCK)
        return BlockSource(key_of(ref.number), self.origin, place, ref.snapshot, 1, ref.number)

    async def read(self, number: int, start: int, size: int = 4096) -> BlockResult:
        answered: asyncio.Future[list[BlockResult]] = asyncio.get_running_loop().create_future()
        ref = BlockRef("snapshot", 1, number, start=start, size=size)
        self.fetcher.request_on_demand([ref], 20, lambda answer, _: answered.set_result(answer), may_be_early=True)
        async with asyncio.timeout(30):
            [answer] = await answered
        if isinstance(answer, BypassBlock):
            first = start // PIECE_SIZE
            data = answer.pieces(start, size)
            assert pieces_match(key_of(number), answer.checksums, first, data)
            begin = first * PIECE_SIZE
            assert data[start - begin :][:size] == CONTENT[start : start + size]
        return answer

    async def on_node(self, number: int) -> bytes | None:
        """The block, once it is in a tier."""
        await until_async(lambda: self.store.blocks.get(key_of(number)) is not None)
        location = self.store.blocks.get(key_of(number))
        assert location is not None
        return self.store.read(key_of(number), location)


def key_of(number: int) -> bytes:
    return block_key(b"f" * 16, number)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[OpenStore]:
    memory = TierConfig(tmp_path / "memory", 64 << 20, 16 << 20, "minio")
    opened = OpenStore(StoreConfig(tmp_path / "state", 1 << 20, memory, None))
    yield opened
    opened.close()


def on_bench(store: OpenStore, scene: Callable[[Bench], Awaitable[None]]) -> None:
    async def play() -> None:
        bench = Bench(store)
        try:
            await scene(bench)
        finally:
            await bench.fetcher.close()
            bench.threads.close()

    virtual_time.run(play())


def test_a_read_in_the_middle_gets_its_pieces_and_the_rest_follows(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        start = 5 * PIECE_SIZE + 100
        assert isinstance(await bench.read(3, start), BypassBlock)
        assert bench.origin.reads[0] == (3 * BLOCK + 5 * PIECE_SIZE, PIECE_SIZE)
        assert await bench.on_node(3) == CONTENT
        assert sum(length for _, length in bench.origin.reads) == BLOCK  # no byte twice
        assert isinstance(await bench.read(3, start), BlockLocation)
        tally = bench.fetcher.in_flight_fetches.counts
        await until_async(lambda: dict(tally.bytes) == {(ORIGIN, FetchResult.STORED): BLOCK})

    on_bench(store, scene)


def test_who_goes_through_a_file_gets_whole_blocks(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        assert isinstance(await bench.read(0, 0), BlockLocation)
        assert isinstance(await bench.read(1, 4096, BLOCK - 4096), BlockLocation)  # most of it
        assert bench.origin.reads == [(0, BLOCK), (BLOCK, BLOCK)]

    on_bench(store, scene)


def test_a_third_read_of_a_block_waits_for_all_of_it(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        # The rest of block 9, which nobody waits for, keeps that of block 3 from coming.
        bench.origin.held[9 * BLOCK] = hold = asyncio.Event()
        await bench.read(9, PIECE_SIZE)
        await until_async(lambda: (9 * BLOCK, PIECE_SIZE) in bench.origin.reads)
        bench.fetcher._random_reads._background.max_in_flight = lambda *, is_waited_for: 1  # type: ignore[union-attr,method-assign]
        answers = [await bench.read(3, piece * PIECE_SIZE) for piece in (2, 9, 13)]
        assert [type(one) for one in answers] == [BypassBlock, BypassBlock, BlockLocation]
        assert sum(length for offset, length in bench.origin.reads if offset // BLOCK == 3) == BLOCK
        assert bench.store.read(key_of(3), answers[2]) == CONTENT  # type: ignore[arg-type]
        hold.set()
        assert await bench.on_node(9) == CONTENT

    on_bench(store, scene)


def test_a_small_file_comes_in_whole_blocks(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.origin.size = MIN_FILE_BLOCKS * BLOCK - 1
        assert isinstance(await bench.read(3, 2 * PIECE_SIZE), BlockLocation)
        assert bench.origin.reads == [(3 * BLOCK, BLOCK)]

    on_bench(store, scene)


def test_readers_of_the_same_pieces_share_a_request(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        offset = 3 * BLOCK + 2 * PIECE_SIZE
        bench.origin.held[offset] = hold = asyncio.Event()
        reads = [asyncio.create_task(bench.read(3, 2 * PIECE_SIZE + number)) for number in range(3)]
        await asyncio.sleep(0.05)
        hold.set()
        assert all(isinstance(one, BypassBlock) for one in await asyncio.gather(*reads))
        assert bench.origin.reads.count((offset, PIECE_SIZE)) == 1

    on_bench(store, scene)


@pytest.mark.parametrize("failure", [OriginUnavailable("out of order"), ObjectChanged("it has changed")])
def test_where_a_part_does_not_come_the_block_does(store: OpenStore, failure: CachefsError) -> None:
    async def scene(bench: Bench) -> None:
        bench.origin.failures = [failure]
        assert isinstance(await bench.read(3, 2 * PIECE_SIZE), BlockLocation)
        assert bench.origin.reads == [(3 * BLOCK + 2 * PIECE_SIZE, PIECE_SIZE), (3 * BLOCK, BLOCK)]

    on_bench(store, scene)


def test_an_error_of_the_rest_is_told_to_the_next_reader_and_counted(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.origin.held[3 * BLOCK] = hold = asyncio.Event()
        bench.origin.broken[3 * BLOCK] = ObjectChanged("it has changed")
        await bench.read(3, 2 * PIECE_SIZE)
        await until_async(lambda: len(bench.origin.reads) == 3)  # the part, and what is before and behind it
        hold.set()
        assert isinstance(await bench.read(3, 7 * PIECE_SIZE), ObjectChanged)
        tally = bench.fetcher.in_flight_fetches.counts
        assert tally.bytes[ORIGIN, FetchResult.DISCARDED] == BLOCK - 2 * PIECE_SIZE  # the part, and what is behind it

    on_bench(store, scene)


def test_of_a_rest_only_what_has_not_come_is_asked_for_again(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.origin.held[3 * BLOCK] = hold = asyncio.Event()
        await bench.read(3, 2 * PIECE_SIZE)
        await until_async(lambda: len(bench.origin.reads) == 3)
        bench.origin.broken[3 * BLOCK] = OriginUnavailable("out of order")
        hold.set()
        assert await bench.on_node(3) == CONTENT
        assert bench.origin.reads[3:] == [(3 * BLOCK, 2 * PIECE_SIZE)]
        slots = bench.fetcher.in_flight_fetches._limiter
        await until_async(lambda: (slots.in_use, slots.bytes_in_use) == (0, 0))  # soon after the block is there

    on_bench(store, scene)


def test_a_part_whose_block_has_come_meanwhile_is_not_kept(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        offset = 3 * BLOCK + 2 * PIECE_SIZE
        bench.origin.held[offset] = hold = asyncio.Event()
        part = asyncio.create_task(bench.read(3, 2 * PIECE_SIZE))
        await asyncio.sleep(0.05)
        assert isinstance(await bench.read(3, 0), BlockLocation)
        hold.set()
        assert isinstance(await part, BypassBlock)
        await asyncio.sleep(0.1)
        assert bench.origin.reads == [(offset, PIECE_SIZE), (3 * BLOCK, BLOCK)]
        assert bench.fetcher.in_flight_fetches.counts.bytes[ORIGIN, FetchResult.BYPASSED] == PIECE_SIZE

    on_bench(store, scene)


def test_parts_that_begin_alike_both_get_a_slot(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        hold = asyncio.Event()
        blocks = range(10, 18)  # as many as there are slots
        bench.origin.held = dict.fromkeys((number * BLOCK for number in blocks), hold)
        others = [asyncio.create_task(bench.read(number, 0)) for number in blocks]
        await until_async(lambda: len(bench.origin.reads) == len(blocks))
        sizes = (PIECE_SIZE, 3 * PIECE_SIZE)
        reads = [asyncio.create_task(bench.read(3, 2 * PIECE_SIZE, size)) for size in sizes]
        await asyncio.sleep(0.05)
        hold.set()
        async with asyncio.timeout(10):  # they have 20 s each
            assert all(isinstance(one, BypassBlock) for one in await asyncio.gather(*reads))
        await asyncio.gather(*others)

    on_bench(store, scene)
