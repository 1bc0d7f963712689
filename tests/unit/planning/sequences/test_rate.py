"""How fast somebody reads, with and without the time spent waiting."""

import pytest

from cachefs.planning.sequences.rate import RATE_HALF_LIFE, RATE_SECONDS, ReadRate


def test_it_is_unknown_until_some_time_has_passed() -> None:
    rate = ReadRate()
    rate.count(100)
    rate.measure(7.0, 0.0, 1)
    rate.count(100)
    rate.measure(7.1, 0.0, 1)
    assert (rate.value, rate.demand) == (0.0, 0.0)
    rate.measure(7.5, 0.0, 1)
    assert rate.value == pytest.approx(200)


def test_it_is_that_of_the_last_seconds() -> None:
    rate = ReadRate()
    for tenth in range(100):
        rate.count(1 if tenth < 50 else 100)
        rate.measure(tenth / 10, 0.0, 1)
    assert RATE_SECONDS < 5
    assert rate.value == pytest.approx(1000)


def test_waiting_is_left_out_of_the_demand_and_shared_by_parallel_readers() -> None:
    alone, four = ReadRate(), ReadRate()
    for second in range(10):
        for rate, readers in ((alone, 1), (four, 4)):
            rate.count(100)
            rate.measure(float(second), 0.5, readers)
    assert alone.value == four.value == pytest.approx(100)
    assert alone.demand == pytest.approx(200, rel=0.2)
    assert four.demand == pytest.approx(114, rel=0.2)


def test_a_demand_that_was_reached_fades() -> None:
    rate = ReadRate()
    rate.measure(0.0, 0.0, 0)
    rate.count(1000)
    rate.measure(1.0, 0.0, 0)
    reached = rate.demand
    seconds = 1.0
    while seconds < 1 + RATE_HALF_LIFE:
        seconds += 1
        rate.count(1)
        rate.measure(seconds, 0.0, 0)
    assert rate.value < 2
    assert rate.demand == pytest.approx(reached / 2, rel=0.1)
