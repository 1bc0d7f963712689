"""Peers that show no sign of life."""

from cachefs_daemon.fetch.silent_peers import FIRST_PAUSE, LONGEST_PAUSE, SilentPeers
from cachefs_daemon.fetch.stuck_peers import StuckPeers


def test_a_silent_peer_is_passed_over_until_a_sign_but_for_one_try_after_each_pause() -> None:
    silent = SilentPeers()
    silent.noticed("a", 0.0, 1.0, fetch=True)
    assert not silent.may_ask("a", 1.0, 0.5, fetch=True)
    assert silent.may_ask("a", 1.0, 0.5, fetch=False), "it may give what it has"
    assert silent.may_ask("b", 1.0, 0.0, fetch=True)
    for number in range(100):  # those that were asked before that was known
        silent.noticed("a", 0.5, 1.0 + number / 100, fetch=True)
    now = 1.0 + FIRST_PAUSE
    assert silent.may_ask("a", now, 0.5, fetch=True)
    assert not silent.may_ask("a", now, 0.5, fetch=True), "one at a time"
    for _ in range(20):
        silent.noticed("a", now, now + 0.5, fetch=True)
        now += 0.5 + LONGEST_PAUSE
        assert silent.may_ask("a", now, 0.5, fetch=True)
    assert not silent.may_ask("a", now + LONGEST_PAUSE / 2, 0.5, fetch=True)
    assert silent.may_ask("a", now, now + 0.1, fetch=True), "it has given a sign"
    assert silent.may_ask("a", now, 0.5, fetch=True)


def test_a_peer_that_does_not_give_what_it_has_brings_nothing_either() -> None:
    silent = SilentPeers()
    silent.noticed("a", 0.0, 1.0, fetch=False)
    assert not silent.may_ask("a", 1.0, 0.0, fetch=False)
    assert not silent.may_ask("a", 1.0, 0.0, fetch=True)


def test_of_nodes_that_have_left_nothing_is_kept() -> None:
    silent, stuck = SilentPeers(), StuckPeers()
    for node in ("a", "b"):
        silent.noticed(node, 0.0, 1.0, fetch=True)
        stuck.late(node, 0.0, 1.0, fetch=True)
        stuck.late(node, 0.5, 1.0, fetch=True)
    for peers in (silent, stuck):
        peers.keep(lambda node: node == "b")
    assert silent.may_ask("a", 1.0, 0.0, fetch=True)
    assert not silent.may_ask("b", 1.0, 0.0, fetch=True)
    assert stuck.may_ask("a", 1.0, fetch=True)
    assert not stuck.may_ask("b", 1.0, fetch=True)
