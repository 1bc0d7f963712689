"""A model of the way to an object store: how long an answer takes to begin, and how fast it then comes.

No I/O in it; times are seconds of any one clock.
"""

import math
import random
from dataclasses import dataclass
from typing import Final

# Unused capacity of so many seconds may be caught up with: what the proxy loses by waking up late must not cost it.
CATCH_UP: Final = 0.05
# 99 % of a standard normal distribution lie below this.
Z_99: Final = 2.3263


@dataclass(frozen=True, slots=True)
class Limits:
    """What the way to the origin allows; 0 is no limit.

    latency: seconds from a request to the first byte of its answer, the median; latency_p99: its 99th percentile, of a
    log-normal distribution (0: no tail); stream_bandwidth, bandwidth: bytes per second of one connection and of all
    together; request_rate: requests per second, beyond which the answer is 503 SlowDown, as S3's is.
    """

    latency: float = 0
    latency_p99: float = 0
    stream_bandwidth: float = 0
    bandwidth: float = 0
    request_rate: float = 0


class Latency:
    """Draws first-byte latencies, always the same ones."""

    def __init__(self, limits: Limits) -> None:
        self._median = limits.latency
        tail = limits.latency_p99 > limits.latency > 0
        self._sigma = math.log(limits.latency_p99 / limits.latency) / Z_99 if tail else 0.0
        self._random = random.Random(0)

    def draw(self) -> float:
        return self._median * math.exp(self._random.gauss(0, self._sigma)) if self._sigma else self._median


class Pipe:
    """Capacity that is given away in the order in which it is asked for. rate: units per second, 0 for no limit."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free = -math.inf

    def reserve(self, amount: float, now: float) -> float:
        """When *amount* units that are ready *now* have passed."""
        if not self._rate:
            return now
        self._free = max(self._free, now - CATCH_UP) + amount / self._rate
        return self._free


class Turnstile:
    """Lets requests pass at a rate, and refuses those that come too fast. rate: per second, 0 for no limit."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        # A tenth of a second's worth at once.
        self._burst = max(1.0, rate / 10)
        self._tokens = self._burst
        self._when = -math.inf

    def admits(self, now: float) -> bool:
        if not self._rate:
            return True
        self._tokens = min(self._burst, self._tokens + (now - self._when) * self._rate)
        self._when = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
