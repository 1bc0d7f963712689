"""How far apart the reads of a consumer are that show."""

from cachefs.planning.sequences.search import MIN_DENSITY, SLACK_READS, ObservedShare


def test_where_all_reads_show_they_are_close_together() -> None:
    visibility = ObservedShare()
    visibility.on_reads(64)
    visibility.on_advance(64)
    assert visibility.max_step == SLACK_READS + 2


def test_where_few_show_they_are_further_apart_but_not_without_bound() -> None:
    visibility = ObservedShare()
    for _ in range(100):
        visibility.on_reads(10)
        visibility.on_advance(100)
    assert 22 < visibility.max_step < 25
    for _ in range(100):
        visibility.on_reads(1)
        visibility.on_advance(1000)
    assert visibility.max_step == SLACK_READS + 2 / MIN_DENSITY


def test_what_was_pushed_is_expected_not_to_show() -> None:
    visibility = ObservedShare()
    visibility.hidden_ratio = 64.0
    assert visibility.max_step == SLACK_READS * 64


def test_a_place_that_was_found_says_how_many_show() -> None:
    visibility = ObservedShare()
    visibility.reset(0.5)
    assert visibility.max_step == SLACK_READS + 4
