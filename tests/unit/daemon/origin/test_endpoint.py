"""What is learned of a server from its answers and refusals, and what is said of it."""

import asyncio
import logging
import time

import pytest

from cachefs.errors import OriginError
from cachefs.messages import OriginOptions
from cachefs_daemon.origin import outage
from cachefs_daemon.origin.endpoint import Endpoint, with_distinct_names
from cachefs_daemon.origin.retry import Failure
from cachefs_tools.cachectl.status import describe_endpoint
from tests import virtual_time


def answers(endpoint: Endpoint, count: int, size: int = 1000, seconds: float = 0.01) -> None:
    for _ in range(count):
        endpoint.count_request(size)
        endpoint.note_response("p", size, time.monotonic() - seconds)


def test_refusals_lower_width_and_rate_and_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    endpoint = Endpoint("S3 at x", 64)
    answers(endpoint, 10)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            endpoint.note_refusal("p", "503 SlowDown")
    status = endpoint.status()
    assert (status.most, status.throttled) == (64, 5)
    assert 0 < status.rate < 10_000
    assert endpoint.is_limited
    assert [record.message for record in caplog.records] == [
        "S3 at x throttles: 1 requests refused since the last warning; now at most "
        f"{status.width} at once, so readers wait: 503 SlowDown"
    ]


def test_a_server_that_does_not_answer_is_said_to_be_silent() -> None:
    async def play() -> None:
        endpoint, seen = Endpoint("S3 at x", 64), outage.Outage("S3 at x")
        for _ in range(2):
            endpoint.note_failure("p", Failure(OriginError("no server answers"), transient=True), seen)
            await asyncio.sleep(50)
        assert endpoint.status().silent == pytest.approx(100)
        assert describe_endpoint(endpoint.status()).startswith("S3 at x: no answer for ")
        seen.note_response()
        assert endpoint.status().silent == 0
        assert "no answer" not in describe_endpoint(endpoint.status())

    virtual_time.run(play())


def test_a_turn_is_waited_for_where_there_is_a_rate() -> None:
    async def play() -> None:
        endpoint = Endpoint("S3 at x", 64)
        await endpoint.wait_for_turn("p")
        answers(endpoint, 10, seconds=0.64)
        endpoint.note_refusal("p", "no")
        began = time.monotonic()
        for _ in range(20):
            await endpoint.wait_for_turn("p")
        assert time.monotonic() - began >= 0.1  # 19 turns at 100 a second, of which 0.05 s may be made up for

    virtual_time.run(play())


def test_second_requests_are_a_share_and_none_follows_a_refusal() -> None:
    endpoint = Endpoint("S3 at x", 64, hedge_share=0.02)
    answers(endpoint, 150)
    assert [endpoint.may_hedge() for _ in range(4)] == [True, True, True, False]
    answers(endpoint, 150)
    endpoint.note_refusal("p", "no")
    assert not endpoint.may_hedge()
    assert endpoint.hedged == 3


def test_the_size_of_requests_follows_from_those_that_were_answered() -> None:
    endpoint = Endpoint("S3 at x", 64, largest=1 << 20)
    assert endpoint.request_size(1000) == 2000
    assert Endpoint("files", 64).request_size(1000) == 1000
    endpoint = Endpoint("S3 at x", 64, largest=1 << 20)
    answers(endpoint, 64, size=1000, seconds=0.1)
    answers(endpoint, 64, size=100_000, seconds=0.1)  # latency decides
    assert endpoint.request_size(1000) == 1 << 20
    assert endpoint.status().request_size == 1 << 20


def test_endpoints_of_one_server_are_told_apart_by_their_options() -> None:
    alike, alone = Endpoint("S3 at x", 64).status(), Endpoint("S3 at y", 64).status()
    found = [
        (alike, OriginOptions(region="eu", addressing_style="path", profile="p")),
        (alike, OriginOptions(region="eu", anonymous=True, profile="p")),
        (alone, OriginOptions(region="eu", anonymous=True)),
    ]
    assert [one.name for one in with_distinct_names(found)] == [
        "S3 at x (addressing_style path, anonymous no)",
        "S3 at x (addressing_style default, anonymous yes)",
        "S3 at y",
    ]
