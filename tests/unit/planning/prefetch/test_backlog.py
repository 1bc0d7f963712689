"""When fetching must begin for an origin that is slower than its readers."""

import numpy as np
import pytest

from cachefs.planning.blocks.presence import ABSENT, IN_MEMORY
from cachefs.planning.prefetch.fetch_window import Backlog, find_backlog, find_missing_reads
from cachefs.planning.prefetch.job_demand import find_demands
from cachefs.planning.sequences.plan import Plan
from tests.simulated import space_of

SIZE = 100
RATE = 10.0


def plan_of(*orders: list[int], blocks: int = 100) -> Plan:
    plan = Plan()
    plan.add_space(space_of([SIZE] * blocks))
    for number, order in enumerate(orders):
        plan.set_epoch(f"job{number}", "space", 0, np.array(order), is_last=True)
        plan.set_progress(f"job{number}", 0, 0, RATE)
    return plan


def missing(*blocks: int) -> dict[str, "np.typing.NDArray[np.uint8]"]:
    state = np.full(100, IN_MEMORY, np.uint8)
    state[list(blocks)] = ABSENT
    return {"space": state}


def backlog(plan: Plan, states: dict[str, "np.typing.NDArray[np.uint8]"], bandwidth: float) -> Backlog | None:
    return find_backlog(list(find_missing_reads(plan, states, {})), bandwidth)


def test_a_long_gap_has_to_be_begun_before_its_readers_come_to_it() -> None:
    plan = plan_of(list(range(100)))
    # Fifty blocks, due in 5 to 9.9 s, of which the origin delivers 4.5 a second: they take 11 s.
    assert backlog(plan, missing(*range(50, 100)), 5 * SIZE) == Backlog(pytest.approx(9.9), "space", 99)


def test_a_gap_the_origin_fills_in_time_can_wait() -> None:
    plan = plan_of(list(range(100)))
    assert backlog(plan, missing(*range(80, 100)), 5 * SIZE) is None
    assert backlog(plan, missing(*range(50, 100)), np.inf) is None
    assert backlog(plan, missing(), 5 * SIZE) is None


def test_what_several_readers_miss_is_due_when_the_first_of_them_comes() -> None:
    alone = plan_of(list(range(100)))
    both = plan_of(list(range(100)), list(range(100))[::-1])
    gap = missing(*range(70, 90))
    assert backlog(alone, gap, 4 * SIZE) is None
    assert backlog(both, gap, 4 * SIZE) == Backlog(pytest.approx(2.9), "space", 70)


def test_readers_without_a_future_have_no_backlog() -> None:
    assert backlog(Plan(), {}, 1.0) is None


def test_what_was_read_early_is_no_backlog() -> None:
    plan = plan_of(list(range(100)))
    plan.note_early_reads("job0", np.arange(60, 90))
    assert backlog(plan, missing(*range(50, 100)), 5 * SIZE) is None


def test_a_job_gives_way_that_is_in_time_at_the_rate_it_gets_beside_the_others() -> None:
    """job0 misses its last 20 blocks, due in 8 s and later, job1 all of its own; together they want 12 blocks a second
    of an origin that delivers 10."""
    plan = Plan()
    for name, blocks in (("one", 100), ("two", 100)):
        plan.add_space(space_of([SIZE] * blocks, name=name, seed=blocks + len(name)))
    plan.set_epoch("job0/0", "one", 0, np.arange(100), is_last=True)
    plan.set_epoch("job1/0", "two", 0, np.arange(100), is_last=True)
    for name in ("job0/0", "job1/0"):
        plan.set_progress(name, 0, 0, RATE)
    states = {"one": missing(*range(80, 100))["space"], "two": missing(*range(100))["space"]}
    demands = find_demands(find_missing_reads(plan, states, {}), 10 * SIZE, {})
    assert {job: round(one.bytes_per_second / SIZE) for job, one in demands.items()} == {"job0": 2, "job1": 10}
    assert (demands["job0"].backlog, demands["job1"].backlog) == (None, Backlog(pytest.approx(9.9), "two", 99))
    # With a tenth of the other's weight it is not in time, and has to begin now.
    demands = find_demands(find_missing_reads(plan, states, {}), 10 * SIZE, {"job0": 0.1})
    assert demands["job0"].backlog == Backlog(pytest.approx(9.9), "one", 99)


def test_what_a_job_wants_is_what_it_will_read_and_is_not_here() -> None:
    plan = plan_of(list(range(100)))
    assert find_demands(find_missing_reads(plan, missing(*range(0, 100, 4)), {}), np.inf, {})[
        "job0"
    ].bytes_per_second == pytest.approx(RATE * SIZE / 4, rel=0.1)
    assert find_demands(find_missing_reads(plan, missing(), {}), np.inf, {}) == {}
    assert find_demands(find_missing_reads(plan, missing(0), {}), np.inf, {})["job0"].wants == {"space": SIZE}
