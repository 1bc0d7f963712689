"""Peers that live and do not give."""

from cachefs_cluster.search.search_state import MAX_LATE_PAUSE as MAX_PAUSE
from cachefs_cluster.search.search_state import MIN_LATE_PAUSE as MIN_PAUSE
from cachefs_cluster.search.search_state import PeerResponseHealth


def test_a_peer_is_left_out_after_two_in_a_row_and_asked_once_after_each_pause() -> None:
    stuck = PeerResponseHealth()
    stuck.note_late_response("a", 0.0, 5.0, fetch=True)
    assert stuck.can_request("a", 5.0, fetch=True)
    stuck.note_late_response("a", 1.0, 6.0, fetch=True)
    assert not stuck.can_request("a", 6.0, fetch=True)
    assert stuck.can_request("a", 6.0, fetch=False), "it may give what it has"
    assert stuck.can_request("b", 6.0, fetch=True)
    # Those that were asked before that was known add nothing.
    for number in range(100):
        stuck.note_late_response("a", 2.0, 6.0 + number / 100, fetch=True)
    now = 6.0 + MIN_PAUSE
    assert stuck.can_request("a", now, fetch=True)
    stuck.note_request("a", now, fetch=True)
    assert not stuck.can_request("a", now, fetch=True), "one at a time"
    for _ in range(20):
        stuck.note_late_response("a", now, now + 5, fetch=True)
        now += 5 + MAX_PAUSE
        assert stuck.can_request("a", now, fetch=True)
        stuck.note_request("a", now, fetch=True)
    stuck.note_response("a", fetch=True)
    assert stuck.can_request("a", now, fetch=True)
    stuck.note_late_response("a", now, now + 5, fetch=True)
    assert stuck.can_request("a", now + 5, fetch=True)
