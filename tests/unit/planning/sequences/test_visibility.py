"""How far apart the reads of a consumer are that show."""

from cachefs.planning.sequences.visibility import LOWEST_DENSITY, SLACK, Visibility


def test_where_all_reads_show_they_are_close_together() -> None:
    visibility = Visibility()
    visibility.on_reads(64)
    visibility.on_gain(64)
    assert visibility.step == SLACK + 2


def test_where_few_show_they_are_further_apart_but_not_without_bound() -> None:
    visibility = Visibility()
    for _ in range(100):
        visibility.on_reads(10)
        visibility.on_gain(100)
    assert 22 < visibility.step < 25
    for _ in range(100):
        visibility.on_reads(1)
        visibility.on_gain(1000)
    assert visibility.step == SLACK + 2 / LOWEST_DENSITY


def test_what_was_pushed_is_expected_not_to_show() -> None:
    visibility = Visibility()
    visibility.hidden = 64.0
    assert visibility.step == SLACK * 64


def test_a_place_that_was_found_says_how_many_show() -> None:
    visibility = Visibility()
    visibility.restart(0.5)
    assert visibility.step == SLACK + 4
