"""Models a slow link to an object store: the delay of a response, and its rate.

The model does no I/O. All times are seconds of one clock, which the caller chooses.
"""

import math
import random
from dataclasses import dataclass
from typing import Final

# Capacity unused during the last CATCH_UP_SECONDS may be used later: the proxy sometimes wakes up late, which
# must not lower its rate.
CATCH_UP_SECONDS: Final = 0.05
# 99 % of a standard normal distribution lie below this.
Z_99: Final = 2.3263


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Limits of the link to the origin. 0 means no limit."""

    latency: float = 0  # seconds from a request to the first byte of its answer, the median
    latency_p99: float = 0  # seconds, the 99th percentile of a log-normal distribution; 0: every answer takes `latency`
    stream_bandwidth: float = 0  # bytes per second of one connection
    bandwidth: float = 0  # bytes per second of all connections together
    slow_share: float = 0  # share of responses that take `slow_factor` times as long to begin
    slow_factor: float = 1
    request_rate: float = 0  # requests per second; further ones get 503 SlowDown, as from S3


class LatencyModel:
    """Draws latencies of first bytes. Each instance draws the same sequence."""

    def __init__(self, limits: LinkLimits) -> None:
        self._median = limits.latency
        tail = limits.latency_p99 > limits.latency > 0
        self._sigma = math.log(limits.latency_p99 / limits.latency) / Z_99 if tail else 0.0
        self._share, self._factor = limits.slow_share, limits.slow_factor
        self._random = random.Random(0)

    def draw_latency(self) -> float:
        """Return the next latency in seconds."""
        usual = self._median * math.exp(self._random.gauss(0, self._sigma)) if self._sigma else self._median
        return usual * self._factor if self._share and self._random.random() < self._share else usual


class SharedLink:
    """A link's capacity, granted in order of request."""

    def __init__(self, rate: float) -> None:
        """rate: units per second; 0: no limit."""
        self._rate = rate
        self._free = -math.inf  # when all reservations so far have passed

    def reserve_time(self, amount: float, now: float) -> float:
        """Return the time at which *amount* units that are ready *now* have passed."""
        if not self._rate:
            return now
        self._free = max(self._free, now - CATCH_UP_SECONDS) + amount / self._rate
        return self._free


class TokenBucket:
    """Admits requests at a rate, and refuses faster ones."""

    def __init__(self, rate: float) -> None:
        """rate: requests per second; 0: no limit."""
        self._rate = rate
        self._burst = max(1.0, rate / 10)  # requests admitted at once: those of a tenth of a second
        self._tokens = self._burst  # requests that may be admitted now
        self._when = -math.inf  # the time of the last request

    def try_admit(self, now: float) -> bool:
        """Return whether a request that arrives *now* is admitted, and count it if so."""
        if not self._rate:
            return True
        self._tokens = min(self._burst, self._tokens + (now - self._when) * self._rate)
        self._when = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
