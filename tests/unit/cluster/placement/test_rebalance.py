"""What a node gets from others as members come and go."""

import asyncio
import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import xxhash

from cachefs.block import MEMORY, piece_checksums
from cachefs.planning.blocks.presence import Presence
from cachefs.planning.blocks.space import BlockSpace
from cachefs.planning.cluster.homes import BlockHomes, NodeCandidates
from cachefs.planning.cluster.ownership import Ownership
from cachefs.planning.cluster.rendezvous import RingMember, space_hashes
from cachefs.planning.sequences.plan import Plan
from cachefs_cluster.membership.view import ClusterView
from cachefs_cluster.peers.peer_requests import (
    BLOCK_NOT_FOUND,
    PEER_OVERLOADED,
    BlockRequest,
    PeerBlock,
    PeerResponse,
    RequestOptions,
)
from cachefs_cluster.placement import missing_blocks, rebalance
from cachefs_cluster.placement.holders import PlacementRing, block_spans
from cachefs_cluster.placement.rebalance import Rebalance, RebalanceParts
from cachefs_cluster.placement.rebalance_status import ring_digest
from cachefs_daemon.runtime.threads import Threads
from tests import virtual_time
from tests.blockstore import OpenStore, data_of, store_config
from tests.peering import KnownMembership, node_id, record, view_of
from tests.waiting import until_async

FILES = 1200
SIZE = 1000


class Listing:
    """A snapshot, as planning sees it."""

    block_size = 1 << 20
    directories = 0

    def __init__(self, letter: str = "a", files: int = FILES) -> None:
        self.id = letter * 32
        self.files = files

    def contents(self) -> Iterator[tuple[int, int, bytes]]:
        for number in range(1, self.files + 1):
            yield number, SIZE, hashlib.blake2b(b"%s%d" % (self.id.encode(), number), digest_size=16).digest()


class Others:
    """They have every block, unless they say first that they have not, and say who was asked for it. Those that hang
    answer later."""

    def __init__(self, *first: PeerResponse, always: bool = False) -> None:
        """first: what they say when they are asked for a block once, twice, ...; always: and from then on."""
        self.asked: dict[bytes, str] = {}
        self.times: Counter[bytes] = Counter()
        self.on_ask: Callable[[], None] = lambda: None
        self._first, self._always = first, always
        self.is_hanging = False
        self._waiting: list[Callable[[], None]] = []

    def is_usable(self, node: str) -> bool:
        return True

    def request_block(
        self, node: Any, wanted: BlockRequest, how: RequestOptions, answer: Callable[[PeerResponse], None]
    ) -> None:
        data = data_of(wanted.ref.entry, wanted.length)
        block: PeerResponse = PeerBlock(memoryview(data), piece_checksums(wanted.key, data), MEMORY)
        self.on_ask()
        self.asked[wanted.key] = node.id
        if self._always or self.times[wanted.key] < len(self._first):
            block = self._first[min(self.times[wanted.key], len(self._first) - 1)]
        self.times[wanted.key] += 1
        if self.is_hanging:
            self._waiting.append(lambda: answer(block))
        else:
            asyncio.get_running_loop().call_soon(answer, block)

    def go_on(self) -> None:
        self.is_hanging = False
        for answer in self._waiting:
            answer()


class Shared:
    """Keeps what is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def publish(self, section: object, name: str, value: Any) -> None:
        self.told.append(value)


def ring(*numbers: int) -> PlacementRing:
    ids = [node_id(number) for number in numbers]
    members = tuple(RingMember(one, xxhash.xxh3_64_intdigest(one.encode()), 1.0, "") for one in ids)
    return PlacementRing(len(numbers), members, tuple(1 << 30 for _ in ids))


def test_what_a_node_that_leaves_holds_is_had_also_where_another_one_comes_meanwhile(tmp_path: Path) -> None:
    async def run() -> None:
        store, threads = OpenStore(store_config(tmp_path, memory=32 << 20)), Threads()
        others, shared = Others(), Shared()
        me, leaver, third, fourth = (record(number, 1) for number in (1, 2, 3, 4))
        view: ClusterView = view_of(me.id, [me, leaver, third, fourth])
        before, without, after = ring(1, 2, 3), ring(1, 3), ring(1, 3, 4)
        parts = RebalanceParts(
            KnownMembership(view), cast(Any, shared), cast(Any, others), store.blocks, Plan(), Ownership(), threads,
            Presence(), lambda: [cast(Any, Listing())], lambda: False, lambda snapshot: None, lambda: 1 << 30, 1,
            1 << 30,
        )  # fmt: skip
        filling = Rebalance(parts, before)
        task = asyncio.create_task(filling.run())
        try:
            others.is_hanging = True
            filling.set_ring(without)
            await until_async(lambda: others.asked, "it asks")
            filling.set_ring(after)
            others.go_on()
            await until_async(
                lambda: shared.told[-1].ring == ring_digest(after.ids) and not shared.told[-1].blocks, "it is done"
            )
            space = BlockSpace.of(cast(Any, Listing()))
            homes = BlockHomes(space_hashes(space), 1)
            homes.set_members(before.members)
            first = homes.first.copy()
            homes.set_members(after.members)
            moved = [space.key(int(one)) for one in np.flatnonzero((homes.first == 0) & (first == 1))]
            assert len(moved) > 20
            assert all(store.blocks.get(key) is not None for key in moved)
            assert {others.asked[key] for key in moved} == {leaver.id}
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            threads.close()
            store.close()

    virtual_time.run(run())


def filled(tmp_path: Path, others: Others, *listings: Listing, free: int = 1 << 30) -> set[bytes]:
    """What node 1 of three has filled up with that has just come back: keys."""

    async def run() -> set[bytes]:
        store, threads = OpenStore(store_config(tmp_path, memory=32 << 20)), Threads()
        view = view_of(node_id(1), [record(number, 1) for number in (1, 2, 3)])
        parts = RebalanceParts(
            KnownMembership(view), cast(Any, Shared()), cast(Any, others), store.blocks, Plan(), Ownership(), threads,
            Presence(), lambda: [cast(Any, one) for one in listings], lambda: False, lambda snapshot: None,
            lambda: free, 1, 1 << 30,
        )  # fmt: skip
        filling = Rebalance(parts, ring(1, 2, 3))
        assert all(filling.is_searching(one.id) for one in listings)
        task = asyncio.create_task(filling.run())
        try:
            await until_async(lambda: len(filling._done_snapshots) == len(listings), "it is done")
            assert all(filling.is_searching(one.id) == (free < SIZE) for one in listings)
            return {key for key in others.asked if store.blocks.get(key) is not None}
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            threads.close()
            store.close()

    return virtual_time.run(run())


def own(listing: Listing) -> dict[bytes, str]:
    """The blocks of node 1, and who stands in for it."""
    space = BlockSpace.of(cast(Any, listing))
    homes = BlockHomes(space_hashes(space), 1)
    homes.set_members(ring(1, 2, 3).members)
    mine = np.flatnonzero(homes.first == 0)
    homes.set_members(ring(2, 3).members)
    return {space.key(int(one)): ring(2, 3).ids[homes.first[one]] for one in mine}


def test_a_node_that_comes_back_asks_those_who_stood_in_for_it(tmp_path: Path) -> None:
    others = Others()
    assert filled(tmp_path, others, Listing()) == own(Listing()).keys()
    assert others.asked == own(Listing())


def test_of_what_nobody_has_only_a_sample_is_asked_for(tmp_path: Path) -> None:
    others = Others(BLOCK_NOT_FOUND, always=True)
    assert filled(tmp_path, others, Listing(files=9000)) == set()
    assert len(own(Listing(files=9000))) > rebalance.MIN_BLOCKS_TO_SAMPLE
    assert 0 < others.times.total() <= rebalance.SAMPLED_BLOCKS


def test_a_node_that_has_no_time_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebalance, "RETRY_SECONDS", 0.0)
    assert filled(tmp_path, Others(PEER_OVERLOADED, PEER_OVERLOADED), Listing()) == own(Listing()).keys()


def test_what_was_lost_evicts_nothing(tmp_path: Path) -> None:
    assert len(filled(tmp_path, Others(), Listing(), free=SIZE - 1)) <= rebalance.BATCH_BLOCKS


def test_one_snapshot_is_looked_at_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spaces: list[weakref.ref[BlockSpace]] = []
    alive: list[int] = []
    others = Others()

    class Watched(BlockSpace):
        @classmethod
        def of(cls, snapshot: Any) -> BlockSpace:
            space = BlockSpace.of(snapshot)
            spaces.append(weakref.ref(space))
            return space

    monkeypatch.setattr(missing_blocks, "BlockSpace", Watched)
    others.on_ask = lambda: alive.append(sum(one() is not None for one in spaces))
    listings = [Listing(letter) for letter in "abcdef"]
    found = filled(tmp_path, others, *listings)
    assert found == set().union(*(own(one) for one in listings))
    # The one that is asked for, and at most one that has not gone yet.
    assert max(alive) <= 2


def test_second_copies_of_hot_snapshots_come_from_other_nodes_as_far_as_there_is_room(tmp_path: Path) -> None:
    async def run() -> None:
        store, threads, others = OpenStore(store_config(tmp_path, memory=32 << 20)), Threads(), Others()
        view, listing = view_of(node_id(1), [record(number, 1) for number in (1, 2)]), Listing()
        space, standing, presence, plan = BlockSpace.of(cast(Any, listing)), Ownership(), Presence(), Plan()
        plan.add_space(space)
        presence.add_space(space)
        owned, second = np.zeros((2, space.count), np.bool_)
        second[:100] = True
        standing.set_owned(space.snapshot, owned)
        standing.set_second_copies(space.snapshot, second)
        ids = ring(1, 2).ids
        shared = SimpleNamespace(
            is_hot=False, has_readers=True, is_up_to_date=True, space=space, snapshot=space.snapshot, holders=None,
            leader="job", nodes_with=lambda ids_: [NodeCandidates(ids, np.full(len(ids_), 1, np.uint16))],
        )  # fmt: skip
        spans = block_spans(space.sizes)
        parts = RebalanceParts(
            KnownMembership(view), cast(Any, Shared()), cast(Any, others), store.blocks, plan, standing, threads,
            presence, lambda: [cast(Any, listing)], lambda: False, lambda snapshot: cast(Any, shared),
            lambda: int(spans[:60].sum()), 2, 1 << 30,
        )  # fmt: skip
        rebalance_ = Rebalance(parts, ring(1, 2))
        try:
            await rebalance_._make_second_copies()
            assert not rebalance_.second_copies
            shared.is_hot = True
            await rebalance_._make_second_copies()
            assert (rebalance_.second_copies, rebalance_.fetched_blocks) == (60, 0)
            assert all(store.blocks.get(space.key(number)) is not None for number in range(60))
            assert set(others.asked.values()) == {node_id(2)}
        finally:
            threads.close()
            store.close()

    virtual_time.run(run())
