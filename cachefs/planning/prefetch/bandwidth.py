"""Measures the joint bandwidth of a node's origins while as much as possible is requested of them."""

from typing import Final

import numpy as np

# Weight of each new measurement in the smoothed value.
_SMOOTHING: Final = 0.25


class Bandwidth:
    """The joint bandwidth of the origins."""

    def __init__(self, now: float) -> None:
        """now: monotonic seconds."""
        self.value = np.inf  # bytes per second; infinite before the first measurement
        self._since = now  # time of the last measurement
        self._bytes = 0  # delivered until then
        self._busy = False  # whether the origins were fully used since then
        self._was_busy = False  # the same for the time before

    @property
    def has_spare(self) -> bool:
        """True where more could have been requested recently."""
        return not (self._busy and self._was_busy)

    def note_idle(self) -> None:
        """Record that more could have been requested since the last measurement; a low rate is then meaningless."""
        self._busy = False

    def measure(self, total: int, now: float) -> None:
        """Update the value. To be called about once a second. total: bytes delivered since the start; now: monotonic
        seconds."""
        rate = (total - self._bytes) / max(now - self._since, 1e-3)
        if self._busy and self.value == np.inf:
            self.value = rate
        elif self._busy or self.value < rate:
            # Bytes in flight at the start of the second arrive in it too, so a rate may exceed what origins deliver.
            self.value += _SMOOTHING * (rate - self.value)
        self._since, self._bytes = now, total
        self._was_busy, self._busy = self._busy, True
