"""Which requests are late, and whether all have become slower."""

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.requests.request_times import MIN_REQUESTS, RecentTimes, TimesBySize


def test_one_slow_request_in_a_hundred_does_not_decide_what_is_late() -> None:
    rng, times = random.Random(1), RecentTimes(1000)
    for number in range(2000):
        usual = rng.uniform(0.02, 0.03)
        times.add_request(1000, usual * 50 if number % 100 == 0 else usual, number / 100)
    assert 0.029 < times.late_after < 0.05


def test_nothing_is_late_before_enough_is_known() -> None:
    times = RecentTimes(1000)
    for _ in range(MIN_REQUESTS - 10):
        times.add_request(1000, 0.01, 0.0)
    assert times.late_after == math.inf


def test_slower_is_told_once_all_are_and_not_for_a_single_one() -> None:
    times = RecentTimes(1000)
    assert not any(times.add_request(1000, 0.05 if number % 50 else 5.0, number / 100) for number in range(1000))
    assert any(times.add_request(1000, 0.4, 10 + number / 100) for number in range(200))


def test_what_lasts_becomes_usual() -> None:
    times = RecentTimes(1000)
    for number in range(1000):
        times.add_request(1000, 0.05, number / 100)
    told = [times.add_request(1000, 0.4, 10 + number) for number in range(400)]
    assert any(told[:60])
    assert not any(told[200:])


@given(st.lists(st.floats(0, 1e6), min_size=200, max_size=300), st.integers(0, 2**40))
def test_any_times_are_taken(seconds: list[float], size: int) -> None:
    times = TimesBySize()
    for number, one in enumerate(seconds):
        times.times_of(size).add_request(size, one, float(number))
    assert times.times_of(size).late_after > 0
    assert list(times.typical_times())
    assert times.times_of(size) is times.times_of(size)
