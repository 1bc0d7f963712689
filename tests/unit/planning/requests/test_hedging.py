"""How often a request is sent twice."""

from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.requests.request_times import HedgeBudget, are_few_late


@given(st.floats(0, 0.1), st.lists(st.booleans(), max_size=2000))
def test_second_requests_stay_within_their_share(share: float, wanted: list[bool]) -> None:
    budget, second = HedgeBudget(share), 0
    for number, late in enumerate(wanted, 1):
        budget.note_sent()
        second += late and budget.take_hedge()
        assert second <= share * number + 1e-6


def test_what_was_saved_up_is_no_burst() -> None:
    budget = HedgeBudget(0.02)
    for _ in range(100_000):
        budget.note_sent()
    assert sum(budget.take_hedge() for _ in range(100)) == 8


def test_where_many_are_late_the_server_is_slow() -> None:
    assert are_few_late(1, 1)
    assert are_few_late(8, 32)
    assert not are_few_late(9, 32)
