"""Failures are kept for cachectl, and logged without flooding the log."""

import logging

import pytest

from cachefs_daemon.runtime.error_log import LINES_PER_CAUSE, LINES_PER_MINUTE, MAX_SUBJECTS, ErrorLog


def test_one_line_per_subject_and_all_counted(caplog: pytest.LogCaptureFixture) -> None:
    errors = ErrorLog()
    with caplog.at_level(logging.WARNING):
        for number in range(50):
            errors.add("s3://b/x", f"failure {number}")
    assert [record.getMessage() for record in caplog.records] == ["s3://b/x: failure 0"]
    (view,) = errors.views()
    assert (view.subject, view.message, view.count) == ("s3://b/x", "failure 49", 50)


def test_an_origin_that_is_down_does_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    errors = ErrorLog()
    with caplog.at_level(logging.WARNING):
        for number in range(10_000):
            errors.add(f"s3://b/{number}", "down")
    assert len(caplog.records) == LINES_PER_CAUSE
    views = errors.views()
    assert len(views) == MAX_SUBJECTS
    assert views[0].subject == "s3://b/9999"


def test_each_cause_has_a_few_lines_and_all_have_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    errors = ErrorLog()
    with caplog.at_level(logging.WARNING):
        for cause in range(100):
            for number in range(10):
                errors.add(f"s3://b{cause}/{number}", f"s3://b{cause}/{number} is refused (403)")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == LINES_PER_MINUTE
    assert sum("s3://b0/" in line for line in lines) == LINES_PER_CAUSE
