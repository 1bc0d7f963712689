"""How many bytes may be on their way that nobody waits for."""

import math

from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.prefetch.background import BUSY_BYTES, BUSY_SECONDS, QUIET_BYTES, QUIET_SECONDS, Background


def test_a_slow_origin_is_asked_for_a_little_at_once() -> None:
    background = Background(-math.inf)
    for second in range(100):
        background.measure(second * 1_000_000, float(second))
    assert background.most(is_waited_for=True) == BUSY_BYTES
    assert background.most(is_waited_for=False) == QUIET_BYTES


def test_a_quick_one_for_what_it_can_deliver_and_that_is_forgotten_slowly() -> None:
    background = Background(0.0)
    background.measure(1 << 30, 1.0)
    assert background.most(is_waited_for=True) == int(BUSY_SECONDS * (1 << 30))
    assert background.most(is_waited_for=False) == int(QUIET_SECONDS * (1 << 30))
    background.measure(1 << 30, 11.0)
    assert QUIET_BYTES < background.most(is_waited_for=False) < QUIET_SECONDS * (1 << 30)
    background.measure(1 << 30, 1000.0)
    assert background.most(is_waited_for=False) == QUIET_BYTES


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.floats(0, 1000)), max_size=50))
def test_something_is_always_asked_for(steps: list[tuple[int, float]]) -> None:
    background, delivered, now = Background(0.0), 0, 0.0
    for size, seconds in steps:
        delivered, now = delivered + size, now + seconds
        background.measure(delivered, now)
        assert BUSY_BYTES <= background.most(is_waited_for=True) <= background.most(is_waited_for=False)
