"""How many bytes are on the way from all peers together, and whether more may be asked for."""

from collections import deque
from typing import Final

from cachefs.planning.requests.receive_window import ReceiveWindow
from cachefs_daemon.peers.peer import FETCH, HERE, Ask, Batch

# Bytes and blocks that all peers together may be asked to bring from origins. They do not come at once, so the window
# has no say; it takes many of them to keep an origin busy.
_MOST_FETCHED: Final = 128 << 20
_MOST_FETCHES: Final = 4096


class InFlight:
    """Of all peers. Used on the event loop."""

    def __init__(self, window: ReceiveWindow) -> None:
        self.window = window
        self.bytes = [0, 0]  # by lane
        # Does anything wait for room? Only then do arrivals say how fast the link is: else they come as they are asked.
        self.is_short = False
        self._fetches = 0  # blocks

    def sent(self, batch: Batch) -> None:
        """It was asked."""
        self.bytes[batch.lane] += batch.bytes_left
        self._fetches += len(batch.asks) if batch.lane == FETCH else 0

    def is_worth_waiting(self, queue: deque[Ask]) -> bool:
        """Would the question be for a few of many blocks? Half of what a question costs is the same for each."""
        free, size = self.window.size - self.bytes[HERE], self.window.size
        if 2 * free >= size or not self.bytes[HERE]:
            return False
        wanted = 0
        for ask in queue:
            wanted += ask.wanted.length
            if wanted > free:
                return queue[0].wanted.length < size // 4
        return False

    def has_room(self, lane: int, length: int, before: int) -> bool:
        """For a block of *length* bytes, with *before* bytes more than are on the way now? One may always be."""
        in_flight = self.bytes[lane] + before
        if lane == HERE:
            return self.window.room(in_flight, length)
        return in_flight == 0 or (in_flight + length <= _MOST_FETCHED and self._fetches < _MOST_FETCHES)

    def release(self, batch: Batch, blocks: int, size: int) -> None:
        """So many blocks of it, with *size* bytes, are not on the way any more."""
        batch.bytes_left -= size
        credit = min(batch.credit, size)
        batch.credit -= credit
        self.bytes[batch.lane] -= size - credit
        self._fetches -= blocks if batch.lane == FETCH else 0

    def credit(self, batch: Batch) -> None:
        """All but the tail of a large block has come: what has come is not on the way any more."""
        credit = batch.bytes_left - min(batch.bytes_left, self.window.size // 2)
        batch.credit += credit
        self.bytes[batch.lane] -= credit
