"""The curve of throughput, fitted to requests that follow it more or less."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.requests.request_times import ThroughputCurve, fit_throughput

SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]


def requests(curve: ThroughputCurve, sizes: list[int], noise: float = 0.0) -> list[tuple[float, float]]:
    rng = random.Random(0)
    return [(float(size), size / curve.bytes_per_second(size) * rng.uniform(1 - noise, 1 + noise)) for size in sizes]


@given(st.floats(1e6, 1e9), st.floats(-7, -5.3))
def test_a_curve_is_found_again(p: float, exponent: float) -> None:
    curve = ThroughputCurve(p, 10**exponent)
    found = fit_throughput(requests(curve, SIZES))
    assert found is not None
    for size in SIZES:
        assert found.bytes_per_second(size) == pytest.approx(curve.bytes_per_second(size), rel=0.1)


def test_noise_moves_the_good_size_little() -> None:
    curve = ThroughputCurve(100e6, 1e-6)
    found = fit_throughput(requests(curve, SIZES, noise=0.2))
    assert found is not None
    assert found.good_size(1, 1 << 30) == pytest.approx(curve.good_size(1, 1 << 30), rel=0.6)


def test_a_request_of_the_good_size_is_nearly_as_quick_as_any() -> None:
    curve = ThroughputCurve(100e6, 1e-6)
    assert curve.bytes_per_second(curve.good_size(1, 1 << 30)) == pytest.approx(0.9 * curve.p, rel=1e-3)
    assert curve.good_size(4 << 20, 16 << 20) == 4 << 20
    assert curve.good_size(1, 1 << 20) == 1 << 20


@given(st.lists(st.tuples(st.floats(0, 1e12), st.floats(0, 1e6)), max_size=40))
def test_any_requests_give_a_curve_or_none(known: list[tuple[float, float]]) -> None:
    found = fit_throughput(known)
    if found is not None:
        assert 1 <= found.good_size(1, 1 << 24) <= 1 << 24


def test_one_size_tells_nothing() -> None:
    assert fit_throughput([]) is None
    assert fit_throughput([(1000.0, 0.1), (1500.0, 0.1)]) is None
