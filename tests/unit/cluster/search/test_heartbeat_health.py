"""Peers that show no sign of life."""

from cachefs_cluster.search.search_state import (
    MAX_SILENT_PAUSE as MAX_PAUSE,
)
from cachefs_cluster.search.search_state import (
    MIN_SILENT_PAUSE as MIN_PAUSE,
)
from cachefs_cluster.search.search_state import (
    PeerHeartbeatHealth,
    PeerResponseHealth,
)


def test_a_silent_peer_is_passed_over_until_a_sign_but_for_one_try_after_each_pause() -> None:
    silent = PeerHeartbeatHealth()
    silent.note_silence("a", 0.0, 1.0, fetch=True)
    assert not silent.can_request("a", 1.0, 0.5, fetch=True)
    assert silent.can_request("a", 1.0, 0.5, fetch=False), "it may give what it has"
    assert silent.can_request("b", 1.0, 0.0, fetch=True)
    for number in range(100):  # those that were asked before that was known
        silent.note_silence("a", 0.5, 1.0 + number / 100, fetch=True)
    now = 1.0 + MIN_PAUSE
    assert silent.can_request("a", now, 0.5, fetch=True)
    assert not silent.can_request("a", now, 0.5, fetch=True), "one at a time"
    for _ in range(20):
        silent.note_silence("a", now, now + 0.5, fetch=True)
        now += 0.5 + MAX_PAUSE
        assert silent.can_request("a", now, 0.5, fetch=True)
    assert not silent.can_request("a", now + MAX_PAUSE / 2, 0.5, fetch=True)
    assert silent.can_request("a", now, now + 0.1, fetch=True), "it has given a sign"
    assert silent.can_request("a", now, 0.5, fetch=True)


def test_a_peer_that_does_not_give_what_it_has_brings_nothing_either() -> None:
    silent = PeerHeartbeatHealth()
    silent.note_silence("a", 0.0, 1.0, fetch=False)
    assert not silent.can_request("a", 1.0, 0.0, fetch=False)
    assert not silent.can_request("a", 1.0, 0.0, fetch=True)


def test_of_nodes_that_have_left_nothing_is_kept() -> None:
    silent, stuck = PeerHeartbeatHealth(), PeerResponseHealth()
    for node in ("a", "b"):
        silent.note_silence(node, 0.0, 1.0, fetch=True)
        stuck.note_late_response(node, 0.0, 1.0, fetch=True)
        stuck.note_late_response(node, 0.5, 1.0, fetch=True)
    for peers in (silent, stuck):
        peers.keep_known_nodes(lambda node: node == "b")
    assert silent.can_request("a", 1.0, 0.0, fetch=True)
    assert not silent.can_request("b", 1.0, 0.0, fetch=True)
    assert stuck.can_request("a", 1.0, fetch=True)
    assert not stuck.can_request("b", 1.0, fetch=True)
