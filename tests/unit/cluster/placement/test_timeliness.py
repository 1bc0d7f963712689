"""Whether orders that are published one by one were known in time."""

from cachefs_cluster.placement.timeliness import ANNOUNCED_UNTIL, KNOWN_UNTIL, NOTHING_SETTLED, own_verdict, verdict_of


def test_the_one_who_says_so_has_to_know_the_orders_at_the_start_of_an_epoch() -> None:
    assert own_verdict(3, (2, 0.9))
    assert own_verdict(3, (3, KNOWN_UNTIL))
    assert not own_verdict(3, (3, KNOWN_UNTIL + 0.01))
    assert not own_verdict(3, (4, 0.0))


def test_the_others_wait_for_its_word_and_do_not_wait_for_ever() -> None:
    assert verdict_of(3, NOTHING_SETTLED, (2, 0.9)) is None
    assert verdict_of(3, NOTHING_SETTLED, (3, ANNOUNCED_UNTIL)) is None
    assert verdict_of(3, NOTHING_SETTLED, (3, ANNOUNCED_UNTIL + 0.01)) is False
    assert verdict_of(3, (3, 3), (3, 0.9)) is True, "whoever knows the orders later decides alike"
    assert verdict_of(3, (1, 5), (3, 0.9)) is True
    assert verdict_of(3, (4, 5), (2, 0.9)) is False, "it has gone on without"
    assert verdict_of(3, (1, 2), (3, 0.0)) is None
