"""Peers that live and do not give."""

from cachefs_daemon.fetch.stuck_peers import FIRST_PAUSE, LONGEST_PAUSE, StuckPeers


def test_a_peer_is_left_out_after_two_in_a_row_and_asked_once_after_each_pause() -> None:
    stuck = StuckPeers()
    stuck.late("a", 0.0, 5.0, fetch=True)
    assert stuck.may_ask("a", 5.0, fetch=True)
    stuck.late("a", 1.0, 6.0, fetch=True)
    assert not stuck.may_ask("a", 6.0, fetch=True)
    assert stuck.may_ask("a", 6.0, fetch=False), "it may give what it has"
    assert stuck.may_ask("b", 6.0, fetch=True)
    # Those that were asked before that was known add nothing.
    for number in range(100):
        stuck.late("a", 2.0, 6.0 + number / 100, fetch=True)
    now = 6.0 + FIRST_PAUSE
    assert stuck.may_ask("a", now, fetch=True)
    stuck.asked("a", now, fetch=True)
    assert not stuck.may_ask("a", now, fetch=True), "one at a time"
    for _ in range(20):
        stuck.late("a", now, now + 5, fetch=True)
        now += 5 + LONGEST_PAUSE
        assert stuck.may_ask("a", now, fetch=True)
        stuck.asked("a", now, fetch=True)
    stuck.answered("a", fetch=True)
    assert stuck.may_ask("a", now, fetch=True)
    stuck.late("a", now, now + 5, fetch=True)
    assert stuck.may_ask("a", now + 5, fetch=True)
