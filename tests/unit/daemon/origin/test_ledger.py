"""Requests that are counted: each ends once, in whatever way, and no count is lost with a child."""

import asyncio
import os

import pytest
from cachefs_daemon.origin import ledger
from cachefs_daemon.origin.ledger import KINDS, PURPOSES, Book, ChildBook, Outcome, sending


def judge(error: BaseException) -> Outcome:
    return Outcome.CANCELLED if isinstance(error, asyncio.CancelledError) else Outcome.BROKEN


def test_a_request_ends_as_its_exception_says() -> None:
    reads = Book().of("http")
    with reads.request(judge) as exchange:
        exchange.begin()
        exchange.got(10)
        assert (reads.requests, reads.in_flight, reads.received) == (1, 1, 0)

    def fail(error: type[BaseException]) -> None:
        with reads.request(judge) as exchange:
            exchange.begin()
            exchange.got(3)
            raise error

    for error in (ValueError, asyncio.CancelledError):
        with pytest.raises(error):
            fail(error)
    assert [reads.count(one) for one in (Outcome.ANSWERED, Outcome.BROKEN, Outcome.CANCELLED)] == [1, 1, 1]
    assert (reads.requests, reads.in_flight, reads.failed) == (3, 0, 1)
    assert (reads.received, reads.dropped) == (16, 6)


def test_what_was_not_sent_does_not_count() -> None:
    reads = Book().of("s3")
    with pytest.raises(asyncio.CancelledError), reads.request(judge):
        raise asyncio.CancelledError
    assert reads.requests == 0


def test_a_request_that_is_sent_again_is_two() -> None:
    reads = Book().of("s3")
    with reads.request(judge) as exchange, exchange.current():
        sending()
        sending()
    sending()  # of nobody
    assert (reads.requests, reads.count(Outcome.UNANSWERED), reads.count(Outcome.ANSWERED)) == (2, 1, 1)


def test_bytes_that_were_handed_on_are_of_use_although_the_request_has_failed() -> None:
    reads = Book().of("s3")
    reads.begin()
    reads.end(Outcome.BROKEN, 100, kept=60)
    assert (reads.received, reads.dropped) == (100, 40)


def test_an_answer_that_is_wrong_has_failed_and_one_that_comes_too_late_has_not() -> None:
    reads = Book().of("s3")
    for error in (ValueError(), asyncio.CancelledError()):
        reads.begin()
        reads.end(Outcome.ANSWERED, 5)
        reads.thrown_away(error, 5)
    assert (reads.failed, reads.wrong_answers, reads.dropped) == (1, 1, 10)


def test_each_kind_and_purpose_has_counts_of_its_own() -> None:
    book = Book()
    for number, (kind, purpose) in enumerate((kind, purpose) for kind in KINDS for purpose in PURPOSES):
        for _ in range(number):
            book.of(kind, purpose).unreachable()
    counts = [book.of(kind, purpose).requests for kind in KINDS for purpose in PURPOSES]
    assert counts == list(range(len(KINDS) * len(PURPOSES)))


def test_a_child_that_is_killed_leaves_its_counts() -> None:
    before = ledger.total().of("s3")
    # Tests that ran in this process before may have left some under way.
    sent, under_way, cancelled = before.requests, before.in_flight, before.count(Outcome.CANCELLED)
    received, dropped = before.received, before.dropped
    child = ChildBook()
    process = os.fork()
    if not process:
        reads = Book()
        reads.use(child.descriptor)
        for _ in range(3):
            reads.of("s3").begin()
        for _ in range(2):
            reads.of("s3").end(Outcome.ANSWERED, 100)
        os._exit(0)
    os.waitpid(process, 0)
    running = ledger.total().of("s3")
    assert (running.requests - sent, running.in_flight - under_way) == (3, 1)
    assert running.count(Outcome.CANCELLED) == cancelled
    child.close(used=100)  # it was killed before it could tell of the second block
    child.close(used=100)
    after = ledger.total().of("s3")
    assert (after.requests - sent, after.in_flight, after.count(Outcome.CANCELLED) - cancelled) == (3, under_way, 1)
    assert (after.received - received, after.dropped - dropped) == (200, 100)
