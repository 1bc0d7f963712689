"""Chooses the rail for a request to a node that has several: its addresses, mostly one for each network card.

The rail on which the answer would arrive first is chosen. Bytes wait on both ends of a rail: at the card of the node
that sends, and at the card of this node, which all senders share. So the estimate is the longer of two times, each the
bytes in flight over the rate that was measured. Between rails that are nearly equal, the NUMA distance between card and
buffer decides, and then the rail that was used least recently, so that all of them are measured.

Joining the queue with the shortest expected delay is the rule of Mitzenmacher, "The Power of Two Choices in Randomized
Load Balancing" (IEEE TPDS 12(10), 2001), with all queues known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cachefs.planning.requests.receive_window import RecentBest

# Most rails of a node.
MAX_RAILS: Final = 8
# Factor on the shortest time within which another rail counts as equal.
NEAR_TIE: Final = 1.1
# Least seconds over which a rail's rate is measured.
_MIN_SPAN: Final = 0.02


@dataclass(frozen=True, slots=True)
class RailLoad:
    """The load of one rail. Rates are bytes per second, 0 where unknown."""

    # Bytes requested over the rail that have not arrived.
    in_flight: int = 0
    rate: float = 0.0
    # The same of the card of this node, with the bytes of all other nodes.
    card_in_flight: int = 0
    card_rate: float = 0.0
    # NUMA distance between the card and this process's buffers; 0 where the kernel does not tell it.
    distance: float = 0.0
    # When a request last took the rail, in seconds of any clock.
    used_at: float = 0.0
    # Whether the card's receive window has room for the request.
    has_room: bool = True


def choose_rail(rails: Sequence[RailLoad], length: int) -> int | None:
    """Return the index of the rail for a request of *length* bytes; None if it should wait for room on a rail that is
    faster than those that have room. *rails* is not empty."""
    # A rail or a card without a measurement counts as fast as the best one, so that requests take and measure it. With
    # no measurement at all, bytes alone say which rail has less to do.
    best_card_rate = max(rail.card_rate for rail in rails)
    best_rate = max(rail.rate for rail in rails) or best_card_rate or 1.0
    seconds = [
        max(
            (rail.in_flight + length) / (rail.rate or best_rate),
            (rail.card_in_flight + length) / (rail.card_rate or best_card_rate or best_rate),
        )
        for rail in rails
    ]
    limit = min(seconds) * NEAR_TIE
    near = [at for at, took in enumerate(seconds) if took <= limit and rails[at].has_room]
    known = [rails[at].distance for at in near if rails[at].distance]
    unknown_distance = sum(known) / len(known) if known else 0.0  # neither near nor far
    return min(
        near, key=lambda at: (rails[at].distance or unknown_distance, rails[at].used_at, seconds[at]), default=None
    )


class RailRate:
    """Measures what a rail delivers while bytes are in flight on it all the time: the best of the last seconds."""

    def __init__(self) -> None:
        self._best = RecentBest(0.0, largest=True)
        self._span_began: float | None = None
        self._span_bytes = 0

    def value(self, now: float) -> float:
        """Return the bytes per second; 0 if nothing was measured for a while."""
        return self._best.value if self._best.is_recent(now) else 0.0

    def note_request(self, now: float) -> None:
        """Record that bytes are in flight from now on."""
        if self._span_began is None:
            self._span_began, self._span_bytes = now, 0

    def note_received(self, count: int, now: float) -> None:
        """Count bytes that have arrived."""
        self._span_bytes += count
        if self._span_began is not None and now - self._span_began >= _MIN_SPAN:
            self._best.add(self._span_bytes / (now - self._span_began), now)
            self._span_began, self._span_bytes = now, 0

    def note_idle(self) -> None:
        """Record that nothing is in flight any more."""
        self._span_began = None
