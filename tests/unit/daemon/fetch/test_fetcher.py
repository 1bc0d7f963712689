"""Single flight, priorities, deadlines and failures of fetches, over a real store and an origin that obeys the test."""

import asyncio
import errno
import gc
import math
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cachefs.block import PIECE_SIZE, BlockLocation, block_key, pieces_match
from cachefs.errors import CachefsError, NotFound, ObjectChanged, OriginUnavailable
from cachefs.messages import BlockRef
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch import block_fetch, fetcher, origin_source, tier_writes
from cachefs_daemon.fetch.block_fetch import BlockFetch, BlockResult, BypassBlock
from cachefs_daemon.fetch.concurrency_limiter import REQUESTER, UNPLANNED, ConcurrencyLimiter
from cachefs_daemon.fetch.fetch_parts import FetchParts, SourceLookups
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.fetch.process import ProcessResultCallback
from cachefs_daemon.fetch.tier_writes import StoreOutcome
from cachefs_daemon.origin.base import ObjectRange, ReportProblem
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store import capacity
from cachefs_daemon.store.block_store import BlockToStore
from cachefs_daemon.store.storage import StoreConfig
from cachefs_daemon.store.tier import TierConfig
from tests import virtual_time
from tests.blockstore import OpenStore
from tests.waiting import until_async

SIZE = 100_000


class ObedientOrigin:
    """An origin in which each object's bytes are its number."""

    url = "test://origin"
    errors = 0

    def __init__(self) -> None:
        self.requests = 0
        self.endpoint = Endpoint(self.url, 1000)
        self.open = asyncio.Event()  # reads wait while it is not set
        self.open.set()
        self.failure: Exception | None = None  # what reads raise
        self.extra = b""  # bytes at the end of each answer
        self.order: list[bytes] = []  # keys, as they were read
        self.trouble: CachefsError | None = None  # what the first attempt of each read ends with, if anything
        self.patience: Deadline  # that of the last read
        self.rests: list[float] = []  # the next read rests for so many seconds

    def identity(self, key: bytes) -> bytes:
        return key

    async def list(self, report: ReportProblem) -> AsyncIterator[list[ListedObject]]:
        raise NotImplementedError
        yield

    async def read(self, wanted: ObjectRange, patience: Deadline) -> bytes:
        self.requests += 1
        self.order.append(wanted.key)
        self.patience = patience
        try:
            with patience.enforced():
                patience.last_error = self.trouble
                if self.rests:
                    await patience.pause(self.rests.pop())
                await self.open.wait()
        except TimeoutError:
            raise OriginUnavailable(f"{wanted.key.decode()} did not answer") from None
        if self.failure is not None:
            raise self.failure
        return wanted.key.ljust(wanted.length, b".") + self.extra

    async def close(self) -> None:
        pass


class Bench:
    """A fetcher on a bench."""

    asks = False  # does who waits get its outcomes by `ask`, as mounts do, and not by `demand`?

    def __init__(self, store: OpenStore, slots: int = 8, read_deadline: float = 20) -> None:
        self.store = store
        self.origin = ObedientOrigin()
        self.errors = ErrorLog()
        self.threads = Threads()
        self.fetch_in_process: Callable[..., bool] = lambda *_: False
        self.fetcher = Fetcher(
            FetchParts(
                store.blocks,
                SourceLookups(self.resolve),
                self.threads,
                ConcurrencyLimiter(slots, 1 << 30),
                self.errors,
                read_deadline,
                fetch_in_process=lambda *asked: self.fetch_in_process(*asked),
            )
        )

    async def demand(self, refs: list[BlockRef], patience: float) -> list[BlockResult]:
        if not self.asks:
            return await self.fetcher.fetch_on_demand(refs, patience)
        answered: asyncio.Future[list[BlockResult]] = asyncio.get_running_loop().create_future()
        self.fetcher.request_on_demand(refs, patience, lambda answer, _: answered.done() or answered.set_result(answer))
        return await answered

    def resolve(self, ref: BlockRef) -> BlockSource:
        if ref.entry == 0:
            raise NotFound("no entry 0")
        name = b"object-%d" % ref.entry
        return BlockSource(key_of(ref.entry), self.origin, ObjectRange(name, b"v1", SIZE, 0, SIZE), ref.snapshot)

    def bytes_at(self, entry: int, outcome: object) -> bytes | None:
        assert isinstance(outcome, BlockLocation), outcome
        return self.store.read(key_of(entry), outcome)


def key_of(entry: int) -> bytes:
    return block_key(entry.to_bytes(16, "big"), 0)


def ref(entry: int, bad: bytes = b"") -> BlockRef:
    return BlockRef("snapshot", entry, 0, bad)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[OpenStore]:
    memory = TierConfig(tmp_path / "memory", 16 << 20, 4 << 20, "minio")
    opened = OpenStore(StoreConfig(tmp_path / "state", 1 << 20, memory, None))
    yield opened
    opened.close()


@pytest.fixture(autouse=True, params=["demand", "ask"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "asks", request.param == "ask")


def on_bench(
    store: OpenStore,
    scene: Callable[[Bench], Awaitable[None]],
    run: Callable[[Coroutine[Any, Any, None]], None] = virtual_time.run,
    **settings: float,
) -> None:
    """Play the scene. run: `asyncio.run` where a thread hangs, which only a real one can."""

    async def play() -> None:
        bench = Bench(store, **settings)  # type: ignore[arg-type]
        try:
            await asyncio.wait_for(scene(bench), 30)
        finally:
            await bench.fetcher.close()
            bench.threads.close()

    run(play())


def test_the_bytes_of_a_block_are_let_go_as_soon_as_it_is_stored(store: OpenStore) -> None:
    class Body(bytearray):
        """Bytes that one can watch."""

    async def scene(bench: Bench) -> None:
        bodies = []
        read = bench.origin.read

        async def watched(wanted: ObjectRange, patience: Deadline) -> Body:
            body = Body(await read(wanted, patience))
            bodies.append(weakref.ref(body))
            return body

        bench.origin.read = watched  # type: ignore[method-assign, assignment]
        gc.disable()
        try:
            await bench.demand([ref(1)], 20)
            await until_async(lambda: bodies[0]() is None)
        finally:
            gc.enable()

    on_bench(store, scene)


def test_who_waits_for_a_slot_is_told_when_the_daemon_stops(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.origin.open.clear()
        asked = [asyncio.create_task(bench.fetcher.fetch_on_demand([ref(number)], 20)) for number in (1, 2)]
        await until_async(lambda: len(bench.fetcher.in_flight_fetches._fetches) == 2)
        assert bench.fetcher.in_flight[0] == 1
        await bench.fetcher.close()
        assert [str(outcome) for answer in asked for outcome in await answer] == ["the daemon is stopping"] * 2
        assert bench.fetcher.in_flight == (0, 0)

    on_bench(store, scene, slots=1)


def test_who_asks_for_one_block_does_not_wait_for_all_of_another(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.origin.open.clear()
        calls = []
        for asker, number in [*((1, number) for number in range(1, 8)), (2, 9), (3, 7)]:
            REQUESTER.set(asker)
            calls.append(asyncio.create_task(bench.demand([ref(number)], 20)))
            await until_async(lambda wanted=number: key_of(wanted) in bench.fetcher.in_flight_fetches._fetches)  # type: ignore[misc]
        await until_async(lambda: bench.fetcher._limiter._next_ranks.get(3) is not None)
        bench.origin.open.set()
        await asyncio.gather(*calls)
        numbers = [int(key.removeprefix(b"object-")) for key in bench.origin.order]
        assert numbers == [1, 2, 9, 7, 3, 4, 5, 6]  # 7 was asked for twice

    on_bench(store, scene, slots=1)


def test_one_flight_for_all_who_ask(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.origin.open.clear()
        calls = [asyncio.create_task(bench.demand([ref(1), ref(2), ref(1)], 20)) for _ in range(5)]
        await until_async(lambda: bench.origin.requests == 2)
        calls[0].cancel()
        await asyncio.sleep(0.01)
        bench.origin.open.set()
        answers = await asyncio.gather(*calls[1:])
        assert all(answer == answers[0] for answer in answers)
        assert bench.bytes_at(1, answers[0][0]) == b"object-1".ljust(SIZE, b".")
        assert (bench.origin.requests, bench.fetcher.fetched_blocks) == (2, 2)
        assert bench.fetcher.in_flight == (0, 0)
        await bench.demand([ref(1)], 20)
        assert bench.origin.requests == 2

    on_bench(store, scene)


def test_all_callers_gone_the_block_still_lands(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.origin.open.clear()
        call = asyncio.create_task(bench.demand([ref(1)], 20))
        await until_async(lambda: bench.origin.requests == 1)
        call.cancel()
        bench.origin.open.set()
        await until_async(lambda: bench.store.get(key_of(1)) is not None)

    on_bench(store, scene)


def test_patience_ends_with_a_reason_while_the_flight_goes_on(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.origin.open.clear()
        (outcome,) = await bench.demand([ref(1)], 0.05)
        assert isinstance(outcome, OriginUnavailable)
        assert "test://origin/object-1" in str(outcome)
        bench.origin.open.set()
        (outcome,) = await bench.demand([ref(1)], 20)
        assert bench.bytes_at(1, outcome)
        assert bench.origin.requests == 1

    on_bench(store, scene)


def test_a_second_try_does_not_wait_a_second_deadline(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.origin.open.clear()
        for _ in range(2):
            (outcome,) = await bench.demand([ref(1)], 20)
            assert isinstance(outcome, OriginUnavailable)
            assert outcome.errno == errno.EIO
        assert bench.origin.requests == 1
        (view,) = bench.errors.views()
        assert (view.subject, view.count) == ("test://origin/object-1", 1)

    on_bench(store, scene, read_deadline=0.05)


def test_a_later_reader_has_a_deadline_of_its_own(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.origin.open.clear()
        first = asyncio.create_task(bench.demand([ref(1)], 0.05))
        await until_async(lambda: bench.origin.requests == 1)
        patience = bench.origin.patience
        of_first = patience.until
        (outcome,) = await first
        assert isinstance(outcome, OriginUnavailable)
        later = asyncio.create_task(bench.demand([ref(1)], 20))
        await until_async(lambda: patience.until > of_first)
        bench.origin.open.set()
        (outcome,) = await later
        assert bench.bytes_at(1, outcome)
        assert bench.origin.requests == 1

    on_bench(store, scene)


def test_who_comes_when_a_flight_has_just_been_given_up_gets_one_of_its_own(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.origin.open.clear()
        first = asyncio.create_task(bench.demand([ref(1)], 20))
        await until_async(lambda: bench.origin.requests == 1)
        bench.origin.patience.until = -1.0
        later = asyncio.create_task(bench.demand([ref(1)], 20))
        await until_async(lambda: bench.origin.requests == 2)
        bench.origin.open.set()
        (outcome,) = await later
        assert bench.bytes_at(1, outcome)
        await first

    on_bench(store, scene)


def test_a_failure_that_may_pass_is_not_told_to_who_comes_later(
    store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_fetch, "OUTAGE_MEMORY_SECONDS", 0)

    async def scene(bench: Bench) -> None:
        bench.origin.failure = OriginUnavailable("down")
        (outcome,) = await bench.demand([ref(1)], 20)
        assert isinstance(outcome, OriginUnavailable)
        bench.origin.failure = None
        (outcome,) = await bench.demand([ref(1)], 20)
        assert bench.bytes_at(1, outcome)

    on_bench(store, scene)


def test_the_reader_learns_why_the_last_attempt_failed(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.origin.open.clear()
        bench.origin.trouble = OriginUnavailable("connection refused")
        (outcome,) = await bench.demand([ref(1)], 0.05)
        assert "connection refused" in str(outcome)

    on_bench(store, scene)


def test_between_two_attempts_the_slot_is_for_others(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.origin.rests.append(60.0)
        waiting = asyncio.create_task(bench.demand([ref(1)], 20))
        await until_async(lambda: bench.origin.requests == 1)
        (outcome,) = await bench.demand([ref(2)], 20)
        assert bench.bytes_at(2, outcome)
        waiting.cancel()

    on_bench(store, scene, slots=1)


def test_refusals_of_snapshots_long_gone_are_forgotten(store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_writes, "REFUSAL_MEMORY_SECONDS", 0)

    async def scene(bench: Bench) -> None:
        for number in range(1, 301):
            await bench.fetcher.fetch_ahead([BlockRef(f"snapshot {number}", number, 0)])
        assert len(bench.fetcher.in_flight_fetches._writer._refused) == 1

    on_bench(store, scene)


def test_failures_keep_their_kind_and_do_not_spoil_others(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        (good,) = await bench.demand([ref(1)], 20)
        bench.origin.failure = ObjectChanged("it changed")
        outcomes = await bench.demand([ref(0), ref(1), ref(2)], 20)
        assert [type(outcome) for outcome in outcomes] == [NotFound, BlockLocation, ObjectChanged]
        assert outcomes[1] == good
        bench.origin.failure = ZeroDivisionError("a bug")
        (outcome,) = await bench.demand([ref(3)], 20)
        assert isinstance(outcome, CachefsError)
        assert "internal error" in str(outcome)

    on_bench(store, scene)


def test_a_read_that_meets_what_fetching_ahead_found_has_failed_too(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.origin.failure = ObjectChanged("it changed")
        await bench.fetcher.fetch_ahead([ref(1)])
        assert [one.waited for one in bench.fetcher.failures.latest_first()] == [0]
        assert isinstance((await bench.demand([ref(1)], 20))[0], ObjectChanged)
        assert bench.origin.requests == 1
        assert [one.waited for one in bench.fetcher.failures.latest_first()] == [1]

    on_bench(store, scene)


def test_a_bug_is_an_answer_to_each_who_waits(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        def resolve(ref: BlockRef) -> BlockSource:
            raise ZeroDivisionError("a bug")

        bench.fetcher._lookups._resolve = resolve
        answered: asyncio.Future[list[BlockResult]] = asyncio.get_running_loop().create_future()
        bench.fetcher.request_on_demand(
            [BlockRef("s", 1, 0), BlockRef("s", 2, 0)], 20, lambda outcomes, _: answered.set_result(outcomes)
        )
        assert [str(one).partition(";")[0] for one in await answered] == [
            "internal error (ZeroDivisionError('a bug'))"
        ] * 2
        assert bench.errors.views()

    on_bench(store, scene)


def test_a_body_of_another_length_is_never_stored(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.origin.extra = b"too much"
        (outcome,) = await bench.demand([ref(1)], 20)
        assert isinstance(outcome, CachefsError)
        assert "100008 bytes instead of 100000" in str(outcome)
        assert bench.store.get(key_of(1)) is None

    on_bench(store, scene)


def test_what_has_come_since_it_was_seen_to_be_missing_is_not_fetched_again(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        looked = asyncio.get_running_loop().time()
        (there,) = await bench.demand([ref(1)], 20)
        begun = await bench.fetcher.start_fetches([ref(1), ref(2)], [UNPLANNED] * 2, looked)
        assert begun[0] == there
        assert isinstance(begun[1], BlockFetch)
        await begun[1].done_future()
        assert bench.origin.requests == 2

    on_bench(store, scene)


def test_demand_overtakes_what_is_ahead(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.origin.open.clear()
        await bench.fetcher.start_hinted_fetches([ref(n) for n in range(1, 9)])
        await until_async(lambda: bench.origin.requests == 1)
        calls = [asyncio.create_task(bench.demand([ref(n)], 20)) for n in (20, 7)]
        await until_async(lambda: bench.origin.requests == 2)
        await asyncio.sleep(0.05)
        bench.origin.open.set()
        await asyncio.gather(*calls)
        await until_async(lambda: bench.origin.requests == 9)
        assert bench.origin.order[0] == b"object-1"
        assert set(bench.origin.order[1:3]) == {b"object-20", b"object-7"}
        assert bench.origin.order.count(b"object-7") == 1

    on_bench(store, scene, slots=2)


def test_while_what_is_ahead_hangs_on_a_disk_all_else_goes_on(
    store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, released = threading.Semaphore(0), threading.Event()
    put = store.blocks.put_many

    def hang(blocks: Sequence[BlockToStore]) -> list[StoreOutcome]:
        if not blocks[0].may_be_transient:
            hanging.release()
            assert released.wait(60)
        return put(blocks)

    monkeypatch.setattr(store.blocks, "put_many", hang)

    async def scene(bench: Bench) -> None:
        stuck = asyncio.create_task(bench.fetcher.fetch_ahead([ref(number) for number in range(1, 7)]))
        try:
            assert await asyncio.to_thread(hanging.acquire, timeout=20)
            [there] = await bench.fetcher.fetch_on_demand([ref(10)], 20)
            assert bench.bytes_at(10, there) is not None
            assert await bench.fetcher.fetch_ahead([ref(10)]) == [there], "somebody looks up what is there"
            assert await bench.threads.background(lambda: "an answer") == "an answer"
        finally:
            released.set()
            await stuck

    on_bench(store, scene, asyncio.run)


@pytest.mark.parametrize(
    ("ahead", "patience", "deadline"),
    [(False, 0.05, 60), (True, 0.05, 60), (False, 60, 0.5)],
    ids=["demanded", "ahead", "in the last moment"],
)
def test_a_reader_gets_its_bytes_though_they_cannot_be_stored(
    store: OpenStore, monkeypatch: pytest.MonkeyPatch, ahead: bool, patience: float, deadline: float
) -> None:
    """A tier has to write something to a disk, which hangs."""
    monkeypatch.setattr(block_fetch, "STORE_WAIT_SECONDS", patience)
    hanging, released = threading.Event(), threading.Event()
    put = store.blocks.put_many

    def hang(blocks: Sequence[BlockToStore]) -> list[StoreOutcome]:
        hanging.set()
        assert released.wait(60)
        return put(blocks)

    monkeypatch.setattr(store.blocks, "put_many", hang)

    async def scene(bench: Bench) -> None:
        try:
            if ahead:
                await bench.fetcher.start_hinted_fetches([ref(1)])
                assert await asyncio.to_thread(hanging.wait, 20)
            [answer] = await bench.fetcher.fetch_on_demand([ref(1)], deadline)
            assert isinstance(answer, BypassBlock)
            assert answer.data == b"object-1".ljust(SIZE, b".")
            bench.fetcher.bypass_blocks.close()
            [again] = await bench.fetcher.fetch_on_demand([ref(1)], deadline)
            assert isinstance(again, BypassBlock)
        finally:
            released.set()
        await until_async(lambda: bench.store.get(key_of(1)) is not None)
        assert bench.origin.requests == 1

    on_bench(store, scene, asyncio.run)


def test_a_reader_of_a_small_block_gets_it_before_it_is_stored(
    store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    put = store.blocks.put_many

    def wait(blocks: Sequence[BlockToStore]) -> list[StoreOutcome]:
        assert released.wait(60)
        return put(blocks)

    monkeypatch.setattr(store.blocks, "put_many", wait)

    async def scene(bench: Bench) -> None:
        def ask(size: int, *, early: bool = True) -> "asyncio.Future[list[BlockResult]]":
            answered: asyncio.Future[list[BlockResult]] = asyncio.get_running_loop().create_future()
            bench.fetcher.request_on_demand(
                [BlockRef("snapshot", 1, 0, size=size)],
                20,
                lambda outcomes, _: answered.set_result(outcomes),
                may_be_early=early,
            )
            return answered

        try:
            part, place = ask(SIZE - 1), ask(SIZE, early=False)
            for answered in (ask(SIZE), ask(SIZE + 4096)):  # before its bytes have come; then they are here
                [answer] = await answered
                assert isinstance(answer, BypassBlock)
                assert answer.data == b"object-1".ljust(SIZE, b".")
                assert pieces_match(key_of(1), answer.checksums, 0, answer.pieces(0, SIZE))
            assert bench.fetcher.in_flight == (0, 0), "others may be fetched"
            assert not part.done()
            assert not place.done(), "who takes parts, or no bytes, gets its place"
        finally:
            released.set()
        assert bench.bytes_at(1, (await part)[0]) == bench.bytes_at(1, (await place)[0]) == answer.data
        assert await ask(SIZE) == await place
        assert (bench.origin.requests, bench.fetcher.bypass_blocks.count) == (1, 0)

    on_bench(store, scene, asyncio.run)


def test_a_large_block_is_read_where_it_was_put(store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "MAX_EARLY_BYTES", SIZE - 1)

    async def scene(bench: Bench) -> None:
        answered: asyncio.Future[list[BlockResult]] = asyncio.get_running_loop().create_future()
        bench.fetcher.request_on_demand(
            [BlockRef("snapshot", 1, 0, size=SIZE)],
            20,
            lambda outcomes, _: answered.set_result(outcomes),
            may_be_early=True,
        )
        assert bench.bytes_at(1, (await answered)[0])

    on_bench(store, scene)


def test_a_store_with_a_bug_costs_no_reader_its_bytes(store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(blocks: Sequence[BlockToStore]) -> list[StoreOutcome]:
        raise ZeroDivisionError("a bug")

    async def scene(bench: Bench) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(store.blocks, "put_many", fail)
            passed = await bench.demand([ref(number) for number in range(1, 4)], 20)
            assert [bytes(one.data)[:8] for one in passed if isinstance(one, BypassBlock)] == [
                b"object-1", b"object-2", b"object-3",
            ]  # fmt: skip
            [ahead] = await bench.fetcher.fetch_ahead([ref(9)])
            assert "internal error" in str(ahead)
        assert "ZeroDivisionError" in bench.errors.views()[-1].message
        assert bench.fetcher.in_flight == (0, 0)
        assert bench.bytes_at(4, (await bench.demand([ref(4)], 20))[0]) is not None

    on_bench(store, scene)


def test_what_a_process_has_brought_and_no_tier_has_is_fetched_with_a_slot(
    store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin_source, "MIN_PROCESS_WAIT", 0.0)
    carried: list[BlockSource] = []
    running: list[int] = []
    wanted = [ref(number) for number in range(1, 7)]

    def carry(source: BlockSource, tell: ProcessResultCallback, arrived: Callable[[], None]) -> bool:
        carried.append(source)
        asyncio.get_running_loop().call_soon(arrived)
        return True

    async def scene(bench: Bench) -> None:
        async def read(asked: ObjectRange, patience: Deadline) -> bytes:
            running.append(bench.fetcher.in_flight[0])
            await asyncio.sleep(0)
            return await ObedientOrigin.read(bench.origin, asked, patience)

        bench.fetch_in_process = carry
        monkeypatch.setattr(bench.origin, "read", read)
        assert bench.origin.endpoint.late_after(SIZE) == math.inf
        ahead = asyncio.ensure_future(bench.fetcher.fetch_ahead(wanted))
        await until_async(lambda: len(carried) == 6 and bench.fetcher.in_flight == (0, 0))
        outcomes = await asyncio.gather(*(bench.demand([one], 20) for one in wanted))
        assert [bench.bytes_at(one.entry, outcome) for one, (outcome,) in zip(wanted, outcomes, strict=True)]
        await ahead
        assert (len(running), min(running), max(running)) == (6, 1, 2)
        assert bench.fetcher.in_flight == (0, 0)

    on_bench(store, scene, slots=2)


def test_a_block_that_is_fetched_beside_a_process_keeps_its_slot_when_that_has_it(
    store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Endpoint, "late_after", lambda endpoint, size: 0.0)
    monkeypatch.setattr(origin_source, "MIN_PROCESS_WAIT", 0.0)
    arrivals: list[Callable[[], None]] = []

    async def scene(bench: Bench) -> None:
        bench.fetch_in_process = lambda source, tell, arrived: arrivals.append(arrived) is None
        bench.origin.open.clear()
        ahead = asyncio.ensure_future(bench.fetcher.fetch_ahead([ref(1)]))
        await until_async(lambda: bool(arrivals))
        demand = asyncio.ensure_future(bench.demand([ref(1)], 20))
        await until_async(lambda: bench.origin.requests == 1)
        arrivals[0]()
        assert bench.fetcher.in_flight == (1, SIZE)
        bench.origin.open.set()
        assert await demand == await ahead

    on_bench(store, scene)


def test_what_no_policy_wants_is_brought_only_on_demand(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        outcomes = await bench.fetcher.fetch_ahead([ref(n) for n in range(1, 301)])
        refused = [n for n, outcome in enumerate(outcomes, 1) if outcome is None]
        assert 0 < len(refused) < 300
        assert bench.origin.requests < 200
        (outcome,) = await bench.demand([ref(refused[-1])], 20)
        assert bench.bytes_at(refused[-1], outcome)

    on_bench(store, scene)


def test_what_was_refused_as_somebody_came_is_brought_again(store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put, refusals = store.blocks.put_many, [None]
    monkeypatch.setattr(store.blocks, "put_many", lambda blocks: [refusals.pop()] if refusals else put(blocks))

    async def scene(bench: Bench) -> None:
        (outcome,) = await bench.demand([ref(1)], 20)
        assert bench.bytes_at(1, outcome)
        assert bench.origin.requests == 2

    on_bench(store, scene)


def test_a_complaint_is_believed_only_where_it_is_true(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        (outcome,) = await bench.demand([ref(1)], 20)
        assert isinstance(outcome, BlockLocation)
        assert await bench.demand([ref(1, outcome.pack())], 20) == [outcome]
        (wrong,) = await bench.demand([ref(1, b"no location")], 20)
        assert isinstance(wrong, CachefsError)
        assert bench.origin.requests == 1

    on_bench(store, scene)


# --- no tier can hold it ----------------------------------------------------------------------------------------------


def out_of_memory(store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "memory_room", lambda **_: -(1 << 40))
    store.maintain()


def test_a_block_that_no_tier_can_hold_goes_to_all_who_wait(store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    out_of_memory(store, monkeypatch)

    async def scene(bench: Bench) -> None:
        answers = await asyncio.gather(*(bench.demand([ref(1)], 20) for _ in range(5)))
        [again] = await bench.demand([ref(1)], 20)
        for answer in (*(one for [one] in answers), again):
            assert isinstance(answer, BypassBlock)
            assert answer.data == b"object-1".ljust(SIZE, b".")
            assert pieces_match(key_of(1), answer.checksums, 0, memoryview(answer.pieces(0, SIZE)))
        assert bench.origin.requests == bench.fetcher.bypass_blocks.count == 1
        assert await bench.fetcher.fetch_ahead([ref(1), ref(2)]) == [None, None], "nobody waits for them"
        assert not bench.errors.views()

    on_bench(store, scene)


def test_what_passes_is_kept_for_a_moment_and_only_a_little_of_it(
    store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_of_memory(store, monkeypatch)
    monkeypatch.setattr(block_fetch, "KEPT_SECONDS", 0.05)

    async def scene(bench: Bench) -> None:
        bench.fetcher.in_flight_fetches._writer.bypass_blocks = kept = block_fetch.BypassBlocks(3 * SIZE)
        for number in range(1, 11):
            await bench.demand([ref(number)], 20)
        assert sum(kept.get(key_of(number)) is not None for number in range(1, 11)) <= 3
        await until_async(lambda: all(kept.get(key_of(number)) is None for number in range(1, 11)))
        monkeypatch.undo()
        store.maintain()
        assert bench.bytes_at(10, (await bench.demand([ref(10)], 20))[0]) is not None

    on_bench(store, scene)


def test_a_piece_of_what_passes_comes_with_whole_pieces_around_it() -> None:
    data = bytes(range(256)) * 2000
    block = BypassBlock.of(key_of(1), data)
    pieces = block.pieces(PIECE_SIZE + 5, 10)
    assert pieces == data[PIECE_SIZE : 2 * PIECE_SIZE]
    assert pieces_match(key_of(1), block.checksums, 1, memoryview(pieces))
    assert block.pieces(len(data) - 1, 1) == data[3 * PIECE_SIZE :]
