"""The pause between tries: how it grows, what is drawn of it, and when it is over."""

import random

from hypothesis import given
from hypothesis import strategies as st

from cachefs.backoff import Backoff

Seconds = st.floats(0.001, 1e4)


@given(Seconds, Seconds, st.floats(0, 1), st.floats(1, 2), st.integers(1, 3000), st.integers(), st.floats(-1e6, 1e6))
def test_a_pause_doubles_up_to_its_bound_and_is_over_when_it_says(
    first: float, longest: float, least: float, most: float, failures: int, seed: int, now: float
) -> None:
    backoff = Backoff(first, longest, (least, most), random.Random(seed).uniform)
    assert backoff.is_due(now)
    before = 0.0
    for failed in range(1, failures + 1):
        seconds = backoff.note_failure(now)
        assert backoff.pause == min(longest, first * 2.0 ** min(failed - 1, 64))
        assert before <= backoff.pause <= longest
        assert least * backoff.pause <= seconds <= most * backoff.pause
        assert backoff.until == now + seconds
        assert backoff.is_due(backoff.until)
        assert not seconds or now + seconds == now or not backoff.is_due(now)
        before, now = backoff.pause, backoff.until
    again = backoff.restart_pause(now)
    assert backoff.failures == failures
    assert again <= most * backoff.pause
