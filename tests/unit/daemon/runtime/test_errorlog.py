"""Failures are kept for cachectl, and logged without flooding the log."""

import logging

import pytest
from cachefs_daemon.runtime.errorlog import KEPT, LINES_PER_MINUTE, ErrorLog


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
    assert len(caplog.records) == LINES_PER_MINUTE
    views = errors.views()
    assert len(views) == KEPT
    assert views[0].subject == "s3://b/9999"
