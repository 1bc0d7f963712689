"""Bytes in flight count for the network card that they arrive through: incast happens at the link of one card."""

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from cachefs_cluster.peers.in_flight import BytesInFlight
from cachefs_cluster.peers.network_cards import NetworkCard
from cachefs_cluster.peers.peer import FETCH_LANE, HELD_LANE, Peer, PeerBatch
from cachefs_cluster.peers.rail import Rail
from tests.members import member_record

CARDS = [NetworkCard("eth0"), NetworkCard("eth1")]


class Connection:
    def __init__(self, card: NetworkCard) -> None:
        self.card = card


def peer_with(*cards: NetworkCard) -> Peer:
    """A peer with a rail through each of these cards."""
    return Peer(member_record(1), [Rail(member_record(1), card=card.name) for card in cards])


def batch(peer: Peer, at: int, size: int, lane: int = HELD_LANE) -> PeerBatch:
    rail = peer.rails[at]
    connection = cast(Any, Connection(NetworkCard(rail.card)))
    one = PeerBatch(peer, lane, False, rail, connection, cast(Any, None), [], {0}, size)
    peer.batches[connection] = one
    return one


def test_each_card_has_a_window_of_its_own() -> None:
    found, peer = BytesInFlight(1 << 20), peer_with(*CARDS)
    found.add_batch(batch(peer, 0, 1 << 20))
    first, second = map(found.card, CARDS)
    assert not found.has_room(first, HELD_LANE, 1000, 0)
    assert found.has_room(second, HELD_LANE, 1000, 0)
    assert found.total(HELD_LANE) == 1 << 20


def test_what_one_card_learns_changes_no_window_of_another() -> None:
    found = BytesInFlight()
    first, second = map(found.card, CARDS)
    size = second.window.size
    for step in range(1, 100):
        first.window.note_received(1 << 20, 1.0 + step * 0.001, is_full=True)
    assert first.window.rate > second.window.rate
    assert second.window.size == size


def test_a_single_peer_may_have_several_windows_unless_its_rails_meet_at_one_card() -> None:
    for cards, is_alone in (([CARDS[0]], True), (CARDS, True), ([CARDS[0], CARDS[0]], False)):
        found, peer = BytesInFlight(), peer_with(*cards)
        for at in range(len(cards)):
            found.add_batch(batch(peer, at, 100_000))
        found.note_requests([peer])
        assert all(found.card(card).is_alone == is_alone for card in cards)
        found.note_requests([peer, peer_with(CARDS[0])])
        assert not found.card(CARDS[0]).is_alone


def test_only_cards_through_which_requests_wait_are_full() -> None:
    found, peer = BytesInFlight(), peer_with(CARDS[1])
    first, second = map(found.card, CARDS)
    found.note_waiting([peer])
    assert (first.has_waiting_requests, second.has_waiting_requests) == (False, True)
    peer.rails[0].health.note_failure("gone", 0.0, 0.0)
    found.note_waiting([peer, peer_with(CARDS[0])])
    assert (first.has_waiting_requests, second.has_waiting_requests) == (True, False), "nothing goes over a dead rail"
    found.note_waiting([])
    assert not second.has_waiting_requests


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from([HELD_LANE, FETCH_LANE]), st.integers(1, 1 << 20))))
def test_nothing_stays_counted(sent: list[tuple[int, int, int]]) -> None:
    found, peer = BytesInFlight(), peer_with(*CARDS)
    batches = [batch(peer, at, size, lane) for at, lane, size in sent]
    for one in batches:
        found.add_batch(one)
    assert found.total(HELD_LANE) + found.total(FETCH_LANE) == sum(size for _, _, size in sent)
    for one in batches:
        found.credit_tail(one)
        found.release(one, len(one.blocks), one.bytes_left // 2)
        found.release(one, 0, one.bytes_left)
    assert found.total(HELD_LANE) == found.total(FETCH_LANE) == 0
    assert found._fetched_bytes == 0
