"""How many lines a log takes in a time, and what it says of the others."""

import logging

from cachefs.mount.child_process import LineRateLimit


def logged(filtered: LineRateLimit, *times: float) -> list[str]:
    """What is logged of one line at each of the *times*."""
    records = [logging.makeLogRecord({"msg": "%s", "args": (f"at {when:g}",), "created": when}) for when in times]
    return [record.getMessage() for record in records if filtered.filter(record)]


def test_the_others_are_counted() -> None:
    few = LineRateLimit(2, seconds=10)
    assert logged(few, 0, 1, 2, 9, 10, 11) == ["at 0", "at 1", "at 10 (2 earlier lines left out)", "at 11"]


def test_a_line_with_marks_of_a_format_is_logged_as_it_is() -> None:
    few = LineRateLimit(1, seconds=10)
    few.filter(logging.makeLogRecord({"msg": "one", "created": 0.0}))
    few.filter(logging.makeLogRecord({"msg": "two", "created": 0.0}))
    record = logging.makeLogRecord({"msg": "%s", "args": ("100%s",), "created": 10.0})
    assert few.filter(record)
    assert record.getMessage() == "100%s (1 earlier lines left out)"
