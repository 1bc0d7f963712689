"""The model of the page cache, against what it is told."""

import numpy as np
import numpy.typing as npt
import pytest

from cachefs.planning.blocks.presence import ABSENT, IN_MEMORY, IN_SSD
from cachefs.planning.pagecache.model import RECHECK_SECONDS, PageCacheModel
from cachefs.planning.pagecache.push_lookahead import PushLimits, PushLookahead, PushReader
from cachefs.planning.pagecache.states import GOING, HELD, OUT, PART, PART_REFUSED, REFUSED, Blocks
from cachefs.planning.sequences.plan import Plan
from tests.simulated import space_of

COUNT = 100
SIZE = 1000


def blocks(*ids: int) -> Blocks:
    return Blocks("s", np.array(ids, np.int32))


@pytest.fixture
def plan() -> Plan:
    made = Plan()
    made.add_space(space_of([SIZE] * COUNT, "s"))
    made.set_epoch("c", "s", 0, np.arange(COUNT))
    made.set_epoch("c", "s", 1, np.arange(COUNT)[::-1].copy(), is_last=True)
    return made


@pytest.fixture
def pages(plan: Plan) -> PageCacheModel:
    made = PageCacheModel(plan, 10 * SIZE)
    made.follow_plan()
    return made


def hold(pages: PageCacheModel, *ids: int) -> None:
    pages.note_store_ordered(blocks(*ids))
    pages.note_stored(blocks(*ids), 0.0, failed=np.zeros(0, np.int32))


def test_what_is_ordered_counts_until_it_is_gone(pages: PageCacheModel) -> None:
    pages.note_store_ordered(blocks(1, 2, 3))
    assert pages.used == 3 * SIZE
    pages.note_stored(blocks(1, 2, 3), 0.0, failed=np.array([2], np.int32))
    assert (pages.used, pages.states["s"][1:4].tolist()) == (2 * SIZE, [HELD, REFUSED, HELD])
    pages.note_drop_ordered(blocks(3))
    assert (pages.used, pages.states["s"][3]) == (2 * SIZE, GOING)
    pages.note_dropped(blocks(3))
    pages.allow_retries()
    assert (pages.used, pages.states["s"][2:4].tolist()) == (SIZE, [OUT, OUT])


def test_reads_bring_pages_and_show_what_was_late(pages: PageCacheModel) -> None:
    pages.note_store_ordered(blocks(1, 2))
    pages.note_read(blocks(1, 5, 7), tripwires=np.array([7], np.int32), now=0.0)
    assert (pages.late_blocks, pages.used) == (2, 4 * SIZE)
    pages.note_stored(blocks(1, 2), 0.0, failed=np.array([1], np.int32))
    assert (pages.states["s"][1], pages.used) == (HELD, 4 * SIZE)


def test_what_is_read_last_goes_first_and_nobody_for_what_is_read_later(plan: Plan, pages: PageCacheModel) -> None:
    hold(pages, *range(10))
    plan.set_progress("c", 0, 5, 1000.0)
    pages.follow_plan()
    # In epoch 1, 0 is read last, then 1.
    [first] = pages.choose_victims(2 * SIZE, 0.0, 256, now=1.0)
    assert first.ids.tolist() == [0, 1]
    assert pages.choose_victims(20 * SIZE, 1.0, 256, now=2.0) == []
    [all_read] = pages.choose_victims(20 * SIZE, 0.05, 256, now=3.0)
    assert all_read.ids.tolist() == [0, 1, 2, 3, 4]


def test_only_what_nobody_has_read_is_wasted(plan: Plan, pages: PageCacheModel) -> None:
    hold(pages, 0, 1, 2, 3)
    plan.set_progress("c", 0, 1)
    pages.follow_plan()
    pages.note_read(blocks(1), tripwires=np.zeros(0, np.int32), now=0.0)
    pages.note_drop_ordered(blocks(0, 1, 2))
    assert pages.wasted_blocks == 1


def test_what_came_long_ago_is_looked_for_and_may_be_lost(pages: PageCacheModel) -> None:
    hold(pages, 1, 2, 3)
    ids = np.array([1, 2, 3, 4], np.int32)
    assert pages.stale_blocks("s", ids, RECHECK_SECONDS - 0.1).tolist() == []
    assert pages.stale_blocks("s", ids, RECHECK_SECONDS + 0.1).tolist() == [1, 2, 3]
    pages.note_checked(blocks(1, 2, 3), np.array([2], np.int32), RECHECK_SECONDS)
    assert pages.states["s"][1:4].tolist() == [HELD, REFUSED, HELD]
    assert pages.used == 2 * SIZE
    assert pages.stale_blocks("s", ids, 2 * RECHECK_SECONDS - 0.1).tolist() == []
    assert pages.stale_blocks("s", ids, 2 * RECHECK_SECONDS + 0.1).tolist() == [1, 3]


def test_a_snapshot_that_nobody_plans_is_forgotten_with_its_last_page(plan: Plan, pages: PageCacheModel) -> None:
    hold(pages, 1, 2)
    plan.remove_consumer("c")
    plan.remove_space("s")
    pages.follow_plan()
    assert pages.states["s"][[1, 2]].tolist() == [HELD, HELD]
    pages.note_drop_ordered(blocks(1, 2))
    pages.follow_plan()
    pages.note_dropped(blocks(1, 2))
    pages.follow_plan()
    assert (pages.states, pages.used) == ({}, 0)
    pages.note_checked(blocks(1), np.array([1], np.int32), 1.0)


def test_a_large_block_that_was_read_in_part_counts_and_is_still_pushed() -> None:
    plan = Plan()
    large = 4 << 20
    plan.add_space(space_of([large] * 4, "s", block_size=large))
    plan.set_epoch("c", "s", 0, np.array([0, 1, 2, 3, 1, 0], np.int32), is_last=True)
    pages = PageCacheModel(plan, 3 * large)
    pages.follow_plan()
    pages.note_read(blocks(0), tripwires=np.zeros(0, np.int32), now=0.0)
    assert (pages.states["s"][0], pages.used) == (PART, large)
    due = PushLookahead(plan).take_blocks(
        [PushReader("c", "s", 0, 0, 0)],
        pages.states,
        {"s": np.full(4, IN_SSD, np.uint8)},
        PushLimits(4, 16 * large, 16 * large),
    )
    assert due is not None
    assert due.ids.tolist() == [0, 1, 2, 3]
    pages.note_store_ordered(blocks(0, 1))
    assert pages.used == 2 * large
    pages.note_read(blocks(0), tripwires=np.zeros(0, np.int32), now=0.0)
    pages.note_stored(blocks(0, 1), 0.0, failed=np.zeros(0, np.int32))
    pages.note_read(blocks(1, 2), tripwires=np.zeros(0, np.int32), now=0.0)
    assert pages.states["s"].tolist() == [HELD, HELD, PART, OUT]
    assert [one.ids.tolist() for one in pages.choose_victims(large, 1e-4, 4, 0.0)] == [[2]]


def test_candidates_are_no_more_than_there_are_blocks(plan: Plan) -> None:
    pages = PageCacheModel(plan, COUNT * SIZE)
    pages.follow_plan()
    every = np.arange(COUNT, dtype=np.int32)
    for _ in range(200):
        pages.note_read(Blocks("s", every), tripwires=every[:0], now=0.0)
    assert pages._candidates.counts["s"] <= COUNT + 1024 + COUNT
    assert [one.ids.tolist() for one in pages.choose_victims(SIZE, -1.0, 1, 0.0)] == [[COUNT - 1]]


def test_what_is_about_to_go_or_gone_is_not_dropped_again(pages: PageCacheModel) -> None:
    hold(pages, 1, 2, 3)
    pages.note_drop_ordered(blocks(1))
    pages.note_checked(blocks(2), np.array([2], np.int32), 1.0)
    assert pages.filter_droppable(blocks(1, 2, 3)).ids.tolist() == [3]


def test_a_large_block_that_could_not_be_pushed_counts_for_what_its_readers_brought() -> None:
    plan = Plan()
    large = 4 << 20
    plan.add_space(space_of([large] * 4, "s", block_size=large))
    plan.set_epoch("c", "s", 0, np.arange(4, dtype=np.int32), is_last=True)
    pages = PageCacheModel(plan, 4 * large)
    pages.follow_plan()
    pages.note_store_ordered(blocks(0, 1, 2))
    pages.note_read(blocks(0), tripwires=np.zeros(0, np.int32), now=0.0)
    pages.note_stored(blocks(0, 1, 2), 0.0, failed=np.array([0, 1], np.int32))
    assert (pages.states["s"].tolist(), pages.used) == ([PART_REFUSED, REFUSED, HELD, OUT], 2 * large)
    assert pages.filter_droppable(blocks(0, 1, 2, 3)).ids.tolist() == [0, 2]
    pages.allow_retries()
    assert (pages.states["s"].tolist(), pages.used) == ([PART, OUT, HELD, OUT], 2 * large)


def test_what_was_forgotten_meanwhile_may_still_be_reported(plan: Plan, pages: PageCacheModel) -> None:
    pages.note_store_ordered(blocks(1))
    pages.note_read(blocks(1), tripwires=np.zeros(0, np.int32), now=0.0)
    pages.note_drop_ordered(blocks(1))
    pages.note_dropped(blocks(1))
    plan.remove_consumer("c")
    plan.remove_space("s")
    pages.follow_plan()
    pages.note_stored(blocks(1), 0.0, failed=np.zeros(0, np.int32))
    assert (pages.states, pages.used) == ({}, 0)


def on_node(*absent: int) -> dict[str, npt.NDArray[np.uint8]]:
    states = np.full(COUNT, IN_MEMORY, np.uint8)
    states[list(absent)] = ABSENT
    return {"s": states}


def test_the_only_copy_takes_nothing_of_the_budget_and_is_left_to_the_kernel(pages: PageCacheModel) -> None:
    hold(pages, 1, 2, 3)
    pages.follow_tiers(on_node(1, 2))
    assert (pages.used, pages.sole_copy_bytes) == (SIZE, 2 * SIZE)
    assert pages.filter_droppable(blocks(1, 2, 3)).ids.tolist() == [3]
    assert [one.ids.tolist() for one in pages.choose_victims(3 * SIZE, -1.0, 9, 0.0)] == [[3]]
    pages.follow_tiers(on_node(2))  # it was fetched
    assert (pages.used, pages.sole_copy_bytes) == (2 * SIZE, SIZE)
    assert [one.ids.tolist() for one in pages.choose_victims(3 * SIZE, -1.0, 9, 1.0)] == [[3, 1]]
    pages.note_checked(blocks(2), np.array([2], np.int32), 1.0)
    assert (pages.used, pages.states["s"][2]) == (2 * SIZE, REFUSED)
    pages.follow_tiers(on_node(2))
    assert (pages.used, pages.sole_copy_bytes) == (2 * SIZE, 0)


def test_the_only_copy_is_looked_for_while_there_is_time_to_fetch_it(pages: PageCacheModel) -> None:
    hold(pages, 1, 2)
    pages.follow_tiers(on_node(1))
    ids = np.array([1, 2], np.int32)

    def left(seconds: float) -> npt.NDArray[np.float64]:
        return np.full(2, seconds)

    # Last seen 20 s ago.
    assert pages.unsure_blocks("s", ids, left(6.0), 20.0).tolist() == []
    assert pages.unsure_blocks("s", ids, left(4.0), 20.0).tolist() == [1]
    assert pages.are_present("s", ids, left(4.0), 20.0).tolist() == [True, True]
    # Nobody has answered.
    assert pages.are_present("s", ids, left(2.0), 20.0).tolist() == [False, False]
    pages.note_checked(blocks(1), blocks().ids, 20.0)
    assert pages.are_present("s", ids, left(-1.0), 20.1).tolist() == [True, False]
    assert pages.unsure_blocks("s", ids, left(-1.0), 20.1).tolist() == []
    assert pages.unsure_blocks("s", ids, left(-1.0), 20.1 + RECHECK_SECONDS).tolist() == [1]


def test_what_was_read_while_it_was_checked_is_there(pages: PageCacheModel) -> None:
    hold(pages, 1)
    pages.follow_tiers(on_node(1))
    pages.note_read(blocks(1), tripwires=blocks().ids, now=20.2)
    pages.note_checked(blocks(1), blocks(1).ids, 20.0)
    assert pages.are_present("s", blocks(1).ids, np.zeros(1), 21.0).tolist() == [True]


def test_a_large_block_that_readers_have_brought_in_parts_is_found_to_be_whole() -> None:
    plan, large = Plan(), 4 << 20
    plan.add_space(space_of([large] * 2, "s", block_size=large))
    plan.set_epoch("c", "s", 0, np.array([0, 1], np.int32), is_last=True)
    pages = PageCacheModel(plan, 4 * large)
    pages.follow_plan()
    pages.note_read(blocks(0, 1), tripwires=blocks().ids, now=1.0)
    pages.follow_tiers({"s": np.full(2, ABSENT, np.uint8)})
    assert pages.unsure_blocks("s", blocks(0, 1).ids, np.full(2, 60.0), 2.0).tolist() == [0, 1]
    pages.note_checked(blocks(0, 1), np.array([1], np.int32), 2.0)
    assert pages.states["s"].tolist() == [HELD, PART]
    assert pages.are_present("s", blocks(0, 1).ids, np.full(2, 60.0), 2.1).tolist() == [True, False]
    assert pages.unsure_blocks("s", blocks(0, 1).ids, np.full(2, 60.0), 2.1).tolist() == []


def test_what_was_read_before_it_was_planned_is_known() -> None:
    plan, space = Plan(), space_of([SIZE] * COUNT, "s")
    pages = PageCacheModel(plan, 10 * SIZE)
    pages.follow_plan()
    keys = space.keys(np.arange(COUNT))
    pages.note_read_keys([keys[3], b"of another data".ljust(len(keys[0])), keys[5]], {}, now=7.0)
    plan.add_space(space)
    pages.follow_plan()
    assert np.flatnonzero(pages.states["s"]).tolist() == [3, 5]
    assert pages.late_blocks == 0
    assert pages.are_present("s", np.array([3, 4, 5], np.int32), np.zeros(3), 8.0).tolist() == [True, False, True]


def test_what_was_read_and_no_tier_will_keep_is_left_to_the_kernel(plan: Plan, pages: PageCacheModel) -> None:
    """Were its pages dropped while a tier still has it, the next epoch would have to fetch it again."""
    plan.set_progress("c", 0, 0, 1.0)
    hold(pages, *range(10))
    pages.set_horizon(193.5)
    assert pages.used == 10 * SIZE, "what was not read yet was pushed, and counts"
    plan.set_progress("c", 0, 4, 1.0)
    pages.follow_plan()
    assert pages.used == 6 * SIZE, "nothing of it is dropped before the next look, by when the rate may be another"
    pages.set_horizon(193.5)
    # In epoch 1 block 0 is read last: 195 s from now; block 2 in 193 s.
    assert pages.used == 8 * SIZE
    assert [one.ids.tolist() for one in pages.choose_victims(2 * SIZE, -1.0, 9, 1.0)] == [[2, 3]]
    pages.set_horizon(np.inf)
    pages.follow_tiers(on_node())
    assert pages.used == 10 * SIZE
    assert [one.ids.tolist() for one in pages.choose_victims(2 * SIZE, -1.0, 9, 2.0)] == [[0, 1]]


def test_a_page_cache_that_loses_only_copies_is_known(pages: PageCacheModel) -> None:
    hold(pages, *range(40))
    pages.follow_tiers(on_node(*range(40)))
    pages.note_checked(blocks(*range(36)), blocks(*range(9)).ids, 10.0)
    assert not pages.is_losing_pages, "9 of 36: a quarter"
    pages.note_read(blocks(0, 4), tripwires=blocks().ids, now=10.5)
    assert not pages.is_losing_pages, "their pages may just have come"
    pages.note_read(blocks(36, 37), tripwires=blocks().ids, now=20.0)
    assert pages.is_losing_pages, "11 of 38"
    # From now on they are looked for sooner.
    assert pages.unsure_blocks("s", blocks(36).ids, np.ones(1), 20.9).tolist() == []
    assert pages.unsure_blocks("s", blocks(36).ids, np.ones(1), 21.1).tolist() == [36]
    # What was not looked for yet is not fetched for that: 82 blocks of 800 were, though nearly all were still there.
    assert pages.are_present("s", blocks(36).ids, np.zeros(1), 21.1).all()


def test_what_a_new_order_reads_first_is_believed_to_be_there_until_it_was_looked_for(
    plan: Plan, pages: PageCacheModel
) -> None:
    hold(pages, 1)
    pages.follow_tiers(on_node(1))
    soon = np.zeros(1)
    pages.note_decision(100.0)
    plan.set_epoch("c", "s", 2, np.arange(COUNT))
    assert pages.are_present("s", blocks(1).ids, soon, 100.5).all(), "no orders were decided since"
    pages.note_decision(100.5)
    assert pages.are_present("s", blocks(1).ids, soon, 101.4).all()
    pages.note_decision(101.6)
    assert not pages.are_present("s", blocks(1).ids, soon, 101.6).any(), "nothing has answered"
    plan.set_epoch("c", "s", 3, np.arange(COUNT))
    assert not pages.are_present("s", blocks(1).ids, soon, 103.0).any(), "no pusher takes orders"


def test_nothing_is_late_where_nothing_is_pushed(plan: Plan) -> None:
    pages = PageCacheModel(plan, 0)
    pages.follow_plan()
    pages.note_read(blocks(1, 2), tripwires=blocks().ids, now=1.0)
    assert pages.late_blocks == 0


def test_a_block_that_was_read_twice_is_left_to_the_kernel_once(plan: Plan) -> None:
    plan.set_epoch("r", "s", 0, np.array([5, 5, 6, 5, 7, 8]))
    pages = PageCacheModel(plan, 100 * SIZE)
    pages.follow_plan()
    hold(pages, 5, 6)
    plan.set_progress("r", 0, 0, 1000.0)
    pages.follow_plan()
    pages.set_horizon(0.0001)
    plan.set_progress("r", 0, 4)
    pages.follow_plan()
    assert pages.used >= 0
