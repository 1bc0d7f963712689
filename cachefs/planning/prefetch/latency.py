"""Measures the latency of fetches, and its variation."""

from typing import Final

# Weight of each new measurement in the smoothed values.
_SMOOTHING: Final = 1 / 16


class FetchLatency:
    """Smooths latencies as TCP smooths round-trip times (RFC 6298)."""

    def __init__(self, first: float) -> None:
        """first: initial value in seconds, before any fetch was measured."""
        self.mean = first  # mean seconds of a fetch, from its permit until its block is in a tier
        self.deviation = first  # mean difference from `mean`, in seconds

    def measure(self, seconds: float) -> None:
        """Add the latency of a fetch."""
        self.deviation += _SMOOTHING * (abs(seconds - self.mean) - self.deviation)
        self.mean += _SMOOTHING * (seconds - self.mean)
