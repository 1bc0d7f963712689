"""Measures the load of this node's links, and their recent peak rates."""

import math
from typing import Final

from cachefs.observe_messages import Load

# Seconds in which a peak decays to half: a link that got slower shows within a quarter of an hour. Seconds with less
# than _IN_USE of the peak do not count: an unused link is as fast as it was.
HALF_LIFE: Final = 600.0
_IN_USE: Final = 0.01
# Seconds over which the present rate is averaged, about.
_AVERAGED: Final = 5.0


class Meter:
    """One flow of bytes."""

    def __init__(self) -> None:
        self.rate = 0.0  # bytes per second, recently
        self.peak = 0.0  # the most bytes in one second
        self._total = 0
        self._seen: float | None = None  # monotonic seconds

    def count(self, total: int, now: float) -> None:
        """Record that *total* bytes have come since the start; now: monotonic seconds."""
        if self._seen is not None and now > self._seen:
            seconds = now - self._seen
            rate = max(0, total - self._total) / seconds
            if rate >= _IN_USE * self.peak:
                self.peak = max(rate, self.peak * math.exp2(-seconds / HALF_LIFE))
            self.rate += (1 - math.exp(-seconds / _AVERAGED)) * (rate - self.rate)
        self._total, self._seen = total, now


class LoadMeter:
    """The flows of a node."""

    def __init__(self) -> None:
        self._fetched, self._received, self._given = Meter(), Meter(), Meter()

    def count(self, fetched: int, received: int, given: int, now: float) -> None:
        """Record bytes since the start: from origins, from other nodes, to other nodes."""
        self._fetched.count(fetched, now)
        self._received.count(received, now)
        self._given.count(given, now)

    def load(self, demand: float) -> Load:
        """Return the load. demand: bytes per second that jobs read."""
        return Load(
            origin_rate=self._fetched.peak,
            peer_rate=self._received.peak,
            fetched=self._fetched.rate,
            received=self._received.rate,
            given=self._given.rate,
            demand=demand,
        )
