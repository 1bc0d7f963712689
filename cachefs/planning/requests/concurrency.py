"""How many requests one server gets at once: additive increase, multiplicative decrease.

The number begins at its bound, since most servers take that many. A server that refuses requests as there are too many
halves it. A server that becomes much slower lowers it a little, and never below a quarter of the bound: others may be
the reason, and then fewer requests of ours would help nobody. The answers of one round together raise it by one.
"""

import math
from typing import Final

# Seconds after a decrease in which there is no other: requests that were sent before it are still answered.
HOLD: Final = 0.25
# What is left of the number when requests are refused, and when they take too long.
_REFUSED: Final = 0.5
_SLOWER: Final = 0.8
# Part of the bound below which slowness does not lower the number.
_FLOOR: Final = 0.25


class Concurrency:
    """*now* is seconds of one monotonic clock."""

    def __init__(self, most: int) -> None:
        """most: requests at once, never exceeded."""
        self.most = most
        self._width = float(most)
        self._cut = -math.inf  # when it was lowered last

    @property
    def width(self) -> int:
        """Requests that may be under way at once; at least 1."""
        return int(self._width)

    @property
    def is_lowered(self) -> bool:
        """Is it below its bound?"""
        return self._width < self.most

    def answered(self) -> None:
        """A request was answered as it should be."""
        self._width = min(float(self.most), self._width + 1 / self._width)

    def refused(self, needed: float, now: float) -> None:
        """The server has refused a request, as there are too many.

        needed: requests at once that the rate takes which the server allows, as far as that is known; else 0. Fewer
        would waste a part of that rate.
        """
        if now - self._cut >= HOLD:
            self._cut = now
            self._width = max(1.0, min(self._width, max(self._width * _REFUSED, needed)))

    def slower(self, now: float) -> None:
        """Answers take much longer than they did."""
        floor = max(1.0, self.most * _FLOOR)
        if now - self._cut >= HOLD and self._width > floor:
            self._cut = now
            self._width = max(floor, self._width * _SLOWER)
