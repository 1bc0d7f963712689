"""What origins deliver, and how long a fetch takes."""

import numpy as np
import pytest

from cachefs.planning.prefetch.fetch_window import Bandwidth, FetchLatency


def test_bandwidth_is_what_comes_while_all_that_is_possible_is_asked_for() -> None:
    now = 0.0
    bandwidth = Bandwidth(now)

    def second(total: int, *, idle: bool) -> float:
        nonlocal now
        now += 1
        if idle:
            bandwidth.note_idle()
        bandwidth.measure(total, now)
        return bandwidth.value

    assert second(50, idle=True) == np.inf
    assert second(150, idle=False) == 100
    assert second(160, idle=True) == 100
    assert second(360, idle=True) == 125, "some of it may have been on the way before"
    assert second(435, idle=False) == 112.5


def test_what_comes_before_anything_was_asked_for_says_nothing_of_the_origins() -> None:
    """It was taken for 0 bytes a second, which grew to what readers took: every origin seemed too slow for them."""
    bandwidth = Bandwidth(0.0)
    bandwidth.measure(0, 0.01)
    assert bandwidth.value == np.inf
    assert bandwidth.has_spare


def test_latency_is_smoothed() -> None:
    latency = FetchLatency(0.1)
    for _ in range(200):
        latency.measure(0.2)
    assert latency.mean == pytest.approx(0.2, rel=1e-3)
    assert latency.deviation == pytest.approx(0.0, abs=1e-3)
    for _ in range(100):
        latency.measure(0.1)
        latency.measure(0.3)
    assert latency.mean == pytest.approx(0.2, rel=0.1)
    assert latency.deviation == pytest.approx(0.1, rel=0.1)
