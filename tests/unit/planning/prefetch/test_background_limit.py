"""How many bytes may be on their way that nobody waits for."""

import math

from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.prefetch.readahead_budget import (
    BUSY_BYTES,
    BUSY_SECONDS,
    IDLE_BYTES,
    IDLE_SECONDS,
    BackgroundLimit,
)


def test_a_slow_origin_is_asked_for_a_little_at_once() -> None:
    background = BackgroundLimit(-math.inf)
    for second in range(100):
        background.update_rate(second * 1_000_000, float(second))
    assert background.max_in_flight(has_waiting_reader=True) == BUSY_BYTES
    assert background.max_in_flight(has_waiting_reader=False) == IDLE_BYTES


def test_a_quick_one_for_what_it_can_deliver_and_that_is_forgotten_slowly() -> None:
    background = BackgroundLimit(0.0)
    background.update_rate(1 << 30, 1.0)
    assert background.max_in_flight(has_waiting_reader=True) == int(BUSY_SECONDS * (1 << 30))
    assert background.max_in_flight(has_waiting_reader=False) == int(IDLE_SECONDS * (1 << 30))
    background.update_rate(1 << 30, 11.0)
    assert IDLE_BYTES < background.max_in_flight(has_waiting_reader=False) < IDLE_SECONDS * (1 << 30)
    background.update_rate(1 << 30, 1000.0)
    assert background.max_in_flight(has_waiting_reader=False) == IDLE_BYTES


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.floats(0, 1000)), max_size=50))
def test_something_is_always_asked_for(steps: list[tuple[int, float]]) -> None:
    background, delivered, now = BackgroundLimit(0.0), 0, 0.0
    for size, seconds in steps:
        delivered, now = delivered + size, now + seconds
        background.update_rate(delivered, now)
        assert (
            BUSY_BYTES
            <= background.max_in_flight(has_waiting_reader=True)
            <= background.max_in_flight(has_waiting_reader=False)
        )
