"""Counts the bytes in flight from all peers together, and decides whether more may be requested."""

from collections import deque
from collections.abc import Sequence
from typing import Final

from cachefs.planning.requests.receive_window import ReceiveWindow
from cachefs_cluster.peers.peer import FETCH_LANE, HELD_LANE, Peer, PeerBatch, PendingBlock

# Bytes and blocks that all peers together may be asked to fetch from origins. Their bytes do not arrive at once, so the
# receive window does not apply; it takes many of them to keep an origin busy.
_MOST_FETCHED: Final = 128 << 20
_MOST_FETCHES: Final = 4096


class BytesInFlight:
    """Bytes in flight from all peers, per lane. Used on the event loop."""

    def __init__(self, window: ReceiveWindow) -> None:
        self.window = window
        self.bytes = [0, 0]  # by lane
        # Do requests wait for room? Else blocks arrive at the rate of requests, which does not measure the link.
        self.has_waiting_requests = False
        self._fetches = 0  # blocks
        self._is_alone = False  # is a single peer asked for blocks that it has?

    def set_waiting(self, *, has_waiting_requests: bool) -> None:
        """Note whether requests wait for room."""
        self.has_waiting_requests = has_waiting_requests

    def add_batch(self, batch: PeerBatch) -> None:
        """Count a batch that was sent."""
        self.bytes[batch.lane] += batch.bytes_left
        self._fetches += len(batch.blocks) if batch.lane == FETCH_LANE else 0

    def note_waiting(self, peers: Sequence[Peer]) -> None:
        """Note the peers that have requests to send."""
        self._is_alone = len(peers) == 1 and peers[0].bytes_left(HELD_LANE) >= self.bytes[HELD_LANE]

    def should_wait_for_room(self, queue: deque[PendingBlock]) -> bool:
        """Return whether to wait until more of the queue fits into one request. Half the cost of a request does not
        depend on how many blocks it has."""
        size = self.window.single_peer_size if self._is_alone else self.window.size
        free = size - self.bytes[HELD_LANE]
        if 2 * free >= size or not self.bytes[HELD_LANE]:
            return False
        requested_bytes = 0
        for pending in queue:
            requested_bytes += pending.request.length
            if requested_bytes > free:
                return queue[0].request.length < size // 4
        return False

    def has_room(self, lane: int, length: int, before: int) -> bool:
        """Return whether a block of *length* bytes fits beside *before* bytes and those in flight. One block always
        fits."""
        in_flight = self.bytes[lane] + before
        if lane == HELD_LANE:
            return self.window.can_request(in_flight, length, is_single_peer=self._is_alone)
        return in_flight == 0 or (in_flight + length <= _MOST_FETCHED and self._fetches < _MOST_FETCHES)

    def release(self, batch: PeerBatch, blocks: int, size: int) -> None:
        """Count *blocks* of the batch, with *size* bytes in all, as no longer in flight."""
        batch.bytes_left -= size
        credit = min(batch.credited_bytes, size)
        batch.credited_bytes -= credit
        self.bytes[batch.lane] -= size - credit
        self._fetches -= blocks if batch.lane == FETCH_LANE else 0

    def credit_tail(self, batch: PeerBatch) -> None:
        """Stop counting the bytes of a large block once all but its tail has arrived."""
        credit = batch.bytes_left - min(batch.bytes_left, self.window.size // 2)
        batch.credited_bytes += credit
        self.bytes[batch.lane] -= credit
