"""What a node says of its links."""

from cachefs_cluster.reporting.reports import HALF_LIFE, LoadMeter

RATE = 1_000_000_000


def test_a_link_on_which_nothing_is_asked_for_is_as_fast_as_it_was() -> None:
    # A night without jobs made each link some 10^-9 bytes a second fast, and after a week its rate was no number.
    meter, total = LoadMeter(), 0
    for second in range(1, 11):
        total += RATE
        meter.add_totals(total, 0, 0, float(second))
    for hour in range(1, 24 * 9):
        total += 10_000  # a listing is refreshed
        meter.add_totals(total, 0, 0, 3600.0 * hour)
    assert meter.load(0.0).origin_rate == RATE


def test_a_link_that_has_got_slower_shows() -> None:
    meter, total = LoadMeter(), 0
    meter.add_totals(0, 0, 0, 0.0)
    for second in range(1, int(6 * HALF_LIFE)):
        total += RATE if second < 10 else RATE // 20
        meter.add_totals(total, 0, 0, float(second))
    assert meter.load(0.0).origin_rate == RATE // 20
