"""Requests that are counted: each ends once, in whatever way, and no count is lost with a child."""

import asyncio
import os

import pytest

from cachefs_daemon.origin import request_counters
from cachefs_daemon.origin.kinds import KIND_NAMES
from cachefs_daemon.origin.request_counters import (
    PURPOSES,
    ChildCounterSet,
    CounterSet,
    RequestOutcome,
    count_current_request,
)


def judge(error: BaseException) -> RequestOutcome:
    return RequestOutcome.CANCELLED if isinstance(error, asyncio.CancelledError) else RequestOutcome.BROKEN


def test_a_request_ends_as_its_exception_says() -> None:
    reads = CounterSet().counters_of("http")
    with reads.counted_request(judge) as exchange:
        exchange.count_begin()
        exchange.count_received(10)
        assert (reads.requests, reads.in_flight, reads.received) == (1, 1, 0)

    def fail(error: type[BaseException]) -> None:
        with reads.counted_request(judge) as exchange:
            exchange.count_begin()
            exchange.count_received(3)
            raise error

    for error in (ValueError, asyncio.CancelledError):
        with pytest.raises(error):
            fail(error)
    assert [
        reads.count_of(one) for one in (RequestOutcome.ANSWERED, RequestOutcome.BROKEN, RequestOutcome.CANCELLED)
    ] == [1, 1, 1]
    assert (reads.requests, reads.in_flight, reads.failed) == (3, 0, 1)
    assert (reads.received, reads.dropped) == (16, 6)


def test_what_was_not_sent_does_not_count() -> None:
    reads = CounterSet().counters_of("s3")
    with pytest.raises(asyncio.CancelledError), reads.counted_request(judge):
        raise asyncio.CancelledError
    assert reads.requests == 0


def test_a_request_that_is_sent_again_is_two() -> None:
    reads = CounterSet().counters_of("s3")
    with reads.counted_request(judge) as exchange, exchange.as_current():
        count_current_request()
        count_current_request()
    count_current_request()  # of nobody
    assert (reads.requests, reads.count_of(RequestOutcome.UNANSWERED), reads.count_of(RequestOutcome.ANSWERED)) == (
        2,
        1,
        1,
    )


def test_bytes_that_were_handed_on_are_of_use_although_the_request_has_failed() -> None:
    reads = CounterSet().counters_of("s3")
    reads.count_begin()
    reads.count_end(RequestOutcome.BROKEN, 100, kept=60)
    assert (reads.received, reads.dropped) == (100, 40)


def test_an_answer_that_is_wrong_has_failed_and_one_that_comes_too_late_has_not() -> None:
    reads = CounterSet().counters_of("s3")
    for error in (ValueError(), asyncio.CancelledError()):
        reads.count_begin()
        reads.count_end(RequestOutcome.ANSWERED, 5)
        reads.count_unused_response(error, 5)
    assert (reads.failed, reads.wrong_responses, reads.dropped) == (1, 1, 10)


def test_each_kind_and_purpose_has_counts_of_its_own() -> None:
    book = CounterSet()
    for number, (kind, purpose) in enumerate((kind, purpose) for kind in KIND_NAMES for purpose in PURPOSES):
        for _ in range(number):
            book.counters_of(kind, purpose).count_unreachable()
    counts = [book.counters_of(kind, purpose).requests for kind in KIND_NAMES for purpose in PURPOSES]
    assert counts == list(range(len(KIND_NAMES) * len(PURPOSES)))


def test_a_child_that_is_killed_leaves_its_counts() -> None:
    before = request_counters.total_counters().counters_of("s3")
    # Tests that ran in this process before may have left some under way.
    sent, under_way, cancelled = before.requests, before.in_flight, before.count_of(RequestOutcome.CANCELLED)
    received, dropped = before.received, before.dropped
    child = ChildCounterSet()
    process = os.fork()
    if not process:
        reads = CounterSet()
        reads.use_shared_memory(child.descriptor)
        for _ in range(3):
            reads.counters_of("s3").count_begin()
        for _ in range(2):
            reads.counters_of("s3").count_end(RequestOutcome.ANSWERED, 100)
        os._exit(0)
    os.waitpid(process, 0)
    running = request_counters.total_counters().counters_of("s3")
    assert (running.requests - sent, running.in_flight - under_way) == (3, 1)
    assert running.count_of(RequestOutcome.CANCELLED) == cancelled
    child.close(used=100)  # it was killed before it could tell of the second block
    child.close(used=100)
    after = request_counters.total_counters().counters_of("s3")
    assert (after.requests - sent, after.in_flight, after.count_of(RequestOutcome.CANCELLED) - cancelled) == (
        3,
        under_way,
        1,
    )
    assert (after.received - received, after.dropped - dropped) == (200, 100)
