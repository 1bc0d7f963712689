"""Counts the bytes in flight from all peers together, and decides whether more may be requested."""

from collections import deque
from collections.abc import Sequence
from typing import Final

from cachefs.planning.requests.receive_window import ReceiveWindow
from cachefs_cluster.peers.network_cards import NetworkCard
from cachefs_cluster.peers.peer import FETCH_LANE, HELD_LANE, Peer, PeerBatch, PendingBlock

# Bytes and blocks that all peers together may be asked to fetch from origins. Their bytes do not arrive at once, so the
# receive window does not apply; it takes many of them to keep an origin busy.
_MOST_FETCHED: Final = 128 << 20
_MOST_FETCHES: Final = 4096


class CardTraffic:
    """The bytes in flight through one network card of this node, with the receive window of that card."""

    __slots__ = ("bytes", "card", "has_retransmissions", "has_waiting_requests", "is_alone", "received_bytes", "window")

    def __init__(self, card: NetworkCard, window: ReceiveWindow) -> None:
        self.card = card
        self.window = window
        self.bytes = [0, 0]  # by lane
        self.received_bytes = 0  # of blocks, since the daemon started
        # Do requests wait for room? Else blocks arrive at the rate of requests, which does not measure the link.
        self.has_waiting_requests = False
        self.is_alone = False  # is a single rail of a single peer asked for blocks that it has?
        self.has_retransmissions = False  # has a peer retransmitted any packet?

    def should_wait_for_room(self, queue: deque[PendingBlock]) -> bool:
        """Return whether to wait until more of the queue fits into one request. Half the cost of a request does not
        depend on how many blocks it has."""
        size = self.window.single_peer_size if self.is_alone else self.window.size
        free = size - self.bytes[HELD_LANE]
        if 2 * free >= size or not self.bytes[HELD_LANE]:
            return False
        requested_bytes = 0
        for pending in queue:
            requested_bytes += pending.request.length
            if requested_bytes > free:
                return queue[0].request.length < size // 4
        return False


class BytesInFlight:
    """Bytes in flight from all peers, by network card of this node. Used on the event loop."""

    def __init__(self, fixed_window: int = 0) -> None:
        """fixed_window: bytes of each card's receive window; 0 to learn them."""
        self.cards: dict[str, CardTraffic] = {}  # by name
        # Stands for a card that no connection has gone through yet.
        self.unmeasured = CardTraffic(NetworkCard(""), ReceiveWindow(fixed_window))
        self._fixed_window = fixed_window
        self._fetched_bytes = self._fetches = 0  # bytes and blocks that peers are asked to fetch

    def card(self, card: NetworkCard) -> CardTraffic:
        """Return the traffic of a card."""
        found = self.cards.get(card.name)
        if found is None:
            found = self.cards[card.name] = CardTraffic(card, ReceiveWindow(self._fixed_window))
        return found

    def of_batch(self, batch: PeerBatch) -> CardTraffic:
        """Return the traffic of the card through which a batch arrives."""
        return self.card(batch.connection.card)

    def total(self, lane: int) -> int:
        """Return the bytes in flight in the lane."""
        return sum(card.bytes[lane] for card in self.cards.values())

    def add_batch(self, batch: PeerBatch) -> None:
        """Count a batch that was sent."""
        self.of_batch(batch).bytes[batch.lane] += batch.bytes_left
        if batch.lane == FETCH_LANE:
            self._fetched_bytes += batch.bytes_left
            self._fetches += len(batch.blocks)

    def note_requests(self, peers: Sequence[Peer]) -> None:
        """Note the peers that have requests to send."""
        for name, card in self.cards.items():
            card.is_alone = (
                len(peers) == 1
                and sum(rail.card == name for rail in peers[0].rails) <= 1
                and peers[0].bytes_left(HELD_LANE, name) >= card.bytes[HELD_LANE]
            )

    def note_waiting(self, peers: Sequence[Peer]) -> None:
        """Note the peers whose requests wait for room."""
        names = {rail.card for peer in peers for rail in peer.usable_rails}
        for name, card in self.cards.items():
            card.has_waiting_requests = name in names

    def has_room(self, card: CardTraffic, lane: int, length: int, before: int) -> bool:
        """Return whether a block of *length* bytes fits beside *before* bytes and those in flight. One block always
        fits."""
        if lane == HELD_LANE:
            return card.window.can_request(card.bytes[HELD_LANE] + before, length, is_single_peer=card.is_alone)
        in_flight = self._fetched_bytes + before
        return in_flight == 0 or (in_flight + length <= _MOST_FETCHED and self._fetches < _MOST_FETCHES)

    def release(self, batch: PeerBatch, blocks: int, size: int) -> None:
        """Count *blocks* of the batch, with *size* bytes in all, as no longer in flight."""
        batch.bytes_left -= size
        credit = min(batch.credited_bytes, size)
        batch.credited_bytes -= credit
        self.of_batch(batch).bytes[batch.lane] -= size - credit
        if batch.lane == FETCH_LANE:
            self._fetched_bytes -= size - credit
            self._fetches -= blocks

    def credit_tail(self, batch: PeerBatch) -> None:
        """Stop counting the bytes of a large block once all but its tail has arrived."""
        card = self.of_batch(batch)
        credit = batch.bytes_left - min(batch.bytes_left, card.window.size // 2)
        batch.credited_bytes += credit
        card.bytes[batch.lane] -= credit
        if batch.lane == FETCH_LANE:
            self._fetched_bytes -= credit
