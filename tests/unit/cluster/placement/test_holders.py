"""Who holds what while members come and go, in the middle of an epoch."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from cachefs.planning.cluster.copies import FirstReads
from cachefs.planning.cluster.rendezvous import RingMember
from cachefs_cluster.placement.holders import Holders, PlacementRing
from cachefs_cluster.placement.timeliness import ANNOUNCED_UNTIL
from cachefs_daemon.runtime.threads import Threads
from tests import virtual_time
from tests.simulated import space_of

FILES, SIZE = 600, 1000
NAMES = ("a", "b", "c", "d")
SPACE = space_of([SIZE] * FILES, "space")


def ring(*names: str) -> PlacementRing:
    members = tuple(RingMember(name, ord(name) * 0x9E3779B97F4A7C15 % (1 << 64), 1.0) for name in names)
    return PlacementRing(1, members, (FILES * 8192,) * len(names))


async def reads_of(epoch: int, ids: tuple[str, ...]) -> FirstReads:
    """Each reads a part of all blocks; nobody reads that of a node that is not there."""
    parts = np.random.default_rng(epoch).permutation(FILES).astype(np.int32).reshape(len(NAMES), -1)
    return FirstReads.of(
        FILES, [(ids.index(name), part) for name, part in zip(NAMES, parts, strict=True) if name in ids]
    )


def with_holders(test: Callable[[Holders, Holders], Awaitable[None]]) -> None:
    async def run() -> None:
        threads = Threads()
        try:
            one, other = Holders(SPACE, 1, threads), Holders(SPACE, 1, threads)
            await one.follow_ring(ring(*NAMES))
            await one.start_coordination("job", 0, 0, None)
            await one.decide_epochs(0, reads_of)
            await test(one, other)
        finally:
            threads.close()

    virtual_time.run(asyncio.wait_for(run(), 60))


def test_what_was_read_stays_where_it_went_and_what_a_lost_node_was_to_take_stays_where_it_is() -> None:
    async def test(holders: Holders, _: Holders) -> None:
        start, following = holders.by_epoch[0], holders.by_epoch[1]
        assert (start != following).any()
        await holders.follow_ring(ring("a", "b", "c"), 0, 0.5)
        held, taken = start != 3, following != 3
        assert (holders.by_epoch[0][held] == start[held]).all()
        assert (holders.by_epoch[1][taken] == following[taken]).all()
        assert (holders.by_epoch[1][~taken] == holders.by_epoch[0][~taken]).all(), "nobody takes it"
        assert (holders.by_epoch[0] < 3).all()
        assert await holders.decide_epochs(0, reads_of)
        assert holders.reads[0].positions is not None, "of the epoch that is under way"
        former = holders.former
        assert former is not None
        assert former.ids == NAMES
        assert set(np.flatnonzero(former.holders != start)) <= set(np.flatnonzero(start != following))

    with_holders(test)


def test_a_node_that_comes_back_goes_on_as_the_others_have_it_and_asks_those_who_held_it() -> None:
    async def test(others: Holders, back: Holders) -> None:
        await others.follow_ring(ring("a", "b", "c"), 0, 0.5)
        await others.decide_epochs(0, reads_of)
        known = others.state_at(0)
        assert known is not None
        assert known.next_holders is not None
        await others.follow_ring(ring(*NAMES), 0, 0.7)
        await back.follow_ring(ring(*NAMES))
        await back.start_coordination("job", 0, 0, known)
        for epoch in (0, 1):
            assert (back.by_epoch[epoch] == others.by_epoch[epoch]).all()
        at_home = back.homes == 3
        assert (back.by_epoch[0][at_home] == 3).all()
        former = back.former
        assert former is not None
        assert former.ids == ("a", "b", "c")
        assert former.other_holders == (known.next_holders,)
        told = others.state_at(0)
        assert told is not None
        late = Holders(SPACE, 1, back._threads)
        await late.follow_ring(ring(*NAMES))
        await late.start_coordination("job", 0, 0, told)  # by when they count it again
        assert late.former is others.former
        assert late.former is not None
        assert late.former.ids == ("a", "b", "c")
        anew = Holders(SPACE, 1, back._threads)
        await anew.follow_ring(ring(*NAMES))
        await anew.start_coordination("other", 5, 5, known)
        assert list(anew.by_epoch) == [5], "another job has decided nothing beyond what is there"

    with_holders(test)


def test_members_that_change_before_readers_are_back_where_they_were_leave_holders_decided() -> None:
    async def test(others: Holders, back: Holders) -> None:
        for epoch in (1, 2, 3):
            await others.decide_epochs(epoch, reads_of)
        known = others.state_at(3)
        assert known is not None
        await back.follow_ring(ring(*NAMES))
        await back.start_coordination("job", 0, 3, known)  # its own reader has not said yet where it is
        assert list(back.by_epoch) == [3, 4]
        there = Holders(SPACE, 1, back._threads)
        await there.follow_ring(ring(*NAMES))
        await there.start_coordination("job", 3, 3, known)
        for one, current in ((there, 3), (back, 0)):
            await one.follow_ring(ring("a", "b", "c"), current, 0.0)
            await one.decide_epochs(3, reads_of)
        for epoch in (3, 4):
            assert (back.by_epoch[epoch] == there.by_epoch[epoch]).all()

    with_holders(test)


def test_homes_are_those_of_one_ring_while_another_one_is_followed() -> None:
    """They are numbers: in another ring, of somebody else, or of nobody."""

    async def test(holders: Holders, _: Holders) -> None:
        before, ids, looks = holders.homes, holders.ring.ids, 0

        class Watched(Threads):
            async def planning(self, work: Callable[..., Any], *given: Any) -> Any:
                nonlocal looks
                found = await threads.planning(work, *given)
                assert holders.ring.ids == ids
                assert holders.homes is before
                looks += 1
                return found

        threads, holders._threads = holders._threads, Watched()
        await holders.follow_ring(ring("a", "b", "c", "d", "e"), 0, 0.5)
        assert looks > 1
        assert (holders.homes == 4).any()
        holders._threads.close()
        holders._threads = threads

    with_holders(test)


def test_where_orders_come_one_by_one_an_epoch_and_the_next_say_all() -> None:
    async def test(holders: Holders, other: Holders) -> None:
        known = range(3)

        async def some(epoch: int, ids: tuple[str, ...]) -> FirstReads | None:
            return await reads_of(epoch, ids) if epoch in known else None

        async def all_of(epoch: int, ids: tuple[str, ...]) -> FirstReads | None:
            return await reads_of(epoch, ids)

        anew = Holders(SPACE, 1, holders._threads)
        for one in (other, anew):
            await one.follow_ring(ring(*NAMES))
            await one.start_coordination("job", 0, 0, None)
        await other.decide_epochs(0, some, lambda epoch: True)
        await anew.decide_epochs(0, all_of, lambda epoch: True)
        assert list(other.by_epoch) == [0, 1, 2]
        assert all((other.by_epoch[epoch] == anew.by_epoch[epoch]).all() for epoch in other.by_epoch), (
            "whatever one knows besides"
        )
        assert other.settled == (0, 1)
        moved = other.by_epoch[0] != other.by_epoch[1]
        assert moved.any()
        reads = other.reads[0]
        assert reads.positions is not None
        assert reads.positions[moved].min() >= ANNOUNCED_UNTIL, "what is read before nodes know stays where it is"

    with_holders(test)


def test_an_epoch_whose_orders_are_not_known_in_time_moves_nothing_and_the_next_one_does() -> None:
    async def test(_: Holders, holders: Holders) -> None:
        async def late(epoch: int, ids: tuple[str, ...]) -> FirstReads | None:
            return await reads_of(epoch, ids) if epoch else None

        await holders.follow_ring(ring(*NAMES))
        await holders.start_coordination("job", 0, 0, None)
        assert not await holders.decide_epochs(0, late, lambda epoch: None)
        assert list(holders.by_epoch) == [0], "it may still come"
        assert await holders.decide_epochs(0, late, lambda epoch: epoch > 0)
        assert holders.by_epoch[1] is holders.by_epoch[0]
        assert (holders.by_epoch[2] != holders.by_epoch[1]).any()
        assert holders.settled == (1, 1)

    with_holders(test)


def test_what_no_job_coordinates_any_more_is_looked_for_where_it_was() -> None:
    async def test(holders: Holders, _: Holders) -> None:
        start, following, reads = holders.by_epoch[0], holders.by_epoch[1], holders.reads[0]
        assert reads.positions is not None
        holders.return_home(0, 0.5)
        former = holders.former
        assert former is not None
        assert (former.holders == np.where(reads.positions < 0.5, following, start)).all()
        assert not holders.by_epoch

    with_holders(test)
