"""When fetching must begin for an origin that is slower than its readers."""

import numpy as np
import pytest

from cachefs.planning.blocks.presence import ABSENT, IN_MEMORY
from cachefs.planning.prefetch.fetch_window import Backlog, find_backlog
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


def test_a_long_gap_has_to_be_begun_before_its_readers_come_to_it() -> None:
    plan = plan_of(list(range(100)))
    # Fifty blocks, due in 5 to 9.9 s, of which the origin delivers 4.5 a second: they take 11 s.
    assert find_backlog(plan, missing(*range(50, 100)), 5 * SIZE) == Backlog(pytest.approx(9.9), "space", 99)


def test_a_gap_the_origin_fills_in_time_can_wait() -> None:
    plan = plan_of(list(range(100)))
    assert find_backlog(plan, missing(*range(80, 100)), 5 * SIZE) is None
    assert find_backlog(plan, missing(*range(50, 100)), np.inf) is None
    assert find_backlog(plan, missing(), 5 * SIZE) is None


def test_what_several_readers_miss_is_due_when_the_first_of_them_comes() -> None:
    alone = plan_of(list(range(100)))
    both = plan_of(list(range(100)), list(range(100))[::-1])
    gap = missing(*range(70, 90))
    assert find_backlog(alone, gap, 4 * SIZE) is None
    assert find_backlog(both, gap, 4 * SIZE) == Backlog(pytest.approx(2.9), "space", 70)


def test_readers_without_a_future_have_no_backlog() -> None:
    assert find_backlog(Plan(), {}, 1.0) is None


def test_what_was_read_early_is_no_backlog() -> None:
    plan = plan_of(list(range(100)))
    plan.note_early_reads("job0", np.arange(60, 90))
    assert find_backlog(plan, missing(*range(50, 100)), 5 * SIZE) is None
