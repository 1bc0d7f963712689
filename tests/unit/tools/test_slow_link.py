"""The benchmark's model of a slow link to an origin."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs_bench.lab.slow_link import CATCH_UP_SECONDS, LatencyModel, LinkLimits, SharedLink, TokenBucket


def test_latency_has_the_median_and_the_tail_it_is_given() -> None:
    latency = LatencyModel(LinkLimits(latency=0.02, latency_p99=0.1))
    drawn = sorted(latency.draw_latency() for _ in range(20_000))
    assert statistics.median(drawn) == pytest.approx(0.02, rel=0.05)
    assert drawn[19_800] == pytest.approx(0.1, rel=0.1)


def test_latency_without_a_tail_is_constant() -> None:
    assert {
        LatencyModel(LinkLimits(latency=0.02)).draw_latency(),
        LatencyModel(LinkLimits(latency=0.02, latency_p99=0.01)).draw_latency(),
    } == {0.02}
    assert LatencyModel(LinkLimits()).draw_latency() == 0


@given(st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 100_000)), min_size=1, max_size=50))
def test_a_pipe_never_passes_more_than_its_rate(arrivals: list[tuple[float, int]]) -> None:
    pipe, rate, now, total, passed = SharedLink(1e6), 1e6, 0.0, 0, -CATCH_UP_SECONDS
    for pause, amount in arrivals:
        now += pause
        total += amount
        earlier, passed = passed, pipe.reserve_time(amount, now)
        assert passed >= max(earlier, now - CATCH_UP_SECONDS)
    assert passed >= total / rate - CATCH_UP_SECONDS - 1e-9


def test_a_busy_pipe_passes_just_its_rate() -> None:
    pipe = SharedLink(1e6)
    assert [pipe.reserve_time(100_000, 0) for _ in range(3)] == pytest.approx(
        [0.1 - CATCH_UP_SECONDS, 0.2 - CATCH_UP_SECONDS, 0.3 - CATCH_UP_SECONDS]
    )


def test_a_pipe_without_a_rate_passes_at_once() -> None:
    assert SharedLink(0).reserve_time(1 << 40, 7.0) == 7.0


def test_a_token_bucket_admits_its_rate_and_a_burst() -> None:
    bucket = TokenBucket(100)
    assert sum(bucket.try_admit(0) for _ in range(1000)) == 10
    assert sum(bucket.try_admit(number / 1000) for number in range(1000)) == pytest.approx(100, abs=1)
    assert all(TokenBucket(0).try_admit(0) for _ in range(1000))
