"""Who holds what while members come and go, in the middle of an epoch."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from cachefs.planning.cluster.epoch_reads import FirstReads
from cachefs.planning.cluster.rendezvous import RingMember
from cachefs.planning.cluster.schedule import EpochSchedule, GroupTiming, ScheduledEpoch
from cachefs_cluster.placement.holders import Holders, PlacementRing
from cachefs_daemon.runtime.threads import Threads
from tests import virtual_time
from tests.simulated import space_of

FILES, SIZE = 600, 1000
NAMES = ("a", "b", "c", "d")
SPACE = space_of([SIZE] * FILES, "space")


def ring(*names: str) -> PlacementRing:
    members = tuple(RingMember(name, ord(name) * 0x9E3779B97F4A7C15 % (1 << 64), 1.0) for name in names)
    return PlacementRing(1, members, (FILES * 8192,) * len(names))


def schedule_of(number: int) -> EpochSchedule:
    """That of a group that reads alone."""
    return EpochSchedule(number, 0.0, (GroupTiming("g" * 16, "", number, 0.0, 1.0, 1.0, 99),))


async def reads_of(
    schedule: EpochSchedule, epochs: Sequence[ScheduledEpoch], ids: tuple[str, ...]
) -> Sequence[FirstReads]:
    """Each node reads a part of all blocks; that of a node that is not there is not read."""

    def epoch_of(number: int) -> FirstReads:
        parts = np.random.default_rng(number).permutation(FILES).astype(np.int32).reshape(len(NAMES), -1)
        orders = [(ids.index(name), part) for name, part in zip(NAMES, parts, strict=True) if name in ids]
        return FirstReads.of(FILES, orders)

    return [epoch_of(one.epoch) for one in epochs]


def with_holders(test: Callable[[Holders, Holders], Awaitable[None]]) -> None:
    async def run() -> None:
        threads = Threads()
        try:
            one, other = Holders(SPACE, 1, threads), Holders(SPACE, 1, threads)
            await one.follow_ring(ring(*NAMES))
            await one.start_coordination("job", 0, 0, None)
            await one.decide_epochs(0, schedule_of, reads_of)
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
        assert await holders.decide_epochs(0, schedule_of, reads_of)
        decision = holders.decisions[0]
        assert decision is not None
        moved = holders.by_epoch[0] != holders.by_epoch[1]
        assert (decision.moves.times[moved] < 1).all(), "of the epoch that is under way"
        former = holders.former
        assert former is not None
        assert former.ids == NAMES
        assert set(np.flatnonzero(former.holders != start)) <= set(np.flatnonzero(start != following))

    with_holders(test)


def test_a_node_that_comes_back_goes_on_as_the_others_have_it_and_asks_those_who_held_it() -> None:
    async def test(others: Holders, back: Holders) -> None:
        await others.follow_ring(ring("a", "b", "c"), 0, 0.5)
        await others.decide_epochs(0, schedule_of, reads_of)
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
            await others.decide_epochs(epoch, schedule_of, reads_of)
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
            await one.decide_epochs(3, schedule_of, reads_of)
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


def test_an_epoch_without_a_schedule_moves_nothing_once_it_is_over() -> None:
    async def test(_: Holders, holders: Holders) -> None:
        await holders.follow_ring(ring(*NAMES))
        await holders.start_coordination("job", 0, 0, None)
        assert not await holders.decide_epochs(0, lambda number: None, reads_of)
        assert list(holders.by_epoch) == [0], "a schedule may still come"
        assert await holders.decide_epochs(1, lambda number: schedule_of(number) if number else None, reads_of)
        assert holders.by_epoch[1] is holders.by_epoch[0]
        assert (holders.by_epoch[2] != holders.by_epoch[1]).any()

    with_holders(test)


def test_moves_wait_for_orders_that_are_not_known_yet() -> None:
    async def test(_: Holders, holders: Holders) -> None:
        async def unknown(*_: object) -> None:
            return None

        await holders.follow_ring(ring(*NAMES))
        await holders.start_coordination("job", 0, 0, None)
        assert not await holders.decide_epochs(0, schedule_of, unknown)
        assert await holders.decide_epochs(0, schedule_of, reads_of)

    with_holders(test)


def test_another_schedule_leaves_what_was_read_before_as_it_is() -> None:
    async def test(holders: Holders, _: Holders) -> None:
        start, following = holders.by_epoch[0], holders.by_epoch[1]
        before = holders.decisions[0]
        assert before is not None

        def later(number: int) -> EpochSchedule:
            """A second group comes, in the midst of epoch 0."""
            timing = GroupTiming("h" * 16, "", 50, 0.1 - number, 1.0, 1.0, 99)
            return EpochSchedule(number, 0.0 if number else 0.4, (*schedule_of(number).groups, timing))

        assert await holders.decide_epochs(0, later, reads_of)
        after = holders.decisions[0]
        assert after is not None
        early = before.moves.times < 0.4
        assert (holders.by_epoch[1][early] == following[early]).all()
        assert (holders.by_epoch[1] != following).any()
        assert (after.moves.times[~early] >= 0.4).all()
        assert {one.group for one in after.epochs} == {"g" * 16, "h" * 16}
        assert list(holders.by_epoch) == [0, 1, 2]
        assert holders.by_epoch[0] is start
        taken = np.flatnonzero(after.takes_over("h" * 16, 50, np.arange(FILES, dtype=np.int32)))
        assert len(taken)
        assert (holders.by_epoch[1][taken] != start[taken]).all()
        assert not after.takes_over("h" * 16, 7, np.arange(FILES, dtype=np.int32)).any()
        assert not await holders.decide_epochs(0, later, reads_of), "it is the same schedule"

    with_holders(test)


def test_copies_stay_where_they_are_when_no_group_leads_any_more() -> None:
    async def test(holders: Holders, _: Holders) -> None:
        start, following, decision = holders.by_epoch[0], holders.by_epoch[1], holders.decisions[0]
        assert decision is not None
        holders.stop_coordination(0, 0.5)
        expected = np.where(decision.moves.times < 0.5, following, start)
        assert (holders.by_epoch[0] == expected).all()
        assert list(holders.by_epoch) == [0]
        former = holders.former
        assert former is not None
        assert (former.holders == expected).all()
        assert any((one == start).all() for one in former.other_holders)
        assert any((one == following).all() for one in former.other_holders)
        await holders.start_coordination("other", 3, 3, None)
        assert (holders.by_epoch[3] == expected).all(), "the next job goes on from there"
        known = holders.state_at(3)
        assert known is not None
        assert known.count == 0, "nothing was decided beyond epoch 0"

    with_holders(test)
