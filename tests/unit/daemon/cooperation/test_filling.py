"""What a node gets from others as members come and go."""

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash
from cachefs_daemon.cluster.view import ClusterView
from cachefs_daemon.cooperation.filled import ring_digest
from cachefs_daemon.cooperation.filling import Filling, FillingParts
from cachefs_daemon.cooperation.holders import Ring
from cachefs_daemon.peers.answers import How, PeerAnswer, PeerBlock, Wanted
from cachefs_daemon.runtime.threads import Threads

from cachefs.block import MEMORY, piece_checksums
from cachefs.planning.blocks.space import BlockSpace
from cachefs.planning.cluster.homes import Homes
from cachefs.planning.cluster.rendezvous import Member, space_hashes
from cachefs.planning.cluster.standing import Standing
from cachefs.planning.sequences.plan import Plan
from tests.blockstore import OpenStore, data_of, store_config
from tests.peering import KnownMembership, node_id, record, until, view_of

FILES = 1200
SIZE = 1000


class Listing:
    """A snapshot, as planning sees it."""

    id = "a" * 32
    block_size = 1 << 20
    directories = 0
    files = FILES

    def contents(self) -> Iterator[tuple[int, int, bytes]]:
        for number in range(1, FILES + 1):
            yield number, SIZE, hashlib.blake2b(b"%d" % number, digest_size=16).digest()


class Others:
    """They have every block, and say who was asked for it. Those that hang answer later."""

    def __init__(self) -> None:
        self.asked: dict[bytes, str] = {}
        self.is_hanging = False
        self._waiting: list[Callable[[], None]] = []

    def usable(self, node: str) -> bool:
        return True

    def ask(self, node: Any, wanted: Wanted, how: How, answer: Callable[[PeerAnswer], None]) -> None:
        data = data_of(wanted.ref.entry, wanted.length)
        block = PeerBlock(memoryview(data), piece_checksums(wanted.key, data), MEMORY)
        self.asked[wanted.key] = node.id
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


def ring(*numbers: int) -> Ring:
    ids = [node_id(number) for number in numbers]
    members = tuple(Member(one, xxhash.xxh3_64_intdigest(one.encode()), 1.0, "") for one in ids)
    return Ring(len(numbers), members, tuple(1 << 30 for _ in ids))


def test_what_a_node_that_leaves_holds_is_had_also_where_another_one_comes_meanwhile(tmp_path: Path) -> None:
    async def run() -> None:
        store, threads = OpenStore(store_config(tmp_path, memory=32 << 20)), Threads()
        others, shared = Others(), Shared()
        me, leaver, third, fourth = (record(number, 1) for number in (1, 2, 3, 4))
        view: ClusterView = view_of(me.id, [me, leaver, third, fourth])
        before, without, after = ring(1, 2, 3), ring(1, 3), ring(1, 3, 4)
        parts = FillingParts(
            KnownMembership(view), cast(Any, shared), cast(Any, others), store.blocks, Plan(), Standing(), threads,
            lambda: [cast(Any, Listing())], lambda: False, lambda snapshot: None, lambda: 1 << 30, 1, 1 << 30,
        )  # fmt: skip
        filling = Filling(parts, before)
        task = asyncio.create_task(filling.run())
        try:
            others.is_hanging = True
            filling.follow(without)
            await until(lambda: others.asked, "it asks")
            filling.follow(after)
            others.go_on()
            await until(
                lambda: shared.told[-1].ring == ring_digest(after.ids) and not shared.told[-1].blocks, "it is done"
            )
            space = BlockSpace.of(cast(Any, Listing()))
            homes = Homes(space_hashes(space), 1)
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

    asyncio.run(run())
