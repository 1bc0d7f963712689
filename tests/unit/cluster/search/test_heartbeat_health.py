"""Peers that show no sign of life."""

import math
from typing import Any, cast

import pytest

from cachefs.planning.requests.request_times import MIN_REQUESTS
from cachefs_cluster.search.missing_snapshots import MissingSnapshots
from cachefs_cluster.search.search_state import (
    HELD_BLOCK_SECONDS,
    SILENT_HOLDER_SECONDS,
    PeerHeartbeatHealth,
    PeerResponseHealth,
    PeerSearchState,
)
from cachefs_cluster.search.search_state import (
    MAX_SILENT_PAUSE as MAX_PAUSE,
)
from cachefs_cluster.search.search_state import (
    MIN_SILENT_PAUSE as MIN_PAUSE,
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


class NoPeers:
    """Peers that have never given a sign of life."""

    def last_heartbeat(self, node_id: str, *, fetch: bool) -> float:
        return -math.inf


@pytest.mark.parametrize("usual", [0.001, 0.5, 1.0, 1.9, 2.1, 4.0])
def test_the_slower_blocks_usually_are_the_longer_a_silent_peer_is_waited_for(usual: float) -> None:
    """On a busy machine all peers are slow; to ask the origin beside each of them makes it busier."""
    state = PeerSearchState(cast(Any, NoPeers()), MissingSnapshots())
    assert state.silent_from("a", 100_000, 10.0, fetch=False) == 10.0 + SILENT_HOLDER_SECONDS, "nothing is known yet"
    for number in range(2 * MIN_REQUESTS):
        state.note_block_time(100_000, usual, number / 100, fetch=False)
    waited = state.silent_from("a", 100_000, 10.0, fetch=False) - 10.0
    assert waited >= min(usual, HELD_BLOCK_SECONDS)
    assert SILENT_HOLDER_SECONDS <= waited <= max(SILENT_HOLDER_SECONDS, 1.1 * usual, HELD_BLOCK_SECONDS)
