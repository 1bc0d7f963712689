"""The pause between attempts: it doubles with each failure in a row, up to a bound."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

# Doublings after which a pause is at its bound in any case: 2.0 ** 1024 overflows.
_MAX_DOUBLINGS = 64


@dataclass(slots=True)
class Backoff:
    """Counts failures in a row, and computes when the next attempt is due. Times are seconds of the caller's clock."""

    # The pause after the first failure, and the longest one.
    first: float
    longest: float
    # Least and largest part of a pause that is waited, so that clients that failed together do not return together.
    spread: tuple[float, float] = (1.0, 1.0)
    # Draws a number evenly from a range.
    draw: Callable[[float, float], float] = random.uniform
    failures: int = 0
    # When the next attempt is due.
    until: float = -math.inf

    @property
    def pause(self) -> float:
        """The pause after this many failures, before a part of it is drawn."""
        doublings = min(max(0, self.failures - 1), _MAX_DOUBLINGS)
        return min(self.longest, self.first * 2.0**doublings)

    def note_failure(self, now: float) -> float:
        """Count a failure. Return the seconds until the next attempt."""
        self.failures += 1
        return self.restart_pause(now)

    def restart_pause(self, now: float) -> float:
        """Begin the pause anew without another failure. Return the seconds until the next attempt."""
        seconds = self.pause * self.draw(*self.spread)
        self.until = now + seconds
        return seconds

    def reset(self) -> None:
        """Record a success: the next attempt is due, and the next pause is the first one."""
        self.failures, self.until = 0, -math.inf

    def forget_failures(self) -> None:
        """Record a success during a pause, which goes on: the next pause is the first one."""
        self.failures = 0

    def is_due(self, now: float) -> bool:
        """Return whether the pause is over."""
        return now >= self.until
