"""What troubles are called: one line each, with the right numbers, in an order that shows the worst first."""

import errno

import pytest

from cachefs.formatting import format_count, format_duration, format_names
from cachefs.messages import Trouble
from cachefs.trouble_texts import (
    Cause,
    cause_of_errno,
    describe_end,
    describe_past,
    describe_trouble,
    filter_by_snapshots,
    is_failing,
    remedy,
    short_text,
    sort_by_severity,
)

NOW = 1_000_100.0
SINCE = 1_000_065.0
OUTAGE = Trouble(Cause.ORIGIN, "S3 at http://x", SINCE, NOW - 2, "connection refused")
REFUSED = Trouble(Cause.REFUSED, "pets", SINCE, NOW - 3, "s3://b/k is refused (403)", failed=1889, snapshots=["one"])
AWAY = Trouble(Cause.PEER, "b", SINCE, NOW, "it sends no heartbeats")
FULL = Trouble(Cause.TIER, "ssd", SINCE, NOW, "has no more room")


def waiting(one: Trouble, count: int, longest: float) -> Trouble:
    return Trouble(one.cause, one.subject, one.since, one.last, one.reason, count, longest, one.failed)


@pytest.mark.parametrize(
    ("trouble", "line"),
    [
        (
            waiting(OUTAGE, 4, 8.0),
            "S3 at http://x has not answered for 35 s; 4 reads wait for it, the first for 8 s (connection refused)",
        ),
        (
            waiting(OUTAGE, 1, 8.0),
            "S3 at http://x has not answered for 35 s; 1 read waits for it, for 8 s (connection refused)",
        ),
        (
            OUTAGE,
            "S3 at http://x did not answer the last request, 2 s ago; no read waits for it (connection refused)",
        ),
        (REFUSED, "1,889 reads of pets failed: s3://b/k is refused (403) (the last 3 s ago)"),
        (
            Trouble(Cause.FAILED, "pets", SINCE, NOW, "broken", failed=3, unattributed=3),
            "3 reads of pets on this node, maybe another job's, failed: broken (the last 0 s ago)",
        ),
        (
            Trouble(Cause.FAILED, "pets", SINCE, NOW, "broken", failed=3, unattributed=1),
            "2 reads of pets, and 1 more on this node that may be another job's, failed: broken (the last 0 s ago)",
        ),
        (
            Trouble(Cause.CHANGED, "pets", SINCE, NOW, "s3://b/k has changed", failed=0),
            "readahead of pets failed: s3://b/k has changed (the last 0 s ago)",
        ),
        (
            waiting(Trouble(Cause.REFUSED, "pets", SINCE, NOW, "expired"), 2, 5.0),
            "2 reads wait for pets, the first for 5 s (expired)",
        ),
        (
            Trouble(Cause.SLOT, "S3 at x", SINCE, NOW, "it gets 1 of 8 requests at once", 2, 35.0),
            "2 reads wait for a free request to S3 at x, the first for 35 s (it gets 1 of 8 requests at once)",
        ),
        (
            Trouble(Cause.SLOW, "S3 at x", SINCE, NOW, "", 1, 35.0),
            "1 read waits for S3 at x, which is slow, for 35 s",
        ),
        (
            AWAY,
            "node b has not answered for 35 s; its blocks come from other nodes or the origin (it sends no heartbeats)",
        ),
        (
            Trouble(Cause.SLOW_PEER, "b", SINCE, NOW, "", 2, 35.0),
            "2 reads wait for node b, the first for 35 s; it is not away, and may be waiting for its origin",
        ),
        (FULL, "the ssd tier has no more room"),
        (Trouble("sunspots", "the sky", SINCE, NOW, "too bright"), "the sky: too bright"),
    ],
)
def test_a_trouble_is_one_line(trouble: Trouble, line: str) -> None:
    assert describe_trouble(trouble, NOW) == line
    assert remedy(trouble)


def test_the_end_of_a_trouble_is_a_line_unless_reads_have_failed() -> None:
    assert describe_end(OUTAGE, NOW) == "S3 at http://x answers again, after 35 s"
    assert describe_end(AWAY, NOW) == "node b answers again, after 35 s"
    assert describe_end(FULL, NOW) == "the ssd tier takes blocks again, after 35 s"
    assert describe_end(REFUSED, NOW) == ""


def test_a_summary_names_what_was_wrong_and_for_how_long() -> None:
    origin, slot = (Trouble(cause, "S3 at x", SINCE, NOW) for cause in (Cause.ORIGIN, Cause.SLOT))
    refused = Trouble(Cause.REFUSED, "pets", SINCE, NOW, "no", failed=2)
    assert describe_past(origin, 35.4) == "S3 at x did not answer for 35 s"
    assert describe_past(refused, 1.0) == "2 reads of pets failed: no; see `cachectl errors`"
    assert describe_past(slot, 70) == "reads waited for 1 min 10 s for a free request to S3 at x"


def test_what_reads_wait_for_comes_first_and_then_what_makes_them_fail() -> None:
    found = sort_by_severity([AWAY, FULL, OUTAGE, REFUSED, waiting(OUTAGE, 1, 3.0)])
    assert [(one.cause, one.waiting) for one in found] == [
        (Cause.ORIGIN, 1), (Cause.REFUSED, 0), (Cause.ORIGIN, 0), (Cause.TIER, 0), (Cause.PEER, 0),
    ]  # fmt: skip
    assert short_text(found) == "no answer"
    assert short_text([]) == "-"
    assert short_text([Trouble("sunspots", "x", 0, 0)]) == "sunspots"


def test_a_trouble_concerns_the_readers_of_its_snapshots_or_all() -> None:
    assert filter_by_snapshots([REFUSED, FULL], ["one"]) == [REFUSED, FULL]
    assert filter_by_snapshots([REFUSED, FULL], ["two"]) == [FULL]


def test_the_errno_of_a_read_says_its_cause() -> None:
    causes = [cause_of_errno(number) for number in (errno.EACCES, errno.ESTALE, errno.EIO)]
    assert causes == [Cause.REFUSED, Cause.CHANGED, Cause.FAILED]
    assert all(map(is_failing, causes))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.04, "0 s"), (0.25, "0.2 s"), (59.9, "59 s"), (3600, "1 h 0 min"), (90_061, "1 d 1 h"), (-5, "0 s")],
)
def test_times_have_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_one_of_a_thing_has_no_plural() -> None:
    assert [format_count(number, "read") for number in (0, 1, 2048)] == ["0 reads", "1 read", "2,048 reads"]
    assert format_count(2, "block coming", "blocks coming") == "2 blocks coming"


def test_of_many_names_the_first_are_shown() -> None:
    assert [format_names("abcd"[:count], 2) for count in (1, 2, 4)] == ["a", "a, b", "a, b and 2 more"]
