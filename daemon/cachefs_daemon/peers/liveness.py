"""Whether a peer is asked: dead ones are not, but for a probe now and then, and busy ones are left alone for a moment.

A dead peer must not cost a timeout for each block that is asked of it. So one failure of its connection is enough to
ask it nothing more; from then on it is probed, on a connection of its own and with growing pauses, and asked again once
a probe has got through. A peer that says it is busy lives, and is counted apart.
"""

from typing import Final

# Seconds to the first probe after a failure, and to the next ones at most; they double. Up to a quarter is added at
# random, so that a cluster does not probe in step.
FIRST_PAUSE: Final = 0.25
LONGEST_PAUSE: Final = 30.0
_SPREAD: Final = 0.25
# Seconds for which a busy peer is not asked: at first, and at most.
FIRST_BUSY: Final = 0.02
LONGEST_BUSY: Final = 1.0


class Liveness:
    """Of one peer. *now* is seconds of one monotonic clock, *chance* a random number from 0 to 1."""

    __slots__ = ("_busy_pause", "_busy_until", "_pause", "cooling", "probe_at", "reason")

    def __init__(self) -> None:
        self.cooling = False
        self.reason = ""  # why it cools down
        self.probe_at = 0.0  # when it is to be probed, while it cools down
        self._pause = FIRST_PAUSE
        self._busy_until = 0.0
        self._busy_pause = FIRST_BUSY

    def is_busy(self, now: float) -> bool:
        """Has it said a moment ago that it is busy?"""
        return now < self._busy_until

    def failed(self, reason: str, now: float, chance: float) -> bool:
        """Its connection could not be made, broke, or fell silent. True where it was asked until now."""
        first = not self.cooling
        if first:
            self.cooling, self.reason = True, reason
            self._rest(now, chance)
        return first

    def probed(self, *, alive: bool, now: float, chance: float) -> None:
        """A probe has come to an end. Until it also gives blocks, its next failure costs it the next longer pause."""
        if alive:
            self.cooling = False
        else:
            self._rest(now, chance)

    def served(self) -> None:
        """It has answered a question."""
        self.cooling = False
        self._pause = FIRST_PAUSE

    def gave(self) -> None:
        """It has given a block."""
        self._busy_pause = FIRST_BUSY

    def busy(self, now: float) -> None:
        """It has said that it is busy."""
        if now >= self._busy_until:
            self._busy_until = now + self._busy_pause
            self._busy_pause = min(LONGEST_BUSY, 2 * self._busy_pause)

    def _rest(self, now: float, chance: float) -> None:
        self.probe_at = now + self._pause * (1 + _SPREAD * chance)
        self._pause = min(LONGEST_PAUSE, 2 * self._pause)
