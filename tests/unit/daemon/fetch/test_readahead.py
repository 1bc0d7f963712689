"""Guesses carried out: over a real snapshot and a real store, with an origin that obeys the test."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cachefs.block import block_key, block_length
from cachefs.messages import BlockRef
from cachefs.planning.blocks.space import BlockSpace
from cachefs.planning.pagecache.push_plan import FileBlocks
from cachefs.planning.prefetch.readahead_budget import BUSY_BYTES, IDLE_BYTES, ReadaheadRule
from cachefs.snapshot import Snapshot
from cachefs.snapshot_builder import ListedObject, build_snapshot_file
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch.concurrency_limiter import ConcurrencyLimiter
from cachefs_daemon.fetch.directory_readahead import AreaIndex
from cachefs_daemon.fetch.fetch_parts import FetchParts, SourceLookups
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.fetch.readahead import ReadaheadFetcher
from cachefs_daemon.fetch.reader_callbacks import PageCacheCallbacks
from cachefs_daemon.origin.base import ObjectRange
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from tests import virtual_time
from tests.blockstore import BLOCK_SIZE, OpenStore, opened, store_config
from tests.simulated import space_of
from tests.waiting import until_async

SIZE = 50_000
PER_DIRECTORY = 60


class Origin:
    """Each object is as many bytes as it should be."""

    url = "test://origin"

    def __init__(self) -> None:
        self.endpoint = Endpoint("test", 64)
        self.read_keys: list[bytes] = []
        self.read_blocks: list[tuple[bytes, int]] = []
        self.failure: Exception | None = None  # what reads raise
        self.open = asyncio.Event()  # reads wait while it is not set
        self.open.set()

    async def read(self, wanted: ObjectRange, patience: Deadline) -> bytes:
        self.read_keys.append(wanted.key)
        self.read_blocks.append((wanted.key, wanted.offset // BLOCK_SIZE))
        await self.open.wait()
        if self.failure is not None:
            raise self.failure
        return bytes(wanted.length)


class Scene:
    """A guesser at work, and a reader."""

    def __init__(self, store: OpenStore, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._store = store
        self.origin = Origin()
        self.pushed: list[tuple[str, FileBlocks, int]] = []
        self._threads = Threads()
        limiter = ConcurrencyLimiter(8, 1 << 30)
        self._fetcher = Fetcher(
            FetchParts(store.blocks, SourceLookups(self._resolve), self._threads, limiter, ErrorLog(), 20)
        )
        pages = PageCacheCallbacks(lambda mount: mount == "pushing", lambda *pushed: self.pushed.append(pushed))
        self.guesser = ReadaheadFetcher(self._fetcher, store.storage, self._threads, self._held, pages)
        self._fetcher.add_demand_listener(self.guesser.note_demand)

    def _resolve(self, ref: BlockRef) -> BlockSource:
        entry = self.snapshot.entry(ref.entry)
        length = block_length(entry.size, BLOCK_SIZE, ref.number)
        wanted = ObjectRange(self.snapshot.path(ref.entry), b"v1", entry.size, ref.number * BLOCK_SIZE, length)
        return BlockSource(block_key(entry.content, ref.number), self.origin, wanted, ref.snapshot)  # type: ignore[arg-type]

    def _held(self, snapshot: str) -> Snapshot | None:
        return self.snapshot if snapshot == self.snapshot.id else None

    async def read(self, path: bytes, mount: str = "", number: int = 0) -> None:
        """Block *number* of a file, as through a mount that reports at once."""
        entry = self.snapshot.find_path(path)
        assert entry is not None
        key = block_key(entry.content, number)
        if self._store.get(key) is None:
            answered: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            self._fetcher.request_on_demand(
                [BlockRef(self.snapshot.id, entry.number, number)],
                20,
                lambda outcomes, _: answered.set_result(outcomes),
            )
            await answered
        self.guesser.note_reads(mount, [key])

    @property
    def fetches(self) -> int:
        """Blocks that are being fetched."""
        return self._fetcher.in_flight[0]

    def publish(self, *, of_directories: bool = False) -> None:
        """A job says that it will read something else. of_directories: a dataset that has some."""
        another = space_of([SIZE], "another")
        if of_directories:
            contents = np.zeros(2, [("high", "<u8"), ("low", "<u8")])
            contents["high"][1] = 1
            another = BlockSpace("another", BLOCK_SIZE, np.array([0, SIZE]), contents)
        self._store.plan.add_space(another)
        self._store.plan.set_epoch("job", "another", 0, np.arange(1), is_last=True)

    async def settled(self) -> None:
        """Nothing is under way any more, but for what waits until the origin is open."""
        seen = -1
        while (now := len(self.origin.read_keys)) != seen or bool(self.fetches) is self.origin.open.is_set():
            seen = now
            await asyncio.sleep(0.02)

    async def fetching(self, blocks: int) -> None:
        """So many are being fetched."""
        await until_async(lambda: self.fetches, is_right=lambda now: now >= blocks)

    async def play(self, act: Callable[["Scene"], Awaitable[None]]) -> None:
        running = asyncio.create_task(self.guesser.run())
        try:
            await act(self)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await self._fetcher.close()
            self._threads.close()


@pytest.fixture
def listing(tmp_path: Path) -> Path:
    objects = [ListedObject(b"%d/%03d" % divmod(n, PER_DIRECTORY), SIZE, 7, b"v1") for n in range(3 * PER_DIRECTORY)]
    objects.append(ListedObject(b"0/sub/file", SIZE, 7, b"v1"))
    objects += [ListedObject(b"shards/%02d" % n, 20 * BLOCK_SIZE, 7, b"v1") for n in range(8)]
    return build_snapshot_file(objects, "test://origin", BLOCK_SIZE, lambda key: key, tmp_path)


@pytest.fixture
def scene(tmp_path: Path, listing: Path) -> Iterator[Scene]:
    with opened(store_config(tmp_path, memory=64 << 20, ssd=0)) as store:
        yield Scene(store, Snapshot(listing))


def directories_of(keys: list[bytes]) -> set[bytes]:
    return {key.partition(b"/")[0] for key in keys}


def test_a_directory_is_read_ahead_to_its_end_and_then_the_next_ones(scene: Scene) -> None:
    async def act(scene: Scene) -> None:
        for number in range(PER_DIRECTORY):
            await scene.read(b"0/%03d" % number)
            if number % 8 == 7:
                await scene.settled()
        await scene.settled()
        assert set(scene.origin.read_keys) == {b"0/%03d" % number for number in range(PER_DIRECTORY)}
        await scene.read(b"1/000")
        await scene.settled()
        await scene.read(b"1/001")
        await scene.settled()
        assert b"1/020" in scene.origin.read_keys
        for number in range(2, PER_DIRECTORY):
            await scene.read(b"1/%03d" % number)
            if number % 8 == 7:
                await scene.settled()
        await scene.settled()
        assert directories_of(scene.origin.read_keys) >= {b"0", b"1", b"2"}
        small = [key for key in scene.origin.read_keys if not key.startswith(b"shards")]
        assert len(small) == len(set(small))

    virtual_time.run(scene.play(act))


def test_of_large_files_only_the_beginning_is_brought(scene: Scene) -> None:
    async def act(scene: Scene) -> None:
        for number in range(5):
            await scene.read(b"shards/%02d" % number)
            await scene.settled()
        assert scene.guesser.counts.right == 1
        assert scene.origin.read_keys.count(b"shards/05") <= 4

    virtual_time.run(scene.play(act))


def test_what_was_guessed_is_pushed_to_the_mount_that_reads_it(scene: Scene) -> None:
    async def act(scene: Scene) -> None:
        for number in range(20):
            await scene.read(b"0/%03d" % number, "pushing")
            await scene.settled()
        assert scene.pushed
        assert {mount for mount, _, _ in scene.pushed} == {"pushing"}
        assert sum(size for _, _, size in scene.pushed) == SIZE * sum(len(files) for _, files, _ in scene.pushed)

    virtual_time.run(scene.play(act))


@pytest.mark.parametrize("published", [False, True])
def test_while_a_job_has_published_guesses_take_few_connections(scene: Scene, published: bool) -> None:
    if published:
        scene.publish()

    async def act(scene: Scene) -> None:
        for number in range(3):
            await scene.read(b"0/%03d" % number)
        scene.origin.open.clear()
        reader = asyncio.create_task(scene.read(b"0/003"))
        await scene.fetching(2)
        if published:
            await scene.settled()
            assert scene.fetches == 2, "what the reader waits for, and one guess"
        else:
            await scene.fetching(5)
        scene.origin.open.set()
        await reader

    virtual_time.run(scene.play(act))


def test_a_full_node_is_read_ahead_of_while_a_job_has_published(
    tmp_path: Path, listing: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(store_config(tmp_path, memory=8 << 20, ssd=0, policy="clairvoyant")) as store:
        scene = Scene(store, Snapshot(listing))
        scene.publish(of_directories=True)

        async def act(scene: Scene) -> None:
            for number in range(20):
                await scene.read(b"0/%03d" % number)
                await scene.settled()
            assert scene.guesser.counts.right > 4

        virtual_time.run(scene.play(act))
    assert "begins anew" not in caplog.text


def test_an_origin_that_fails_is_not_asked_for_more(scene: Scene) -> None:
    async def act(scene: Scene) -> None:
        for number in range(3):
            await scene.read(b"0/%03d" % number)
        scene.origin.failure = OSError("no")
        await scene.read(b"0/003")
        await scene.settled()
        assert len(scene.origin.read_keys) <= 8
        assert scene.guesser.counts.blocks == 0

    virtual_time.run(scene.play(act))


def in_any_order(files: int, seed: int) -> list[bytes]:
    return [b"%d/%03d" % divmod(n, PER_DIRECTORY) for n in random.Random(seed).sample(range(files), files)]


def test_of_a_set_that_is_read_in_any_order_all_is_brought_once(scene: Scene) -> None:
    async def act(scene: Scene) -> None:
        for path in in_any_order(3 * PER_DIRECTORY, 5):
            await scene.read(path)
            await scene.settled()
        assert len(scene.origin.read_keys) == len(set(scene.origin.read_keys))
        assert directories_of(scene.origin.read_keys) <= {b"0", b"1", b"2"}
        sets = [counts for _, rule, counts in scene.guesser.book.rows() if rule is ReadaheadRule.SET]
        assert sum(counts.right for counts in sets) > PER_DIRECTORY

    virtual_time.run(scene.play(act))


def test_of_a_set_that_no_tier_can_hold_nothing_is_brought(tmp_path: Path, listing: Path) -> None:
    with opened(store_config(tmp_path, memory=4 << 20, ssd=0)) as store:
        scene = Scene(store, Snapshot(listing))

        async def act(scene: Scene) -> None:
            for path in in_any_order(3 * PER_DIRECTORY, 5):
                await scene.read(path)
            await scene.settled()
            assert ReadaheadRule.SET not in {rule for _, rule, _ in scene.guesser.book.rows()}

        virtual_time.run(scene.play(act))


def test_a_file_that_is_read_here_and_there_and_shards_that_are_begun(scene: Scene) -> None:
    async def act(scene: Scene) -> None:
        for number in (3, 11, 5, 16, 1, 14, 8, 19, 0, 12):  # a half of the file
            await scene.read(b"shards/02", number=number)
            await scene.settled()
        assert {number for key, number in scene.origin.read_blocks if key == b"shards/02"} == set(range(20))
        assert directories_of(scene.origin.read_keys) == {b"shards"}
        assert set(scene.origin.read_keys) == {b"shards/02"}
        for shard in (b"shards/04", b"shards/06"):
            for number in range(4):
                await scene.read(shard, number=number)
                await scene.settled()
        assert {b"shards/05", b"shards/07"} <= set(scene.origin.read_keys)
        assert {number for key, number in scene.origin.read_blocks if key == b"shards/04"} == set(range(20))

    virtual_time.run(scene.play(act))


def test_while_a_reader_waits_little_is_brought_for_nobody(scene: Scene) -> None:
    async def act(scene: Scene) -> None:
        paths = in_any_order(3 * PER_DIRECTORY, 5)
        for path in paths[:20]:
            await scene.read(path)
        await scene.settled()
        scene.origin.open.clear()
        wanted = next(path for path in paths if path not in scene.origin.read_keys)
        reader = asyncio.create_task(scene.read(wanted))
        await scene.fetching(1)
        await scene.settled()
        assert scene.fetches <= 1 + (BUSY_BYTES + IDLE_BYTES) // SIZE
        scene.origin.open.set()
        await reader

    virtual_time.run(scene.play(act))


def test_areas_of_files_at_several_depths(tmp_path: Path) -> None:
    paths = [b"a/x/%d" % n for n in range(3)] + [b"a/y/%d" % n for n in range(2)] + [b"a/z", b"b/c/d/0", b"top"]
    objects = [ListedObject(path, SIZE, 7, b"v1") for path in [*paths, b"a/x/large"]]
    objects = [
        ListedObject(one.key, 3 * BLOCK_SIZE if one.key.endswith(b"large") else SIZE, 7, b"v1") for one in objects
    ]
    snapshot = Snapshot(build_snapshot_file(objects, "test://origin", BLOCK_SIZE, lambda key: key, tmp_path))
    areas = AreaIndex(lambda key: False)

    def found(path: bytes, number: int = 0) -> list[tuple[str, set[bytes], bytes]]:
        entry = snapshot.find_path(path)
        assert entry is not None
        (placed,) = areas.areas_of_blocks(snapshot, [((snapshot.id, entry.number, number), SIZE)])
        shown = []
        for one in placed.positions:
            entries = range(one.area.first, one.area.first + one.area.count)
            within = (
                {snapshot.path(n) for n in entries}
                if one.area.rule is not ReadaheadRule.REST
                else {b"%d" % one.area.count}
            )
            shown.append((str(one.area.rule), within, snapshot.path(one.directory)))
            if one.area.rule is not ReadaheadRule.REST:
                assert one.area.first + one.index == entry.number
        return shown

    x, y = {b"a/x/0", b"a/x/1", b"a/x/2", b"a/x/large"}, {b"a/y/0", b"a/y/1"}
    assert found(b"a/x/1") == [("set", x, b"a/x/1"), ("set", x | y, b"a/x"), ("set", x | y | {b"b/c/d"}, b"a")]
    assert found(b"a/x/large", 1) == [("rest", {b"3"}, b""), ("shards", x, b"a/x/large")]
    assert found(b"a/x/large", 2) == [("rest", {b"3"}, b"")]
    assert found(b"top") == [("set", {b"a", b"b", b"top"}, b"top")]
    assert found(b"b/c/d/0")[0] == ("set", {b"b/c/d/0"}, b"b/c/d/0")
