import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from cachefs.planning.blocks.presence import ABSENT, IN_MEMORY
from cachefs.planning.prefetch.lookahead import Lookahead, UpcomingBlock
from cachefs.planning.sequences.plan import Plan
from tests.simulated import space_of

BLOCKS = 3000
SPACE = space_of([100] * BLOCKS)
FAR, MANY = 1e9, 1 << 40


def plan_of(**orders: list[int]) -> Plan:
    plan = Plan()
    plan.add_space(SPACE)
    for name, order in orders.items():
        plan.set_epoch(name, "space", 0, np.array(order), is_last=True)
        plan.set_progress(name, 0, 0, 10.0)
    return plan


def states(**known: list[int]) -> dict[str, np.ndarray]:
    found = np.full(BLOCKS, ABSENT, np.uint8)
    found[known.get("here", [])] = IN_MEMORY
    return {"space": found}


def numbers(found: list[UpcomingBlock]) -> list[int]:
    return [one.number for one in found]


@given(st.integers(0, 1000), st.tuples(*[st.floats(1, 100)] * 3), st.integers(10, 180), st.just(600))
@example(0, (1.0, 1.0, 16.0), 616, BLOCKS)
def test_all_that_is_wanted_comes_once_and_soonest_first(
    seed: int, rates: tuple[float, ...], step: int, blocks: int
) -> None:
    """blocks: how many of them are read, or are here."""
    draw = np.random.default_rng(seed)
    orders = {name: draw.integers(0, blocks, blocks * 5 // 6) for name in "abc"}
    plan = plan_of(**{name: order.tolist() for name, order in orders.items()})
    here = draw.permutation(blocks)[: blocks // 3]
    for name, rate in zip("abc", rates, strict=True):
        plan.set_progress(name, 0, 0, rate)
    lookahead, known = Lookahead(plan, ABSENT), states(here=here.tolist())
    found: list[UpcomingBlock] = []
    while part := lookahead.take_blocks(known, FAR, step, MANY):
        found += part
    assert (np.diff([one.seconds for one in found]) > -1e-9).all()
    wanted = set(np.concatenate(list(orders.values())).tolist()) - set(here.tolist())
    assert {one.number for one in found} == wanted
    uses = plan.next_use(SPACE.keys(np.array(sorted(wanted))))
    first = {one.number: one.seconds for one in reversed(found)}
    assert np.allclose([first[number] for number in sorted(wanted)], uses)


def test_what_is_known_is_passed_over_and_costs_no_place() -> None:
    lookahead = Lookahead(plan_of(job=[5, 6, 7, 8, 9, 10]), ABSENT)
    assert numbers(lookahead.take_blocks(states(), FAR, 2, MANY, {("space", 5), ("space", 7)})) == [6, 8]
    assert numbers(lookahead.take_blocks(states(), FAR, 10, MANY)) == [9, 10]
    lookahead.rewind()
    assert numbers(lookahead.take_blocks(states(), FAR, 10, MANY, {("space", 9)})) == [5, 6, 7, 8, 10]


def test_limits_are_seconds_blocks_and_bytes() -> None:
    lookahead = Lookahead(plan_of(job=[5, 6, 7, 8, 9]), ABSENT)
    assert numbers(lookahead.take_blocks(states(), 0.15, 10, MANY)) == [5, 6]
    assert numbers(lookahead.take_blocks(states(), FAR, 1, MANY)) == [7]
    assert numbers(lookahead.take_blocks(states(), FAR, 10, 50)) == [8]
    assert numbers(lookahead.take_blocks(states(), FAR, 10, MANY)) == [9]
    assert lookahead.take_blocks(states(), FAR, 10, MANY) == []


def test_it_can_look_again() -> None:
    plan = plan_of(job=[5, 6, 7, 8])
    lookahead = Lookahead(plan, ABSENT)
    assert numbers(lookahead.take_blocks(states(here=[6]), FAR, 10, MANY)) == [5, 7, 8]
    plan.set_progress("job", 0, 1)
    lookahead.rewind()
    assert numbers(lookahead.take_blocks(states(here=[7]), FAR, 10, MANY)) == [6, 8]


def test_it_follows_a_consumer_that_jumps_and_what_it_publishes() -> None:
    plan = plan_of(job=[5, 6, 7, 8])
    lookahead = Lookahead(plan, ABSENT)
    assert len(lookahead.take_blocks(states(), FAR, 10, MANY)) == 4
    plan.set_progress("job", 0, 3)
    assert lookahead.take_blocks(states(), FAR, 10, MANY) == []
    plan.set_progress("job", 0, 2)
    assert numbers(lookahead.take_blocks(states(), FAR, 10, MANY)) == [7, 8]
    plan.set_epoch("job", "space", 1, np.array([8, 5]))
    assert numbers(lookahead.take_blocks(states(), FAR, 10, MANY)) == [8, 5]
    plan.set_progress("job", 1, 0)
    assert lookahead.take_blocks(states(), FAR, 10, MANY) == []
    plan.suspend("job", True)
    lookahead.rewind()
    assert lookahead.take_blocks(states(), FAR, 10, MANY) == []


def test_snapshots_nobody_watches_are_left_out() -> None:
    assert Lookahead(plan_of(job=[5]), ABSENT).take_blocks({}, FAR, 10, MANY) == []


def test_reads_that_a_worker_has_done_early_take_no_place() -> None:
    plan = plan_of(job=[5, 6, 7, 8, 9, 6])
    lookahead = Lookahead(plan, ABSENT)
    # Blocks 6 and 8 were read, and are evicted again; block 6 is read a second time.
    plan.note_early_reads("job", np.array([1, 3]))
    assert numbers(lookahead.take_blocks(states(here=[7]), FAR, 2, MANY)) == [5, 9]
    assert numbers(lookahead.take_blocks(states(here=[7]), FAR, 2, MANY)) == [6]
    plan.set_epoch("job", "space", 1, np.array([8, 5]))
    assert numbers(lookahead.take_blocks(states(here=[7]), FAR, 2, MANY)) == [8, 5]
