"""How many requests a server gets at once."""

from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.requests.request_limits import HOLD_SECONDS, AimdConcurrency


def test_a_refusal_halves_it_and_answers_raise_it_by_one_in_a_round() -> None:
    width = AimdConcurrency(64)
    width.note_refusal(0, 0.0)
    assert width.width == 32
    for _ in range(33):
        width.note_response()
    assert 32 < width.width <= 33


def test_refusals_of_one_moment_count_once() -> None:
    width = AimdConcurrency(64)
    for number in range(10):
        width.note_refusal(0, 10 + number * HOLD_SECONDS / 10)
    assert width.width == 32
    width.note_refusal(0, 10 + HOLD_SECONDS)
    assert width.width == 16


def test_it_stays_at_what_a_known_rate_needs() -> None:
    width = AimdConcurrency(64)
    for number in range(10):
        width.note_refusal(24.0, float(number))
    assert width.width == 24


def test_slowness_lowers_it_to_a_quarter_at_most() -> None:
    width = AimdConcurrency(64)
    for number in range(100):
        width.note_slowdown(float(number))
    assert width.width == 16


@given(
    st.integers(1, 1024), st.lists(st.tuples(st.sampled_from(["answered", "refused", "slower"]), st.floats(0, 2000)))
)
def test_it_is_never_less_than_one_nor_more_than_its_bound(most: int, events: list[tuple[str, float]]) -> None:
    width, now = AimdConcurrency(most), 0.0
    for event, number in events:
        now += number / 1000
        if event == "answered":
            width.note_response()
        elif event == "refused":
            width.note_refusal(number, now)
        else:
            width.note_slowdown(now)
        assert 1 <= width.width <= most
