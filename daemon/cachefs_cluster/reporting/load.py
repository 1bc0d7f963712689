"""Measures the load of this node's links, and their recent peak rates."""

import math
from typing import Final

from cachefs.observe_messages import NodeLoad

# Seconds in which a peak decays to half: a link that got slower shows within a quarter of an hour. Seconds with less
# than _IN_USE_SHARE of the peak do not count: an unused link is as fast as it was.
HALF_LIFE: Final = 600.0
_IN_USE_SHARE: Final = 0.01
# Seconds over which the present rate is averaged, about.
_AVERAGE_SECONDS: Final = 5.0


class RateMeter:
    """One flow of bytes."""

    def __init__(self) -> None:
        self.rate = 0.0  # bytes per second, recently
        self.peak = 0.0  # the most bytes in one second
        self._total = 0
        self._counted_at: float | None = None  # monotonic seconds

    def add_total(self, total: int, now: float) -> None:
        """Record that *total* bytes have come since the start; now: monotonic seconds."""
        if self._counted_at is not None and now > self._counted_at:
            seconds = now - self._counted_at
            rate = max(0, total - self._total) / seconds
            if rate >= _IN_USE_SHARE * self.peak:
                self.peak = max(rate, self.peak * math.exp2(-seconds / HALF_LIFE))
            self.rate += (1 - math.exp(-seconds / _AVERAGE_SECONDS)) * (rate - self.rate)
        self._total, self._counted_at = total, now


class LoadMeter:
    """The flows of a node."""

    def __init__(self) -> None:
        self._fetched, self._received, self._sent = RateMeter(), RateMeter(), RateMeter()

    def add_totals(self, fetched: int, received: int, sent: int, now: float) -> None:
        """Record bytes since the start: from origins, from other nodes, to other nodes."""
        self._fetched.add_total(fetched, now)
        self._received.add_total(received, now)
        self._sent.add_total(sent, now)

    def load(self, demand: float) -> NodeLoad:
        """Return the load. demand: bytes per second that jobs read."""
        return NodeLoad(
            origin_rate=self._fetched.peak,
            peer_rate=self._received.peak,
            fetched=self._fetched.rate,
            received=self._received.rate,
            given=self._sent.rate,
            demand=demand,
        )
