"""How long a fetch takes, and how much that varies."""

from typing import Final

# The part of each new measurement in the smoothed values.
_SMOOTHING: Final = 1 / 16


class Latency:
    """Smoothed as TCP smooths round-trip times (RFC 6298)."""

    def __init__(self, first: float) -> None:
        """first: seconds to start from, until fetches have been measured."""
        self.mean = first  # seconds of a fetch, from its slot until its block is in a tier
        self.deviation = first  # seconds by which a fetch differs from the mean, on average

    def measure(self, seconds: float) -> None:
        """A fetch has taken so long."""
        self.deviation += _SMOOTHING * (abs(seconds - self.mean) - self.deviation)
        self.mean += _SMOOTHING * (seconds - self.mean)
