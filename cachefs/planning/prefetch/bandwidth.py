"""What the origins of a node deliver together, measured while they are asked for all they can."""

from typing import Final

import numpy as np

# The part of each new measurement in the smoothed value.
_SMOOTHING: Final = 0.25


class Bandwidth:
    """What origins deliver when they are asked for all they can."""

    def __init__(self, now: float) -> None:
        """now: monotonic seconds."""
        self.value = np.inf  # bytes per second; infinite until it was measured
        self._since = now  # when it was measured last
        self._bytes = 0  # delivered until then
        self._busy = False  # whether all that is possible was asked for since then
        self._was_busy = False  # the same of the time before

    @property
    def has_more(self) -> bool:
        """Could more have been asked for, of late?"""
        return not (self._busy and self._was_busy)

    def idle(self) -> None:
        """More could have been asked for since the last measurement, so a low rate says nothing about the origins."""
        self._busy = False

    def measure(self, total: int, now: float) -> None:
        """To be called every second or so. total: bytes delivered since the start; now: monotonic seconds."""
        rate = (total - self._bytes) / max(now - self._since, 1e-3)
        if self._busy and self.value == np.inf:
            self.value = rate
        elif self._busy or self.value < rate:
            # More may land in a second than the origins deliver in one: what was on the way as it began.
            self.value += _SMOOTHING * (rate - self.value)
        self._since, self._bytes = now, total
        self._was_busy, self._busy = self._busy, True
