"""Limits the bytes in flight that no reader waits for and no plan has announced.

These fetches share the connection to the origin with readers that wait, so they must be few: a block of 4 MiB takes
0.13 s from an origin of 40 MB/s, and 1.1 s together with ten others. But they must be enough to use what the origin can
deliver.
"""

from typing import Final

# Limit of the bytes in flight: what an origin delivers in this many seconds, but at least this many bytes.
IDLE_SECONDS: Final = 0.2
IDLE_BYTES: Final = 8 << 20
# The same while a reader waits.
BUSY_SECONDS: Final = 0.03
BUSY_BYTES: Final = 1 << 20
# Part of the best rate that is forgotten per second.
_FORGET: Final = 0.02


class BackgroundLimit:
    """Measures the rate of the origins, and derives the limit. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._since = now  # time of the last measurement
        self._bytes = 0  # delivered until then
        self._rate = 0.0  # best recent rate, in bytes per second

    def update_rate(self, delivered: int, now: float) -> None:
        """Update the rate. To be called about once a second. delivered: bytes since the start."""
        seconds = max(now - self._since, 1e-3)
        rate = (delivered - self._bytes) / seconds
        self._rate = max(rate, self._rate * max(0.0, 1 - _FORGET * seconds))
        self._since, self._bytes = now, delivered

    def max_in_flight(self, *, has_waiting_reader: bool) -> int:
        """Return the limit of bytes in flight. A block may exceed it where no other one is in flight."""
        if has_waiting_reader:
            return max(BUSY_BYTES, int(BUSY_SECONDS * self._rate))
        return max(IDLE_BYTES, int(IDLE_SECONDS * self._rate))
