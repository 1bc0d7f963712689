"""Blocks from other nodes: whom a node asks for one, what it does where those are away, late or behind, and that every
block leaves the origin once. The nodes are real fetchers over real stores; what they ask each other obeys the test."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from cachefs.block import MEMORY, BlockLocation, block_key, piece_checksums
from cachefs.errors import CachefsError, NotFound, ObjectChanged, OriginAccessDenied
from cachefs.messages import BlockRef, FetchedBlock, FetchRequest
from cachefs_cluster.membership.view import NodeRecord
from cachefs_cluster.peers.peer_requests import (
    BLOCK_NOT_FOUND,
    FETCH_YOURSELF,
    PEER_OVERLOADED,
    SNAPSHOT_NOT_FOUND,
    BlockRequest,
    FailureKind,
    PeerBlock,
    PeerRequestFailed,
    PeerResponse,
    RequestOptions,
)
from cachefs_cluster.search import fetches_for_peers, missing_snapshots, peer_search, peer_source, search_state
from cachefs_cluster.search.fetches_for_peers import AwaitedSnapshots, FetchesForPeers
from cachefs_cluster.search.home_routes import BlockRoute, HomeRoutes
from cachefs_cluster.search.missing_snapshots import MissingSnapshots
from cachefs_cluster.search.peer_source import PeerSource
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch.block_fetch import BlockFetch, BlockResult, BypassBlock
from cachefs_daemon.fetch.concurrency_limiter import ConcurrencyLimiter, ReadPurpose
from cachefs_daemon.fetch.fetch_parts import FetchParts, SourceLookups
from cachefs_daemon.fetch.fetcher import Fetcher, PeerOutcome
from cachefs_daemon.origin.base import ObjectRange
from cachefs_daemon.ports import NO_PEERS
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.storage import StoreConfig
from cachefs_daemon.store.tier import TierConfig
from tests import virtual_time
from tests.blockstore import OpenStore
from tests.peering import KnownMembership, record, view_of
from tests.unit.daemon.fetch.test_fetcher import ObedientOrigin
from tests.waiting import until_async

SIZE = 100_000
NO_SNAPSHOT = FetchedBlock(location=b"", lacks_snapshot=True)
TAKE_IT = FetchedBlock(location=b"", must_fetch_itself=True)
ONE, TWO, THREE = (record(number, 1000 + number) for number in (1, 2, 3))


@dataclass(eq=False)
class Question:
    """To a peer."""

    node: NodeRecord
    wanted: BlockRequest
    how: RequestOptions
    answer: Callable[[PeerResponse], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def give(self, answer: PeerResponse) -> None:
        assert not self.is_cancelled
        self.answer(answer)

    def give_block(self) -> None:
        data = data_of(self.wanted.ref.entry)
        self.give(PeerBlock(memoryview(data), piece_checksums(self.wanted.key, data), MEMORY))

    @property
    def asked(self) -> tuple[str, bool]:
        """Who was asked, and whether to bring it."""
        return self.node.name, self.how.may_fetch


@dataclass
class ScriptedPeers:
    """Peers that say what the test says."""

    questions: list[Question] = field(default_factory=list)
    away: set[str] = field(default_factory=set)
    slow: set[str] = field(default_factory=set)
    doubted: set[str] = field(default_factory=set)
    alive: set[str] = field(default_factory=set)  # these give signs all the time
    signs: dict[str, float] = field(default_factory=dict)  # the last one of others, in loop time

    def request_block(
        self, node: NodeRecord, wanted: BlockRequest, how: RequestOptions, answer: Callable[[PeerResponse], None]
    ) -> Question:
        self.questions.append(Question(node, wanted, how, answer))
        return self.questions[-1]

    def is_usable(self, node_id: str) -> bool:
        return node_id not in self.away

    def expected_seconds(self, node: NodeRecord, length: int) -> float:
        return 1000.0 if node.id in self.slow else 0.001

    def last_heartbeat(self, node_id: str, *, fetch: bool) -> float:
        return asyncio.get_running_loop().time() if node_id in self.alive else self.signs.get(node_id, 0.0)

    def probe_silent(self, node_id: str) -> None:
        self.doubted.add(node_id)

    @property
    def asked(self) -> list[tuple[str, bool]]:
        return [question.asked for question in self.questions]


def data_of(entry: int) -> bytes:
    return (b"object-%d" % entry).ljust(SIZE, b".")


def key_of(entry: int) -> bytes:
    return block_key(entry.to_bytes(16, "big"), 0)


def ref(entry: int, size: int = 0) -> BlockRef:
    return BlockRef("snapshot", entry, 0, size=size)


class Bench:
    """Node 1, on a bench: others are asked as its route says."""

    def __init__(self, store: OpenStore, slots: int = 8, read_deadline: float = 20, alone: bool = False) -> None:
        self.store = store
        self.origin = ObedientOrigin()
        self.peers = ScriptedPeers()
        self.errors = ErrorLog()
        self.threads = Threads()
        self.route: BlockRoute | None = BlockRoute(fetching_node=TWO)
        self.slots = ConcurrencyLimiter(slots, 1 << 30)
        self.known = self.resolve
        self.find_route: Callable[[BlockSource], BlockRoute | None] = lambda _: self.route
        self.fetch_in_process: Callable[..., bool] = lambda *_: False
        membership = KnownMembership(view_of(ONE.id, [ONE, TWO, THREE]))
        self.lacks = MissingSnapshots()
        self.elsewhere = PeerSource(
            self.peers, lambda source: self.find_route(source), membership, self.slots, self.lacks
        )
        self.fetcher = Fetcher(
            FetchParts(
                store.blocks,
                SourceLookups(lambda one: self.known(one)),
                self.threads,
                self.slots,
                self.errors,
                read_deadline,
                NO_PEERS if alone else self.elsewhere,
                lambda *asked: self.fetch_in_process(*asked),
            )
        )
        self.await_snapshots(AwaitedSnapshots(lambda _: True, lambda _: False))
        self.told: list[tuple[BlockResult, str]] = []

    def resolve(self, wanted: BlockRef) -> BlockSource:
        name = b"object-%d" % wanted.entry
        where = ObjectRange(name, b"v1", SIZE, 0, SIZE)
        return BlockSource(key_of(wanted.entry), self.origin, where, wanted.snapshot, wanted.entry, 0)

    def await_snapshots(self, awaited: AwaitedSnapshots) -> None:
        """Have *awaited* say which snapshots are here, or on their way."""
        self.serving = FetchesForPeers(self.fetcher, awaited, self.lacks)

    def ask(self, entry: int, patience: float = 20.0) -> "asyncio.Future[BlockResult]":
        """As a reader does that waits."""
        answered: asyncio.Future[BlockResult] = asyncio.get_running_loop().create_future()

        def tell(answers: list[BlockResult], source: str) -> None:
            self.told.append((answers[0], source))
            answered.set_result(answers[0])

        self.fetcher.request_on_demand([ref(entry, SIZE)], patience, tell)
        return answered

    def ask_for_peer(self, entry: int, **fields: bool) -> "asyncio.Future[PeerOutcome]":
        """As node 2 does."""
        answered: asyncio.Future[PeerOutcome] = asyncio.get_running_loop().create_future()
        fetch = FetchRequest(blocks=[ref(entry, SIZE)], peer=TWO.id, **fields)
        self.serving.request(fetch, 20, lambda answers: answered.set_result(answers[0]))
        return answered

    async def ahead(self, entry: int, needed: float = math.inf) -> BlockFetch:
        """As a plan does, or with no time as a hint does."""
        [flight] = await self.fetcher.start_fetches(
            [ref(entry)], [ReadPurpose(needed_at=needed)], asyncio.get_running_loop().time()
        )
        assert isinstance(flight, BlockFetch)
        return flight

    async def question(self, number: int = 1) -> Question:
        """The question to a peer with this number, once it was asked."""
        await until_async(lambda: len(self.peers.questions) >= number)
        return self.peers.questions[number - 1]

    def holds(self, entry: int, answer: BlockResult) -> bool:
        assert isinstance(answer, BlockLocation), answer
        return self.store.read(key_of(entry), answer) == data_of(entry)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[OpenStore]:
    memory = TierConfig(tmp_path / "memory", 16 << 20, 4 << 20, "minio")
    opened = OpenStore(StoreConfig(tmp_path / "state", 1 << 20, memory, None))
    yield opened
    opened.close()


def on_bench(store: OpenStore, scene: Callable[[Bench], Awaitable[None]], **settings: float) -> None:
    async def play() -> None:
        bench = Bench(store, **settings)  # type: ignore[arg-type]
        try:
            await asyncio.wait_for(scene(bench), 30)
        finally:
            await bench.fetcher.close()
            bench.threads.close()
        assert bench.elsewhere.limiter.in_use == bench.slots.in_use == 0

    virtual_time.run(play())


# --- the way of a block -----------------------------------------------------------------------------------------------


def test_a_block_comes_from_the_node_that_brings_it_for_all(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        answers = [bench.ask(1), bench.ask(1)]
        question = await bench.question()
        assert question.asked == ("node-2", True)
        assert question.wanted == BlockRequest(BlockRef("snapshot", 1, 0), key_of(1), SIZE)
        assert not question.how.is_ahead
        question.give_block()
        assert all([bench.holds(1, await answer) for answer in answers])
        assert [source for _, source in bench.told] == ["peer node-2"] * 2
        bring = bench.fetcher.in_flight_fetches
        assert (bring.peer_blocks, bring.peer_bytes, bring.fetched_blocks, bench.origin.requests) == (1, SIZE, 0, 0)
        assert len(bench.peers.questions) == 1

    on_bench(store, scene)


def test_a_bug_in_the_way_to_other_nodes_costs_a_read_of_the_origin_and_nobody_waits(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.find_route = lambda _: [][1]  # type: ignore[assignment]
        assert bench.holds(1, await bench.ask(1))
        assert (bench.origin.requests, bench.peers.asked) == (1, [])
        assert "internal error" in "".join(one.message for one in bench.errors.views())

    on_bench(store, scene)


def test_a_home_waits_for_a_snapshot_that_is_on_its_way(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        here: set[str] = set()
        awaited = AwaitedSnapshots(here.__contains__, lambda _: True)
        bench.await_snapshots(awaited)
        resolve = bench.resolve

        def known(wanted: BlockRef) -> BlockSource:
            if wanted.snapshot not in here:
                raise NotFound(f"snapshot {wanted.snapshot} is not on this node")
            return resolve(wanted)

        bench.known = known
        answers = [bench.ask_for_peer(entry) for entry in range(3)]
        await asyncio.sleep(0.05)
        assert not any(answer.done() for answer in answers)
        here.add("snapshot")
        awaited.resume_requests("snapshot")
        found = await asyncio.gather(*answers)
        assert all(isinstance(one, BypassBlock | BlockLocation) for one in found)
        assert bench.origin.requests == 3

    on_bench(store, scene)


def test_a_snapshot_that_does_not_come_is_waited_for_once(store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches_for_peers, "AWAITED_SECONDS", 0.1)
    monkeypatch.setattr(fetches_for_peers, "MAX_SNAPSHOTS", 2)

    async def scene(bench: Bench) -> None:
        bench.known = _nothing_known
        awaited = AwaitedSnapshots(lambda _: False, lambda _: True)
        bench.await_snapshots(awaited)
        assert await bench.ask_for_peer(1) == NO_SNAPSHOT
        asked: list[int] = []
        assert not awaited.delay_request("snapshot", math.inf, lambda: asked.append(1)), "its time is over"
        for name in ("b", "c"):  # so many that it is forgotten
            assert awaited.delay_request(name, math.inf, lambda: asked.append(1))
        assert awaited.delay_request("snapshot", math.inf, lambda: asked.append(1))
        await until_async(lambda: len(asked) == 3)
        awaited.resume_requests("b")
        await virtual_time.settle()
        assert len(asked) == 3

    on_bench(store, scene)


def test_a_snapshot_of_which_nothing_was_heard_is_waited_for_as_long_as_news_takes(
    store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetches_for_peers, "AWAITED_SECONDS", 60.0)
    monkeypatch.setattr(fetches_for_peers, "UNKNOWN_SECONDS", 0.02)

    async def scene(bench: Bench) -> None:
        bench.known = _nothing_known
        coming: set[str] = set()
        awaited = AwaitedSnapshots(lambda _: False, coming.__contains__)
        bench.await_snapshots(awaited)
        assert await bench.ask_for_peer(1) == NO_SNAPSHOT
        assert not awaited.delay_request("snapshot", math.inf, lambda: None)
        coming.add("snapshot")  # the news has come
        told: list[int] = []
        assert awaited.delay_request("snapshot", math.inf, lambda: told.append(1))
        await asyncio.sleep(0.05)
        assert not told, "it is on its way"
        coming.clear()  # it cannot be had
        await until_async(lambda: told == [1])
        # News that comes while a request waits is taken into account.
        assert awaited.delay_request("another", math.inf, lambda: told.append(2))
        coming.add("another")
        await asyncio.sleep(0.05)
        assert told == [1]
        awaited.resume_requests("another")
        await until_async(lambda: told == [1, 2])

    on_bench(store, scene)


def test_a_node_that_lacks_the_snapshot_is_passed_over(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        def routed(source: BlockSource) -> BlockRoute:
            lacking = bench.lacks.nodes_without(source.snapshot)
            left = [one for one in (TWO, THREE) if one.id not in lacking]
            return BlockRoute(possible_holders=(THREE,), fetching_node=left[0] if left else None)

        bench.find_route = routed
        first = asyncio.ensure_future(bench.ask(1))
        await until_async(lambda: bench.peers.asked == [("node-3", False)])
        bench.peers.questions[-1].give(BLOCK_NOT_FOUND)
        await until_async(lambda: len(bench.peers.asked) == 2)
        bench.peers.questions[-1].give(SNAPSHOT_NOT_FOUND)
        await until_async(lambda: bench.peers.asked[1:] == [("node-2", True), ("node-3", True)])
        bench.peers.questions[-1].give_block()
        assert bench.holds(1, await first)
        # The next block is asked of the next node alone; where that lacks the snapshot too, the origin is asked.
        second = asyncio.ensure_future(bench.ask(2))
        await until_async(lambda: len(bench.peers.asked) == 4)
        bench.peers.questions[-1].give(BLOCK_NOT_FOUND)
        await until_async(lambda: bench.peers.asked[4:] == [("node-3", True)])
        bench.peers.questions[-1].give(SNAPSHOT_NOT_FOUND)
        assert bench.holds(2, await second)
        assert bench.origin.requests == 1

    on_bench(store, scene)


def _pass_over(bench: Bench, *nodes: NodeRecord) -> None:
    """Have the first of these nodes bring each block that does not lack the snapshot, as far as is known."""

    def routed(source: BlockSource) -> BlockRoute | None:
        lacking = bench.lacks.nodes_without(source.snapshot)
        return next((BlockRoute(fetching_node=one) for one in nodes if one.id not in lacking), None)

    bench.find_route = routed


def test_only_the_first_home_waits_for_a_snapshot_however_many_nodes_lack_it(
    store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(bench: Bench) -> None:
        nodes = [record(number, 1000 + number) for number in range(2, 34)]
        _pass_over(bench, *nodes)
        answer = bench.ask(1)
        for number, node in enumerate(nodes, 1):
            question = await bench.question(number)
            assert (question.node, question.how.await_snapshot) == (node, number == 1)
            question.give(SNAPSHOT_NOT_FOUND)
        assert bench.holds(1, await answer)
        assert (len(bench.peers.questions), bench.origin.requests) == (len(nodes), 1)
        # Once it is time to ask the home again, a search for another block does not have it wait either.
        monkeypatch.setattr(missing_snapshots, "MISSING_SECONDS", 0.0)
        bench.lacks.note_missing("snapshot", TWO.id)
        answer = bench.ask(2)
        question = await bench.question(len(nodes) + 1)
        assert (question.node, question.how.await_snapshot) == (TWO, False)
        question.give_block()
        assert bench.holds(2, await answer)

    on_bench(store, scene)


def test_a_home_is_waited_for_again_once_it_is_long_ago_that_another_lacked_the_snapshot(
    store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(missing_snapshots, "REMEMBERED_SECONDS", 0.0)

    async def scene(bench: Bench) -> None:
        _pass_over(bench, TWO)
        for number in (1, 2):
            answer = bench.ask(number)
            question = await bench.question(number)
            assert question.how.await_snapshot
            question.give(SNAPSHOT_NOT_FOUND)
            assert bench.holds(number, await answer)
            monkeypatch.setattr(missing_snapshots, "MISSING_SECONDS", 0.0)
            bench.lacks.note_missing("snapshot", TWO.id)

    on_bench(store, scene)


def test_the_origin_is_asked_beside_nodes_of_an_earlier_release_that_wait_for_the_snapshot_one_after_the_other(
    store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_search, "AWAIT_SNAPSHOT_SECONDS", 0.2)
    monkeypatch.setattr(peer_search, "STAND_IN_SECONDS", 0.1)

    async def scene(bench: Bench) -> None:
        _pass_over(bench, TWO, THREE)
        bench.peers.alive = {TWO.id, THREE.id}
        answer = bench.ask(1)
        (await bench.question()).give(SNAPSHOT_NOT_FOUND)
        question = await bench.question(2)
        assert question.asked == ("node-3", True)
        assert bench.holds(1, await answer), "it has come from the origin, and nothing was heard of node 3"
        assert (bench.origin.requests, bench.elsewhere.counts.hedged) == (1, 0)

    on_bench(store, scene)


def test_a_stand_in_has_time_to_bring_a_block_however_long_its_home_has_waited(
    store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_search, "AWAIT_SNAPSHOT_SECONDS", 0.0)

    async def scene(bench: Bench) -> None:
        _pass_over(bench, TWO, THREE)
        answer = bench.ask(1)
        (await bench.question()).give(SNAPSHOT_NOT_FOUND)
        (await bench.question(2)).give_block()
        assert bench.holds(1, await answer)
        assert bench.origin.requests == 0

    on_bench(store, scene)


def test_a_request_that_is_not_to_wait_is_told_at_once_that_a_snapshot_is_on_its_way(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.known = _nothing_known
        awaited = AwaitedSnapshots(lambda _: False, lambda _: True)
        bench.await_snapshots(awaited)
        answered = bench.ask_for_peer(1, await_snapshot=False)
        assert answered.done()
        assert await answered == NO_SNAPSHOT
        assert awaited.delay_request("snapshot", math.inf, lambda: None), "nobody has waited for it yet"
        awaited.resume_requests("snapshot")

    on_bench(store, scene)


@pytest.mark.parametrize("of_this_node", [True, False])
def test_what_others_brought_while_this_node_lacked_the_snapshot_does_not_leave_the_origin_again(
    store: OpenStore, of_this_node: bool
) -> None:
    """Neither where this node is the block's home, nor where it stands in for another that lacks the snapshot yet."""

    async def scene(bench: Bench) -> None:
        homes = replace(ONE if of_this_node else THREE, weight=1e6)
        nodes = [homes if one.id == homes.id else one for one in (ONE, TWO, THREE)]
        bench.find_route = HomeRoutes(KnownMembership(view_of(ONE.id, nodes)), bench.lacks).find_route
        here: set[str] = set()
        bench.await_snapshots(AwaitedSnapshots(here.__contains__, lambda _: False))
        assert await bench.ask_for_peer(1, await_snapshot=False) == NO_SNAPSHOT
        here.add("snapshot")
        bench.lacks.note_missing("snapshot", THREE.id)
        answer = bench.ask_for_peer(1)
        question = await bench.question()
        assert question.asked == ("node-2", False)
        question.give_block()
        assert isinstance(await answer, BypassBlock | BlockLocation)
        assert (len(bench.peers.questions), bench.origin.requests) == (1, 0)

    on_bench(store, scene)


def test_a_node_that_stands_in_for_all_asks_those_that_read_before_its_origin(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        def routed(source: BlockSource) -> BlockRoute:
            lacking = bench.lacks.nodes_without(source.snapshot)
            return BlockRoute(fetching_node=None if TWO.id in lacking else TWO, peers_before_origin=(THREE,))

        bench.find_route = routed
        answer = bench.ask(1)
        (await bench.question()).give(SNAPSHOT_NOT_FOUND)
        question = await bench.question(2)
        assert question.asked == ("node-3", False)
        question.give(BLOCK_NOT_FOUND)
        assert bench.holds(1, await answer)
        assert (bench.peers.asked, bench.origin.requests) == ([("node-2", True), ("node-3", False)], 1)

    on_bench(store, scene)


def _nothing_known(_: BlockRef) -> BlockSource:
    raise NotFound("no such snapshot")


def test_those_that_may_have_it_are_asked_in_turn_then_who_brings_it(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.route = BlockRoute(possible_holders=(THREE, TWO), fetching_node=THREE)
        answer = bench.ask(1)
        for number in (1, 2):
            (await bench.question(number)).give(BLOCK_NOT_FOUND)
        (await bench.question(3)).give_block()
        assert bench.holds(1, await answer)
        assert bench.peers.asked == [("node-3", False), ("node-2", False), ("node-3", True)]
        assert bench.elsewhere.counts.not_here == 2

    on_bench(store, scene)


def test_the_node_that_keeps_a_block_looks_for_it_and_brings_it_itself(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.route = BlockRoute(possible_holders=(TWO,), is_kept_here=True)
        answer = bench.ask(1)
        (await bench.question()).give(BLOCK_NOT_FOUND)
        assert bench.holds(1, await answer)
        assert bench.told[0][1] == ""
        assert (bench.origin.requests, bench.peers.asked) == (1, [("node-2", False)])

    on_bench(store, scene)


@pytest.mark.parametrize(
    "failed",
    [PeerRequestFailed("it has tried"), PeerRequestFailed("other bytes", FailureKind.WRONG_BYTES), BLOCK_NOT_FOUND],
)
def test_what_the_node_that_brings_it_does_not_give_comes_from_the_origin(
    store: OpenStore, failed: PeerResponse
) -> None:
    async def scene(bench: Bench) -> None:
        bench.route = BlockRoute(fetching_node=TWO, stand_in_node=THREE)
        answer = bench.ask(1)
        (await bench.question()).give(failed)
        assert bench.holds(1, await answer)
        assert (bench.origin.requests, len(bench.peers.questions)) == (1, 1)

    on_bench(store, scene)


@pytest.mark.parametrize(
    "failed", [PeerRequestFailed("it closed the connection", FailureKind.UNREACHABLE), PEER_OVERLOADED]
)
def test_another_node_stands_in_for_one_that_goes_away_in_the_midst_of_it(
    store: OpenStore, failed: PeerResponse
) -> None:
    """All others ask the same one, so the block still leaves the origin once."""

    async def scene(bench: Bench) -> None:
        bench.route = BlockRoute(fetching_node=TWO, stand_in_node=THREE)
        answer = bench.ask(1)
        (await bench.question()).give(failed)
        (await bench.question(2)).give_block()
        assert bench.holds(1, await answer)
        assert bench.peers.asked == [("node-2", True), ("node-3", True)]
        assert bench.origin.requests == 0

    on_bench(store, scene)


def test_nodes_that_are_away_cost_nothing(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.route = BlockRoute(possible_holders=(TWO,), fetching_node=TWO)
        bench.peers.away = {TWO.id}
        assert bench.holds(1, await bench.ask(1))
        bench.peers.away, bench.peers.slow = set(), {TWO.id}
        assert bench.holds(2, await bench.ask(2))
        assert not bench.peers.questions
        assert bench.origin.requests == 2

    on_bench(store, scene)


def test_an_object_that_has_changed_is_the_origins_to_say(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.origin.failure = ObjectChanged("it has changed")
        answer = bench.ask(1)
        (await bench.question()).give(PeerRequestFailed("node-2: it has changed"))
        assert isinstance(await answer, ObjectChanged)

    on_bench(store, scene)


def test_a_read_of_another_node_that_fails_is_no_failed_read_of_this_one(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.route = None
        bench.origin.failure = NotFound("gone")
        assert isinstance(await bench.ask_for_peer(3), NotFound)
        assert [one.waited for one in bench.fetcher.failures.latest_first()] == [0]
        assert isinstance(await bench.ask(4), NotFound)
        assert [one.waited for one in bench.fetcher.failures.latest_first()] == [1]

    on_bench(store, scene)


def test_what_the_origin_does_not_give_to_this_node_other_nodes_may_get(
    store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a directory that only some nodes have."""
    monkeypatch.setattr("random.shuffle", lambda nodes: None)

    async def scene(bench: Bench) -> None:
        bench.origin.failure = NotFound("no such directory here")
        answer = bench.ask(1)
        (await bench.question()).give(PeerRequestFailed("node-2: no such directory"))
        (await bench.question(2)).give(PeerRequestFailed("node-2: no such directory"))
        third = await bench.question(3)
        assert third.asked == ("node-3", True)
        assert isinstance(await bench.ask_for_peer(1), NotFound)  # who asks here is not kept waiting
        third.give_block()
        assert bench.holds(1, await answer)
        bench.peers.away = {THREE.id}
        answer = bench.ask(2)
        for number in (4, 5):
            (await bench.question(number)).give(PeerRequestFailed("node-2: no such directory"))
        assert str(await answer) == "no such directory here"
        assert isinstance(await bench.ask_for_peer(3), NotFound)
        assert len(bench.peers.questions) == 5
        bench.peers.away = set()
        answer = bench.ask(4)
        (await bench.question(6)).give(PeerRequestFailed("node-2: no such directory"))
        again = await bench.question(7)
        assert again.asked == ("node-3", True)  # who gave the last one is asked before all others
        again.give_block()
        assert bench.holds(4, await answer)

    on_bench(store, scene)


def test_two_nodes_that_do_not_agree_on_the_cluster_find_each_other_a_moment_later(
    store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(bench: Bench) -> None:
        answer = bench.ask(1)
        bench.route = BlockRoute(fetching_node=THREE)
        (await bench.question()).give(PeerRequestFailed("our epoch is old", FailureKind.OTHER_EPOCH))
        (await bench.question(2)).give_block()
        assert bench.holds(1, await answer)
        assert (bench.peers.asked[1], bench.origin.requests) == (("node-3", True), 0)
        monkeypatch.setattr(search_state, "DISAGREEMENT_SECONDS", 0)  # they do not agree for long
        answer = bench.ask(2)
        (await bench.question(3)).give(PeerRequestFailed("another list", FailureKind.OTHER_EPOCH))
        assert bench.holds(2, await answer)
        assert bench.origin.requests == 1

    on_bench(store, scene)


# --- late -------------------------------------------------------------------------------------------------------------


def test_of_late_answers_a_few_have_another_one_asked_beside_them(
    store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_state, "INITIAL_LATE_SECONDS", 0.01)
    monkeypatch.setattr(peer_search, "ORIGIN_LATE_SECONDS", 0.01)
    for module in (peer_search, search_state):
        monkeypatch.setattr(module, "MIN_LATE_SECONDS", 0.0)

    async def scene(bench: Bench) -> None:
        for entry in range(1, 51):  # which one second question in fifty comes of
            bench.ask(entry)
            (await bench.question(entry)).give_block()
        await until_async(lambda: len(bench.told) == 50)
        hedged_before = bench.elsewhere.counts.hedged
        answers = [bench.ask(entry) for entry in range(51, 61)]
        await until_async(lambda: len(bench.told) > 50)  # the origin was asked, and was quicker
        await asyncio.sleep(0.1)
        assert bench.elsewhere.counts.hedged <= 1
        assert bench.origin.requests == bench.elsewhere.counts.hedged == 1 or hedged_before == 1
        assert sum(answer.done() for answer in answers) == 1
        cancelled = [question for question in bench.peers.questions if question.is_cancelled]
        assert len(cancelled) == 1
        for question in bench.peers.questions[50:]:
            if not question.is_cancelled:
                question.give_block()
        await asyncio.gather(*answers)

    on_bench(store, scene)


def test_a_block_that_comes_late_all_the_same_counts_if_it_is_first(
    store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_state.PeerSearchState, "try_hedge", lambda _: True)
    monkeypatch.setattr(search_state, "INITIAL_LATE_SECONDS", 0.01)
    monkeypatch.setattr(peer_search, "ORIGIN_LATE_SECONDS", 0.01)

    async def scene(bench: Bench) -> None:
        bench.origin.open.clear()
        answer = bench.ask(1)
        await until_async(lambda: bench.origin.requests == 1)
        bench.peers.questions[0].give_block()
        assert bench.holds(1, await answer)
        assert bench.told[0][1] == "peer node-2"
        assert bench.fetcher.fetched_blocks == 0
        await until_async(lambda: bench.slots.in_use == 0)
        bench.origin.open.set()
        assert bench.holds(2, await hedged(bench, 2))

    async def hedged(bench: Bench, entry: int) -> BlockResult:
        answer = bench.ask(entry)
        question = await bench.question(2)
        result = await answer  # from the origin
        await until_async(lambda: question.is_cancelled)
        return result

    on_bench(store, scene)


def test_a_silent_peer_takes_a_part_of_a_readers_time_only(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.route = BlockRoute(possible_holders=(THREE,), fetching_node=TWO)
        answer = bench.ask(1, patience=20)
        assert bench.holds(1, await answer)
        assert bench.peers.asked == [("node-3", False), ("node-2", True)]
        assert all(question.is_cancelled for question in bench.peers.questions)

    on_bench(store, scene, read_deadline=0.4)


def test_every_reader_goes_on_at_once_where_a_peer_gives_no_sign_of_life(
    store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_search, "ORIGIN_LATE_SECONDS", 1000.0)
    monkeypatch.setattr(search_state, "SILENT_FETCH_SECONDS", 0.05)
    monkeypatch.setattr(search_state.PeerSearchState, "try_hedge", lambda _: False)

    async def scene(bench: Bench) -> None:
        bench.route = BlockRoute(fetching_node=TWO, stand_in_node=THREE)
        bench.peers.alive = {THREE.id}
        answers = [bench.ask(entry) for entry in range(10)]
        await until_async(lambda: len(bench.peers.questions) == 20)
        assert bench.peers.asked == [("node-2", True)] * 10 + [("node-3", True)] * 10
        for question in bench.peers.questions[10:]:
            question.give_block()
        assert all([bench.holds(entry, await answer) for entry, answer in enumerate(answers)])
        assert (bench.origin.requests, bench.elsewhere.counts.silent) == (0, 10)
        assert all(question.is_cancelled for question in bench.peers.questions[:10])
        assert bench.peers.doubted == {TWO.id}
        # It is not waited for again, as long as it gives no sign; what nobody waits for yet is asked of it.
        answer = bench.ask(20)
        assert (await bench.question(21)).asked == ("node-3", True)
        bench.peers.questions[20].give_block()
        assert bench.holds(20, await answer)
        flight = await bench.ahead(21)
        assert (await bench.question(22)).asked == ("node-2", True)
        bench.peers.questions[21].give_block()
        await until_async(lambda: flight.is_done)
        bench.peers.signs[TWO.id] = asyncio.get_running_loop().time()
        answer = bench.ask(22)
        assert (await bench.question(23)).asked == ("node-2", True)
        bench.peers.questions[22].give_block()
        assert bench.holds(22, await answer)

    monkeypatch.setattr(search_state, "MIN_SILENT_PAUSE", 1000.0)
    on_bench(store, scene)


def test_a_peer_that_gives_signs_is_waited_for_however_long_its_origin_takes(
    store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_search, "ORIGIN_LATE_SECONDS", 1000.0)
    monkeypatch.setattr(search_state, "SILENT_FETCH_SECONDS", 0.01)
    for module in (peer_search, search_state):
        monkeypatch.setattr(module, "MIN_LATE_SECONDS", 0.01)

    async def scene(bench: Bench) -> None:
        bench.peers.alive = {TWO.id}
        answer = bench.ask(1)
        question = await bench.question()
        await asyncio.sleep(0.2)
        assert (bench.origin.requests, bench.elsewhere.counts.silent) == (0, 0)
        bench.peers.alive = set()  # now it hangs
        assert bench.holds(1, await answer)
        assert bench.origin.requests == 1
        assert question.is_cancelled

    on_bench(store, scene)


def test_readers_do_not_wait_again_and_again_for_a_peer_that_lives_and_does_not_give(
    store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_search, "FETCH_SECONDS", 0.05)
    monkeypatch.setattr(peer_search, "ORIGIN_LATE_SECONDS", 0.02)
    monkeypatch.setattr(search_state, "MIN_LATE_PAUSE", 1000.0)
    monkeypatch.setattr(search_state, "MAX_LATE_PAUSE", 1000.0)

    async def scene(bench: Bench) -> None:
        bench.peers.alive = {TWO.id}
        for entry in range(5):
            assert bench.holds(entry, await bench.ask(entry))
        assert bench.peers.asked == [("node-2", True)] * 2
        # Where there is no other way it is asked all the same.
        bench.origin.failure = NotFound("no such directory here")
        answer = bench.ask(7)
        question = await bench.question(3)
        question.give_block()
        assert bench.holds(7, await answer)

    on_bench(store, scene)


def test_a_reader_whose_time_is_over_is_told_so_and_the_flight_ends(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.origin.open.clear()
        assert isinstance(await bench.ask(1, patience=0.05), CachefsError)
        await until_async(lambda: not bench.fetcher.in_flight_fetches._fetches)

    on_bench(store, scene, read_deadline=0.3)


def test_a_reader_who_comes_for_what_is_brought_without_haste_has_the_peer_told(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        flight = await bench.ahead(1, needed=math.inf)
        first = await bench.question()
        assert first.how.is_ahead
        answer = bench.ask(1)
        again = await bench.question(2)
        assert first.is_cancelled
        assert (again.asked, again.how.is_ahead) == (("node-2", True), False)
        again.give_block()
        assert bench.holds(1, await answer)
        assert flight.is_done

    on_bench(store, scene)


# --- other nodes ask --------------------------------------------------------------------------------------------------


def test_what_another_node_asks_for_never_comes_from_a_third_one(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        answer = await bench.ask_for_peer(1)
        assert bench.holds(1, answer) if isinstance(answer, BlockLocation) else answer is not None
        assert (bench.origin.requests, bench.peers.questions) == (1, [])

    on_bench(store, scene)


def test_two_nodes_that_take_each_other_for_the_home_do_not_wait_for_each_other(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        mine = bench.ask(1)
        question = await bench.question()  # to node 2, which asks here
        theirs = await bench.ask_for_peer(1)
        assert not isinstance(theirs, CachefsError | FetchedBlock)
        assert bench.holds(1, await mine)
        assert question.is_cancelled
        assert bench.origin.requests == 1

    on_bench(store, scene)


def test_another_node_waits_for_a_look_at_who_may_have_it_but_for_nothing_else(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.route = BlockRoute(possible_holders=(TWO,), fetching_node=THREE)
        bench.ask(1)
        theirs = bench.ask_for_peer(1)
        (await bench.question()).give(BLOCK_NOT_FOUND)
        assert not isinstance(await theirs, CachefsError | FetchedBlock)
        assert (bench.peers.asked, bench.origin.requests) == ([("node-2", False)], 1)

    on_bench(store, scene)


def test_what_another_node_asks_for_is_brought_by_no_third_one_where_nodes_do_not_agree(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.route = BlockRoute(possible_holders=(TWO,), fetching_node=THREE)
        theirs = bench.ask_for_peer(1)
        (await bench.question()).give(PeerRequestFailed("our epoch is old", FailureKind.OTHER_EPOCH))
        (await bench.question(2)).give(BLOCK_NOT_FOUND)
        assert not isinstance(await theirs, CachefsError | FetchedBlock)
        assert (bench.peers.asked, bench.origin.requests) == ([("node-2", False)] * 2, 1)

    on_bench(store, scene)


def test_all_who_ask_the_home_get_one_read_of_the_origin(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.route = None
        bench.origin.open.clear()
        asked = [bench.ask(1), *(bench.ask_for_peer(1, unhurried=ahead) for ahead in (True, False, True))]
        flight = await bench.ahead(1)
        await until_async(lambda: bench.origin.requests == 1)
        bench.origin.open.set()
        assert not any(isinstance(one, CachefsError) for one in await asyncio.gather(*asked))
        await until_async(lambda: flight.is_done)
        assert bench.origin.requests == 1

    on_bench(store, scene)


@pytest.mark.parametrize("joins", [True, False])
def test_a_reader_gets_from_others_what_the_origin_has_refused_to_another_node_here(
    store: OpenStore, joins: bool
) -> None:
    """joins: the reader comes while the block is fetched for the other node; else just after that has failed."""

    async def scene(bench: Bench) -> None:
        bench.route = None
        bench.origin.failure = OriginAccessDenied("no permission")
        bench.origin.open.clear()
        theirs = bench.ask_for_peer(1)
        await until_async(lambda: bench.origin.requests == 1)
        mine = bench.ask(1) if joins else None
        bench.origin.open.set()
        if mine is None:
            assert isinstance(await theirs, OriginAccessDenied)
            mine = bench.ask(1)
        (await bench.question()).give_block()
        assert bench.holds(1, await mine)
        assert not isinstance(await theirs, CachefsError) or not joins

    on_bench(store, scene)


def test_what_the_origin_refuses_is_not_asked_anew_for_each_other_node(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.route = None
        bench.origin.failure = OriginAccessDenied("no permission")
        for _ in range(3):
            assert isinstance(await bench.ask_for_peer(1), OriginAccessDenied)
        assert (bench.origin.requests, bench.peers.questions) == (1, [])

    on_bench(store, scene)


# --- behind -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with anything in its queue is behind."""
    monkeypatch.setattr(peer_source, "DELEGATE_AFTER_SECONDS", 1e-9)
    monkeypatch.setattr(peer_source, "DELEGATE_AHEAD_AFTER_SECONDS", 1e-9)


@pytest.mark.usefixtures("behind")
def test_a_home_that_is_behind_has_others_bring_blocks_and_gets_them_from_there(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.route = None
        bench.origin.open.clear()
        reader = bench.ask(1)  # has the only slot
        waiting = bench.ask(2)
        await until_async(lambda: bench.slots.waiting_and_running(bench.origin.endpoint) == (1, 1))
        assert await bench.ask_for_peer(2, may_take=True) == TAKE_IT
        question = await bench.question()
        assert question.asked == ("node-2", True)
        assert not question.how.may_delegate
        third = bench.ask_for_peer(2)  # somebody else
        fourth = bench.ask_for_peer(2, may_take=True)
        question.give_block()
        assert bench.holds(2, await waiting)
        others = await asyncio.gather(third, fourth)
        assert not any(isinstance(one, CachefsError | FetchedBlock) for one in others)
        assert (bench.elsewhere.counts.given, bench.origin.requests) == (1, 1)
        bench.origin.open.set()
        await reader

    on_bench(store, scene, slots=1)


@pytest.mark.usefixtures("behind")
def test_what_was_given_away_in_vain_comes_from_the_origin(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.route = None
        bench.origin.open.clear()
        reader, waiting = bench.ask(1), bench.ask(2)
        await until_async(lambda: bench.slots.waiting_and_running(bench.origin.endpoint) == (1, 1))
        assert await bench.ask_for_peer(2, may_take=True) == TAKE_IT
        (await bench.question()).give(PeerRequestFailed("it was killed", FailureKind.UNREACHABLE))
        bench.origin.open.set()
        assert bench.holds(1, await reader)
        assert bench.holds(2, await waiting)
        assert bench.origin.requests == 2

    on_bench(store, scene, slots=1)


@pytest.mark.usefixtures("behind")
def test_only_nodes_that_are_there_and_idle_are_given_anything(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        bench.route = None
        bench.origin.open.clear()
        first, second = bench.ask(1), bench.ask(2)
        await until_async(lambda: bench.slots.waiting_and_running(bench.origin.endpoint) == (1, 1))
        asked = [bench.ask_for_peer(2), bench.ask_for_peer(1, may_take=True)]  # the second one is under way
        bench.peers.away = {TWO.id}
        asked.append(bench.ask_for_peer(3, may_take=True))
        bench.origin.open.set()
        assert not any(isinstance(one, FetchedBlock) for one in await asyncio.gather(*asked, first, second))

    on_bench(store, scene, slots=1)


def test_a_node_that_is_idle_brings_what_a_home_gives_away(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        answer = bench.ask(1)
        question = await bench.question()
        assert question.how.may_delegate
        question.give(FETCH_YOURSELF)
        assert bench.holds(1, await answer)
        assert (bench.elsewhere.counts.taken, bench.origin.requests) == (1, 1)
        bench.origin.open.clear()
        bench.route = None
        for entry in range(10, 16):
            bench.ask(entry)
        await until_async(lambda: bench.slots.in_use == 6)
        bench.route = BlockRoute(fetching_node=TWO)
        bench.ask(2)
        assert not (await bench.question(2)).how.may_delegate
        bench.origin.open.set()

    on_bench(store, scene)


# --- copies, plans and the end ----------------------------------------------------------------------------------------


def test_copies_take_room_that_nobody_else_wants(store: OpenStore) -> None:
    """A policy that never evicts would keep them for ever, and this node's own blocks would find no room."""

    async def scene(bench: Bench) -> None:
        for entry in range(1, 150):  # nearly all of the tier
            bench.ask(entry)
            (await bench.question(entry)).give_block()
        await until_async(lambda: len(bench.told) == 149)
        bench.route = None
        own = [await bench.ahead(entry) for entry in range(200, 250)]
        await until_async(lambda: all(flight.is_done for flight in own))
        assert all(bench.holds(entry, flight.outcome) for entry, flight in enumerate(own, 200))  # type: ignore[arg-type]

    on_bench(store, scene)


def test_who_prefetches_asks_peers_and_no_fetch_process_brings_what_is_not_ours(store: OpenStore) -> None:
    carried: list[int] = []

    async def scene(bench: Bench) -> None:
        def carry(source: BlockSource, *_: object) -> bool:
            carried.append(source.entry)
            return False

        bench.fetch_in_process = carry
        now = asyncio.get_running_loop().time()
        flights = [await bench.ahead(entry, needed=now + 1) for entry in (1, 2)]
        questions = [await bench.question(1), await bench.question(2)]
        assert all(question.how.is_ahead for question in questions)
        questions[0].give_block()
        questions[1].give(PeerRequestFailed("it has tried"))
        await until_async(lambda: all(flight.is_done for flight in flights))
        assert all(isinstance(flight.outcome, BlockLocation) for flight in flights)
        assert [flight.source_peer for flight in flights] == ["peer node-2", ""]
        bench.route = BlockRoute(possible_holders=(TWO,), is_kept_here=True)
        own = await bench.ahead(3)
        (await bench.question(3)).give(BLOCK_NOT_FOUND)
        await until_async(lambda: own.is_done)
        assert carried == [3]

    on_bench(store, scene)


def test_the_daemon_ends_while_peers_are_asked(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        answers = [bench.ask(entry) for entry in range(1, 40)]
        await bench.ahead(100)
        await until_async(lambda: len(bench.peers.questions) >= 12)
        await bench.fetcher.close()
        assert {str(await answer) for answer in answers} == {"the daemon is stopping"}
        assert all(question.is_cancelled for question in bench.peers.questions)
        assert not bench.fetcher.in_flight_fetches._fetches

    on_bench(store, scene)


def test_readers_overtake_what_is_fetched_ahead_from_peers(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        for entry in range(1, 20):
            await bench.ahead(entry)
        asked = len(bench.peers.questions)
        assert asked < 19  # the rest waits
        reader = bench.ask(19)
        question = await bench.question(asked + 1)
        assert (question.wanted.ref.entry, question.how.is_ahead) == (19, False)
        question.give_block()
        assert bench.holds(19, await reader)

    on_bench(store, scene)


def test_without_a_cluster_nobody_is_asked(store: OpenStore) -> None:
    async def scene(bench: Bench) -> None:
        assert bench.holds(1, await bench.ask(1))
        assert not bench.peers.questions

    on_bench(store, scene, alone=True)


def test_every_kind_of_route() -> None:
    def route(holder: NodeRecord | None, home: NodeRecord | None, *before: NodeRecord) -> BlockRoute:
        return BlockRoute.from_records(ONE.id, holder, home, None, before)

    leaving = replace(THREE, state="draining")
    assert route(TWO, TWO) == BlockRoute((), TWO)
    assert route(TWO, THREE) == BlockRoute((TWO,), THREE)
    assert route(TWO, None) == route(TWO, ONE) == BlockRoute((TWO,), None)
    assert route(ONE, TWO) == route(None, TWO) == BlockRoute((), TWO, is_kept_here=True)
    assert route(ONE, TWO, THREE) == BlockRoute((THREE,), TWO, is_kept_here=True)
    assert route(ONE, ONE) == BlockRoute((), None, is_kept_here=True)
    assert route(leaving, TWO) == BlockRoute((leaving,), TWO)
    assert route(leaving, ONE) == BlockRoute((leaving,), None, is_kept_here=True)
    assert route(TWO, TWO, THREE) == BlockRoute((TWO, THREE), TWO)
    assert route(TWO, TWO, TWO) == BlockRoute((), TWO), "a home that may have it already gets one request"
    assert route(THREE, TWO, TWO) == BlockRoute((THREE,), TWO)
    assert route(ONE, ONE, TWO, ONE) == BlockRoute((TWO,), None, is_kept_here=True)
    assert BlockRoute.from_records(ONE.id, TWO, TWO, THREE).stand_in_node is THREE
    assert BlockRoute.from_records(ONE.id, TWO, TWO, ONE).stand_in_node is None


def test_a_late_answer_has_another_node_asked_soon_and_the_origin_only_after_a_second(
    store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_state.PeerSearchState, "try_hedge", lambda _: True)
    monkeypatch.setattr(search_state, "INITIAL_LATE_SECONDS", 0.01)
    monkeypatch.setattr(peer_search, "ORIGIN_LATE_SECONDS", 0.3)

    async def scene(bench: Bench) -> None:
        bench.route = BlockRoute(possible_holders=(TWO, THREE), fetching_node=TWO)
        began = asyncio.get_running_loop().time()
        answer = bench.ask(1)
        await bench.question(2)
        assert bench.holds(1, await answer)  # from the origin: the third question is late too
        assert bench.peers.asked == [("node-2", False), ("node-3", False), ("node-2", True)]
        assert asyncio.get_running_loop().time() - began >= 0.6

    on_bench(store, scene)
