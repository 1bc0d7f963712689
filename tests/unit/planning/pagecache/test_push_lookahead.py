"""What is pushed next, and which tripwires are kept out of the page cache."""

import numpy as np
import pytest

from cachefs.planning.blocks.presence import ABSENT, IN_SSD
from cachefs.planning.pagecache.push_lookahead import PushLimits, PushLookahead, PushReader
from cachefs.planning.pagecache.states import HELD, OUT
from cachefs.planning.sequences.plan import Plan
from tests.simulated import space_of

COUNT = 100
SIZE = 1000


@pytest.fixture
def plan() -> Plan:
    made = Plan()
    made.add_space(space_of([SIZE] * COUNT, "s"))
    made.set_epoch("c", "s", 0, np.arange(COUNT))
    made.set_epoch("c", "s", 1, np.arange(COUNT)[::-1].copy(), is_last=True)
    return made


def test_the_soonest_that_are_on_the_node_are_pushed_and_tripwires_are_not(plan: Plan) -> None:
    lookahead = PushLookahead(plan)
    residents = {"s": np.full(COUNT, IN_SSD, np.uint8)}
    residents["s"][3] = ABSENT
    pages = {"s": np.full(COUNT, OUT, np.uint8)}
    pages["s"][1] = HELD
    due = lookahead.take_blocks(
        [PushReader("c", "s", 0, 0, 8)], pages, residents, PushLimits(6, 100 * SIZE, 100 * SIZE)
    )
    assert due is not None
    assert due.ids.tolist() == [0, 2, 4, 5, 6, 8]
    plan.set_progress("c", 0, 10)
    due = lookahead.take_blocks([PushReader("c", "s", 5, 0, 0)], pages, residents, PushLimits(4, 2 * SIZE, 2 * SIZE))
    assert due is not None
    assert due.ids.tolist() == [15, 16]
    due = lookahead.take_blocks([PushReader("c", "s", 5, 0, 0)], pages, residents, PushLimits(4, SIZE - 1, SIZE))
    assert due is not None
    assert due.ids.tolist() == [15], "one alone may be larger"
    assert (
        lookahead.take_blocks([PushReader("c", "s", 5, 0, 0)], pages, residents, PushLimits(4, SIZE - 1, SIZE - 1))
        is None
    )


def test_tripwires_lie_ahead_also_in_the_next_epoch(plan: Plan) -> None:
    lookahead = PushLookahead(plan)
    assert lookahead.next_tripwires([PushReader("c", "s", 0, 0, 8)])["s"].tolist() == list(range(7, COUNT, 8))
    plan.set_progress("c", 1, 0)
    assert lookahead.next_tripwires([PushReader("c", "s", 0, 0, 8)])["s"].tolist() == list(range(4, COUNT, 8))
    assert lookahead.next_tripwires([PushReader("c", "s", 0, 0, 0)]) == {}


def test_of_who_is_silent_no_more_tripwires_are_looked_for_than_a_call_has_time_for() -> None:
    count = 200_000
    plan = Plan()
    plan.add_space(space_of([SIZE] * count, "s"))
    order = np.random.default_rng(1).permutation(count)
    plan.set_epoch("c", "s", 0, order)
    plan.set_epoch("c", "s", 1, order[::-1].copy())
    plan.set_progress("c", 0, 100)
    [wires] = PushLookahead(plan).next_tripwires([PushReader("c", "s", 5, 1 << 30, 8)]).values()
    nearest = np.arange(111, count, 8)[: len(wires)]
    assert np.array_equal(wires, np.sort(order[nearest]))
    assert 1 << 12 <= len(wires) < 1 << 13
    # At a higher rate they are further apart: all there are.
    [wires] = PushLookahead(plan).next_tripwires([PushReader("c", "s", 5, 1 << 30, 128)]).values()
    everywhere = np.union1d(order[127::128], order[::-1][127::128])
    assert np.array_equal(wires, everywhere)
