"""How many bytes may be on their way that nobody waits for and nobody has promised to read.

They share the connection to the origin with readers that wait, so they must be few: a block of 4 MiB comes in 0.13 s
from an origin of 40 MB/s, and with ten others in 1.1 s. But they must be enough for what the origin can deliver.
"""

from typing import Final

# Bytes on their way: those that an origin delivers in so many seconds, but so many at least.
QUIET_SECONDS: Final = 0.2
QUIET_BYTES: Final = 8 << 20
# The same while a reader waits.
BUSY_SECONDS: Final = 0.03
BUSY_BYTES: Final = 1 << 20
# What it has delivered at best is forgotten by so much a second.
_FORGET: Final = 0.02


class Background:
    """Learns what the origins deliver. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._since = now  # when it was measured last
        self._bytes = 0  # delivered until then
        self._rate = 0.0  # bytes per second, at best of late

    def measure(self, delivered: int, now: float) -> None:
        """To be called every second or so. delivered: bytes since the start."""
        seconds = max(now - self._since, 1e-3)
        rate = (delivered - self._bytes) / seconds
        self._rate = max(rate, self._rate * max(0.0, 1 - _FORGET * seconds))
        self._since, self._bytes = now, delivered

    def most(self, *, is_waited_for: bool) -> int:
        """Bytes that may be on their way. A block may be larger, where no other one is."""
        if is_waited_for:
            return max(BUSY_BYTES, int(BUSY_SECONDS * self._rate))
        return max(QUIET_BYTES, int(QUIET_SECONDS * self._rate))
