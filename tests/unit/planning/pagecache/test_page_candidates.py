"""Which pages are evicted."""

import numpy as np
import pytest

from cachefs.planning.pagecache.page_candidates import EXAMINE_SECONDS, PageCandidates
from cachefs.planning.pagecache.states import GOING, HELD, OUT, Blocks
from cachefs.planning.sequences.plan import Plan
from tests.simulated import space_of

COUNT = 10
SIZE = 100

NOT_SOLE = np.zeros(COUNT, np.bool_)


@pytest.fixture
def plan() -> Plan:
    """Of two snapshots; the blocks of `t` are read later than those of `s`."""
    made = Plan()
    for snapshot in "st":
        made.add_space(space_of([SIZE] * COUNT, snapshot, seed=ord(snapshot)))
    made.set_epoch("c", "s", 0, np.arange(COUNT), is_last=True)
    made.set_epoch("d", "t", 0, np.arange(COUNT), is_last=True)
    made.set_progress("c", 0, 0, 100.0)
    made.set_progress("d", 0, 0, 1.0)
    return made


def test_what_is_read_last_of_all_snapshots_is_evicted_first(plan: Plan) -> None:
    candidates = PageCandidates(plan)
    states = {snapshot: np.full(COUNT, HELD, np.uint8) for snapshot in "st"}
    for snapshot in "st":
        candidates.add_snapshot(plan.spaces[snapshot], states[snapshot], NOT_SOLE)
    states["t"][9], states["t"][8] = GOING, OUT
    found = candidates.choose_victims(9 * SIZE, 0.005, COUNT, now=1.0)
    # In all seven of `t`, whose first block is read now, and two of `s`.
    assert {one.snapshot: one.ids.tolist() for one in found} == {"s": [9, 8], "t": [7, 6, 5, 4, 3, 2, 1]}
    candidates.remove_snapshot("t")
    [only] = candidates.choose_victims(2 * SIZE, 0.005, COUNT, now=2.0)
    assert (only.snapshot, only.ids.tolist()) == ("s", [9, 8])


def test_a_look_at_all_blocks_that_brought_nothing_is_not_repeated_at_once(plan: Plan) -> None:
    candidates = PageCandidates(plan)
    states = np.full(COUNT, OUT, np.uint8)
    candidates.add_snapshot(plan.spaces["s"], states, NOT_SOLE)
    assert candidates.choose_victims(SIZE, 0.0, 1, now=1.0) == []
    states[3] = HELD
    assert candidates.choose_victims(SIZE, 0.0, 1, now=1.0 + EXAMINE_SECONDS / 2) == []
    [found] = candidates.choose_victims(SIZE, 0.0, 1, now=1.0 + EXAMINE_SECONDS)
    assert found.ids.tolist() == [3]


def test_what_was_considered_is_found_without_a_look_at_all_blocks(plan: Plan) -> None:
    candidates = PageCandidates(plan)
    states = np.full(COUNT, OUT, np.uint8)
    candidates.add_snapshot(plan.spaces["s"], states, NOT_SOLE)
    assert candidates.choose_victims(SIZE, 0.0, 1, now=1.0) == []
    states[3] = HELD
    candidates.consider(Blocks("s", np.array([3, 4, 3], np.int32)))
    assert candidates.counts == {"s": 3}
    [found] = candidates.choose_victims(SIZE, 0.0, 1, now=1.0)
    assert (found.ids.tolist(), candidates.counts) == ([3], {"s": 1})


def test_pages_that_are_the_only_copy_are_never_dropped(plan: Plan) -> None:
    candidates, sole = PageCandidates(plan), np.zeros(COUNT, np.bool_)
    candidates.add_snapshot(plan.spaces["s"], np.full(COUNT, HELD, np.uint8), sole)
    sole[[9, 7]] = True
    [found] = candidates.choose_victims(3 * SIZE, 0.0, COUNT, now=1.0)
    assert found.ids.tolist() == [8, 6, 5]
    candidates.consider(Blocks("s", np.array([9], np.int32)))
    [found] = candidates.choose_victims(SIZE, 0.0, COUNT, now=1.1)
    assert found.ids.tolist() == [8]
