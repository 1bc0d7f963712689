"""A rate that is learned from refusals, against a server with a bucket of its own and a clock that the test moves."""

import heapq
import itertools
import math

import pytest

from cachefs.planning.requests import request_limits
from cachefs.planning.requests.request_limits import FORGET_SECONDS, RequestRates
from cachefs_bench.lab.slow_link import TokenBucket


@pytest.mark.parametrize("limit", [100, 500, 5000])
@pytest.mark.parametrize("latency", [0.002, 0.05])
def test_nearly_all_that_the_server_takes_is_used_and_little_is_refused(limit: int, latency: float) -> None:
    """There are readers for four times as many, who come again 0.1 s after a refusal."""
    rates, server, order = RequestRates(), TokenBucket(limit), itertools.count()
    readers = max(64, int(4 * limit * latency))
    events = [(0.0, next(order), "ready") for _ in range(readers)]
    accepted = refused = 0
    now = 0.0
    while now < 20:
        now, _, what = heapq.heappop(events)
        if what == "ready":
            heapq.heappush(events, (rates.schedule_request("p", now), next(order), "sent"))
        elif what == "sent":
            heapq.heappush(events, (now + latency, next(order), "yes" if server.try_admit(now) else "no"))
        elif what == "yes":
            accepted += 1
            rates.note_accepted("p", now)
            heapq.heappush(events, (now, next(order), "ready"))
        else:
            refused += 1
            rates.note_refused("p", readers / latency, now)
            heapq.heappush(events, (now + 0.1, next(order), "ready"))
    assert accepted / (20 * limit) >= 0.95
    assert refused / accepted <= 0.25


def test_a_prefix_without_refusals_never_waits() -> None:
    rates = RequestRates()
    rates.note_refused("a", 100.0, 0.0)
    assert [rates.schedule_request("b", 0.0) for _ in range(100)] == [0.0] * 100
    assert [rates.schedule_request("a", 0.0) for _ in range(100)][-1] > 0.8


def test_after_a_minute_without_a_refusal_there_is_no_limit() -> None:
    rates = RequestRates()
    rates.note_refused("a", 100.0, 0.0)
    assert rates.rate("a") == 100.0
    assert rates.schedule_request("a", FORGET_SECONDS) == FORGET_SECONDS
    assert rates.rate("a") == math.inf
    assert not rates.is_limited


def test_a_rate_recovers_within_seconds_after_the_server_has_refused_everything() -> None:
    rates = RequestRates()
    for number in range(100):
        rates.note_refused("a", 1000.0, number / 10)
    assert rates.rate("a") == request_limits._MIN_RATE
    now = 10.0
    while rates.rate("a") < 1000:
        now = max(rates.schedule_request("a", now), now)
        assert now < 22
    for _ in range(int(FORGET_SECONDS) - 20):
        now = rates.schedule_request("a", now + 1)
    assert rates.lowest <= request_limits._MAX_RATE, "it was 10 ** 170"


def test_the_number_of_prefixes_is_bounded() -> None:
    rates = RequestRates()
    for number in range(1000):
        rates.note_refused(str(number), 100.0, 0.0)
    assert len(rates._prefixes) == request_limits.MAX_PREFIXES
    assert rates.rate("999") == 100.0


def test_nothing_is_made_of_a_refusal_before_anything_is_known() -> None:
    rates = RequestRates()
    rates.note_refused("a", 0.0, 0.0)
    assert not rates.is_limited
