"""The window widens with reads that come late, as far as that is worth it, and narrows when none do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.prefetch.fetch_window import (
    COST_PERIOD_SECONDS,
    HALF_LIFE_SECONDS,
    QUIET_SECONDS,
    TOLERATED_READS,
    LearnedWindow,
)

# Bytes that a second of stall is worth, where nothing costs anything.
WORTH = 1e9


def test_it_widens_at_once_by_what_late_reads_have_waited_on_average() -> None:
    window = LearnedWindow(WORTH)
    window.note_late_reads([0.05, 0.12, 0.10], reads=0, window=1.0, cost=0.0, now=10.0)
    assert window.extra_seconds(10.0) == pytest.approx(0.09)


def test_reads_whose_fetches_began_before_it_was_widened_do_not_widen_it_again() -> None:
    window = LearnedWindow(WORTH)
    window.note_late_reads([0.12], reads=0, window=1.0, cost=0.0, now=10.0)
    window.note_late_reads([0.12], reads=0, window=1.12, cost=0.0, now=10.5)
    assert window.extra_seconds(10.5) == pytest.approx(0.12)
    window.note_late_reads([0.2], reads=0, window=1.12, cost=0.0, now=11.0)
    assert window.extra_seconds(11.0) == pytest.approx(0.2), "by what is not done yet"
    window.note_late_reads([0.1], reads=0, window=1.2, cost=0.0, now=13.0)
    assert window.extra_seconds(13.0) == pytest.approx(0.3)


def test_a_few_late_reads_among_many_widen_nothing() -> None:
    window = LearnedWindow(WORTH)
    window.note_late_reads([], reads=3 * TOLERATED_READS, window=1.0, cost=0.0, now=10.0)
    window.note_late_reads([0.1, 0.1], reads=10, window=1.0, cost=0.0, now=10.0)
    assert window.extra_seconds(10.0) == 0.0
    window.note_late_reads([0.1, 0.1], reads=10, window=1.0, cost=0.0, now=10.0)
    assert window.extra_seconds(10.0) == pytest.approx(0.1)
    window.note_late_reads([], reads=100 * TOLERATED_READS, window=1.0, cost=0.0, now=20.0)
    window.note_late_reads([0.1], reads=10, window=1.0, cost=0.0, now=20.0)
    assert window.extra_seconds(20.0) == pytest.approx(0.1)


def test_it_narrows_slowly_after_a_quiet_time() -> None:
    window = LearnedWindow(WORTH)
    window.note_late_reads([0.4], reads=0, window=1.0, cost=0.0, now=10.0)
    assert window.extra_seconds(10.0 + QUIET_SECONDS) == pytest.approx(0.4)
    assert window.extra_seconds(10.0 + QUIET_SECONDS + HALF_LIFE_SECONDS) == pytest.approx(0.2)
    window.note_late_reads([0.001], reads=0, window=1.0, cost=0.0, now=10.0 + QUIET_SECONDS + 2 * HALF_LIFE_SECONDS)
    assert window.extra_seconds(10.0 + QUIET_SECONDS + 2 * HALF_LIFE_SECONDS) == pytest.approx(0.1), (
        "a millisecond is no stall"
    )
    window.note_late_reads([0.1], reads=0, window=1.0, cost=0.0, now=10.0 + QUIET_SECONDS + 2 * HALF_LIFE_SECONDS)
    assert window.extra_seconds(10.0 + QUIET_SECONDS + 2 * HALF_LIFE_SECONDS) == pytest.approx(0.2), (
        "it is widened from where it has come to"
    )


def test_it_widens_no_further_than_the_stalled_seconds_are_worth() -> None:
    window = LearnedWindow(worth=100.0)
    # 0.5 s of stall are worth 50 bytes: so many bytes per second over the period buy a part of a second of window.
    window.note_late_reads([0.2, 0.3], reads=0, window=1.0, cost=1000.0, now=10.0)
    assert window.extra_seconds(10.0) == pytest.approx(50.0 / (1000.0 * COST_PERIOD_SECONDS))
    free = LearnedWindow(worth=0.0)
    free.note_late_reads([1.0], reads=0, window=1.0, cost=1.0, now=10.0)
    assert free.extra_seconds(10.0) == 0.0, "stalls that are worth nothing buy nothing"


@given(
    st.lists(
        st.tuples(st.floats(0, 30), st.lists(st.floats(0, 10), max_size=3), st.floats(0, 1e9)), min_size=1, max_size=30
    )
)
def test_it_is_never_negative_and_never_grows_by_more_than_a_wait(
    events: list[tuple[float, list[float], float]],
) -> None:
    window, now = LearnedWindow(WORTH), 0.0
    for after, waits, cost in events:
        now += after
        before = window.extra_seconds(now)
        window.note_late_reads(waits, 3, 1.0 + before, cost, now)
        assert 0 <= window.extra_seconds(now) <= before + max(waits, default=0.0) + 1e-9
