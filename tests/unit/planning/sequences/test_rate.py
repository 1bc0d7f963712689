"""How fast somebody reads, with and without the time spent waiting."""

import pytest

from cachefs.planning.sequences.rate import (
    GROWTH_SECONDS,
    MIN_BUSY_SHARE,
    PACE_HALF_LIFE_SECONDS,
    RATE_SECONDS,
    ReadRate,
)


def test_it_is_unknown_until_some_time_has_passed() -> None:
    rate = ReadRate()
    rate.count_reads(100)
    rate.measure(7.0, 0.0, 1)
    rate.count_reads(100)
    rate.measure(7.1, 0.0, 1)
    assert (rate.value, rate.demand) == (0.0, 0.0)
    rate.measure(7.5, 0.0, 1)
    assert rate.value == pytest.approx(200)


def test_it_is_that_of_the_last_seconds() -> None:
    rate = ReadRate()
    for tenth in range(100):
        rate.count_reads(1 if tenth < 50 else 100)
        rate.measure(tenth / 10, 0.0, 1)
    assert RATE_SECONDS < 5
    assert rate.value == pytest.approx(1000)


def test_waiting_is_left_out_of_the_demand_and_shared_by_parallel_readers() -> None:
    alone, four = ReadRate(), ReadRate()
    for second in range(10):
        for rate, readers in ((alone, 1), (four, 4)):
            rate.count_reads(100)
            rate.measure(float(second), 0.5, readers)
    assert alone.value == four.value == pytest.approx(100)
    assert alone.demand == pytest.approx(200, rel=0.2)
    assert four.demand == pytest.approx(114, rel=0.2)


def paced(seconds: int, reads: int = 100) -> ReadRate:
    """Of four readers that have not waited for so long."""
    rate = ReadRate()
    for second in range(seconds):
        rate.count_reads(reads)
        rate.measure(float(second), 0.0, 4)
    return rate


def test_a_demand_that_was_reached_fades() -> None:
    rate = paced(8, reads=1000)
    assert rate.demand == pytest.approx(1000)
    for second in range(8, 8 + int(PACE_HALF_LIFE_SECONDS)):
        rate.count_reads(1)
        rate.measure(float(second), 0.0, 4)
    assert rate.value < 2
    assert rate.demand == pytest.approx(500, rel=0.1)


def test_what_was_reached_for_a_moment_is_no_pace() -> None:
    rate = ReadRate()
    rate.measure(0.0, 0.0, 4)
    rate.count_reads(256)
    rate.measure(0.5, 0.0, 4)
    assert rate.demand == pytest.approx(512)
    for second in range(1, 10):
        rate.count_reads(100)
        rate.measure(float(second), 0.0, 4)
    assert rate.demand == pytest.approx(100, rel=0.2), "the burst with which its loader began"


def test_what_fills_a_loader_is_no_pace() -> None:
    rate = ReadRate(256)
    rate.measure(0.0, 0.0, 4)
    rate.count_reads(200)
    rate.measure(0.5, 1.0, 4)
    assert rate.demand > 400, "so far nothing better is known"
    rate.count_reads(88)
    rate.measure(1.0, 1.0, 4)
    rate.count_reads(100)
    rate.measure(2.0, 0.0, 4)
    assert rate.demand == rate.value == pytest.approx(100)


def test_a_rest_between_epochs_does_not_count() -> None:
    rate = ReadRate(200)
    for second in range(30):
        rate.count_reads(100)
        rate.measure(float(second), 0.0, 4)
    for second in range(30, 90):
        rate.measure(float(second), 0.0, 4)
    assert rate.demand == pytest.approx(100, rel=0.2)
    for second in range(90, 95):
        rate.count_reads(300 if second == 90 else 100)
        rate.measure(float(second), 0.0, 4)
        assert rate.demand == pytest.approx(100, rel=0.2)


def test_who_becomes_slow_is_not_at_rest_for_long() -> None:
    rate = ReadRate(200)
    for second in range(30):
        rate.count_reads(100)
        rate.measure(float(second), 0.0, 4)
    for second in range(30, 200):
        rate.count_reads(20 * (second % 20 == 0))
        rate.measure(float(second), 0.0, 4)
    assert rate.demand < 10


def test_who_waits_is_taken_to_want_little_more_than_what_he_read_before() -> None:
    known, unknown = paced(20), ReadRate()
    for rate in (known, unknown):
        for second in range(20, 25):
            rate.count_reads(60)
            rate.measure(float(second), 3.6, 4)
    assert known.value == unknown.value == pytest.approx(60, rel=0.1)
    assert known.demand == pytest.approx(100, rel=0.15)
    assert unknown.demand == pytest.approx(60 / MIN_BUSY_SHARE, rel=0.1)
    for second in range(25, 25 + 2 * int(GROWTH_SECONDS)):
        known.count_reads(60)
        known.measure(float(second), 3.6, 4)
    assert known.demand == pytest.approx(60 / MIN_BUSY_SHARE, rel=0.1), "in time his pace may have changed"


def test_a_pace_is_that_of_so_long_that_bursts_and_rests_even_out() -> None:
    rate = paced(0)
    for second in range(40):
        # As an epoch ends a loader rests, and as the next one begins it reads its whole depth at once.
        rate.count_reads({28: 0, 29: 0, 30: 300}.get(second, 100))
        rate.measure(float(second), 0.0, 4)
        if second > 20:
            assert rate.demand == pytest.approx(100, rel=0.25), second
