"""Limits the concurrent requests to one server: additive increase, multiplicative decrease.

The limit begins at its bound, since most servers take that many. A refusal for too many requests halves it. A server
that becomes much slower lowers it a little, and never below a quarter of the bound: other clients may be the reason,
and then fewer requests would not help. The answers of one round together raise it by one.
"""

import math
from typing import Final

# Seconds after a decrease in which there is no other: requests that were sent before it are still answered.
HOLD_SECONDS: Final = 0.25
# Factors on the limit after a refusal, and after slow answers.
_REFUSED_FACTOR: Final = 0.5
_SLOWER_FACTOR: Final = 0.8
# Part of the bound below which slowness does not lower the number.
_MIN_SHARE: Final = 0.25


class AimdConcurrency:
    """The limit for one server. *now* is seconds of one monotonic clock."""

    def __init__(self, max_width: int) -> None:
        """max_width: requests at once, never exceeded."""
        self.max_width = max_width
        self._width = float(max_width)
        self._cut = -math.inf  # time of the last decrease

    @property
    def width(self) -> int:
        """Most requests that may be under way; at least 1."""
        return int(self._width)

    @property
    def is_lowered(self) -> bool:
        """True where the limit is below its bound."""
        return self._width < self.max_width

    def note_response(self) -> None:
        """Record a good answer."""
        self._width = min(float(self.max_width), self._width + 1 / self._width)

    def note_refusal(self, needed: float, now: float) -> None:
        """Record that the server has refused a request, as there are too many.

        needed: concurrent requests that the server's allowed rate takes, 0 where unknown. Fewer would waste a part of
        that rate.
        """
        if now - self._cut >= HOLD_SECONDS:
            self._cut = now
            self._width = max(1.0, min(self._width, max(self._width * _REFUSED_FACTOR, needed)))

    def note_slowdown(self, now: float) -> None:
        """Record that answers take much longer than before."""
        floor = max(1.0, self.max_width * _MIN_SHARE)
        if now - self._cut >= HOLD_SECONDS and self._width > floor:
            self._cut = now
            self._width = max(floor, self._width * _SLOWER_FACTOR)
