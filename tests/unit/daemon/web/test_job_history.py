"""The history of a job: bounded, whole, and right about samples."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs_daemon.web.job_history import MAX_ROWS, EpochProgress, JobHistory, JobHistoryRow, SampleCount


def recorded(seconds: int) -> JobHistory:
    """Of a job that reads ten samples a second."""
    history = JobHistory()
    for second in range(seconds):
        if history.is_due(second):
            history.add_row(JobHistoryRow(when=second, samples=10 * second, epoch=second // 100))
    return history


@pytest.mark.parametrize("seconds", [1, 100, MAX_ROWS, MAX_ROWS + 1, 5000, 100_000])
def test_the_whole_run_is_there_in_bounded_memory(seconds: int) -> None:
    history = recorded(seconds)
    columns = history.columns()
    when = columns["when"]
    assert len(when) <= MAX_ROWS
    assert when[0] == 0
    assert seconds - when[-1] <= history.period
    assert {later - before for before, later in itertools.pairwise(when)} <= {history.period}
    assert columns["samples"] == [10 * moment for moment in when], "sums stay right whatever is left out"
    assert columns["epoch"] == [moment // 100 for moment in when]
    if seconds > MAX_ROWS:
        assert len(when) >= MAX_ROWS // 2


def test_a_clock_that_is_set_back_stops_nothing() -> None:
    history = JobHistory()
    history.add_row(JobHistoryRow(when=1000))
    assert not history.is_due(1000.5)
    assert history.is_due(1001)
    assert history.is_due(10)


def test_samples_add_up_over_epochs() -> None:
    count = SampleCount()
    assert count.add_progress({"0": EpochProgress(0, 30, 100)}) == 30
    assert count.add_progress({"0": EpochProgress(0, 90, 100), "1": EpochProgress(0, 5, 100)}) == 65
    assert count.add_progress({"0": EpochProgress(1, 20, 100), "1": EpochProgress(0, 5, 100)}) == 30, (
        "10 of the old epoch and 20 of the new one"
    )
    assert count.add_progress({"0": EpochProgress(0, 7, 100)}) == 7, "it began again"
    assert count.add_progress({"0": EpochProgress(0, 3, 100)}) == 0, "never fewer than before"
    assert count.add_progress({}) == 0
    assert count.total == 132


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), max_size=30))
def test_samples_never_become_fewer(steps: list[tuple[int, int]]) -> None:
    count = SampleCount()
    for epoch, read in steps:
        before = count.total
        count.add_progress({"0": EpochProgress(epoch, read, 50)})
        assert count.total >= before
