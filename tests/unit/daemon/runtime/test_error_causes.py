"""Failures of one cause are one row, whatever failed and however often."""

from cachefs_daemon.runtime.error_log import MAX_CAUSES, ErrorLog


def down(key: str, port: int = 9000) -> str:
    return f"no server answers at http://host:{port} (for s3://photos/{key}); check the endpoint"


def test_one_outage_is_one_cause() -> None:
    errors = ErrorLog()
    for number in range(10_000):
        errors.add(f"s3://photos/train/{number}.jpg", down(f"train/{number}.jpg"))
    (cause,) = errors.causes()
    errors.add("s3://photos/val/1.jpg", down("val/1.jpg"))
    assert [(one.where, one.count) for one in errors.causes()] == [("s3://photos/", 10_001)]
    assert (cause.count, cause.where) == (10_000, "s3://photos/train/")
    assert cause.message == "no server answers at http://host:9000 (for …); check the endpoint"
    assert cause.example == "s3://photos/train/9999.jpg"
    assert cause.first <= cause.last


def test_what_has_another_reason_or_another_place_is_another_cause() -> None:
    errors = ErrorLog()
    errors.add("s3://photos/a", down("a"))
    errors.add("s3://photos/a", "s3://photos/a: the server answers 503 SlowDown")
    errors.add("s3://photos/b", "s3://photos/b: the server answers 404 NoSuchKey")
    errors.add("s3://other/a", "s3://other/a: the server answers 404 NoSuchKey")
    errors.add("ssd tier", "takes no new blocks: /ssd: No space left on device")
    assert [(one.where, one.count) for one in errors.causes()] == [
        ("ssd tier", 1), ("s3://other/a", 1), ("s3://photos/b", 1), ("s3://photos/a", 1), ("s3://photos/a", 1),
    ]  # fmt: skip


def test_numbers_that_differ_make_no_other_cause_and_causes_are_bounded() -> None:
    errors = ErrorLog()
    for number in range(20):
        errors.add("file:///x/y", f"got {10_000 + number} bytes for 5000000, block {number:032x}")
    assert len(errors.causes()) == 1
    for number in range(3 * MAX_CAUSES):
        errors.add(f"node {number}", "down")
    assert len(errors.causes()) == MAX_CAUSES


def test_what_lasts_is_seen_last_now_and_counted_once() -> None:
    errors = ErrorLog()
    errors.add("ssd tier", "takes no new blocks: full")
    (before,) = errors.causes()
    errors.note_ongoing("ssd tier")
    errors.note_ongoing("memory tier")
    (after,) = errors.causes()
    assert (after.count, after.first) == (1, before.first)
    assert after.last >= before.last
