"""How many bytes reads ahead of one server may have under way: what keeps its link busy, and little more.

Requests that are under way at once share the link. With 64 of 4 MiB on a link of 40 MB/s all of them come after 6 s,
and so does what is needed first, and what a reader comes to wait for. So they get what the server delivers in the time
that its answers take at their best, which grows as long as it delivers more (Little's law; the model of a path is that
of BBR: Cardwell et al., "Congestion-Based Congestion Control", ACM Queue 2016).
"""

import math
from typing import Final

# At first, and at least: two blocks of the default size, or requests enough where files are small.
LEAST: Final = 8 << 20
# Times what would be under way if no answer took longer than at its best. So it grows with each round in which none
# did, and of a link with nobody else on it three quarters and more are used (simulated; with 2.5 times, two thirds).
_HEADROOM: Final = 4.0
# A round ends when so much has come as was under way, and so many seconds have passed.
_ROUND_SECONDS: Final = 0.02
# The highest of late is forgotten by this part a second.
_FORGET: Final = 0.02
# Seconds after which the best time of before is forgotten, at least; at most twice as many.
_REMEMBERED: Final = 60.0


class AheadBytes:
    """*now* is seconds of one monotonic clock."""

    __slots__ = ("_best", "_busy", "_came", "_earlier", "_needed", "_round", "_since")

    def __init__(self) -> None:
        # Of requests by the number of binary digits of their bytes: the shortest seconds since `_since`, and before.
        self._best: dict[int, float] = {}
        self._earlier: dict[int, float] = {}
        self._since = -math.inf
        # Bytes that would be under way if no answer took longer than at its best, at most of late.
        self._needed = 0.0
        # Of this round: when it began; bytes that have come; and these times the seconds of their best answers.
        self._round = math.inf
        self._came = 0
        self._busy = 0.0

    @property
    def most(self) -> float:
        """Bytes that reads ahead may have under way; one read may be larger where there is no other."""
        return max(float(LEAST), _HEADROOM * self._needed)

    def answered(self, size: int, seconds: float, now: float) -> None:
        """A request for *size* bytes was answered as it should be, after so many *seconds*."""
        if now - self._since >= _REMEMBERED:
            self._earlier, self._best, self._since = self._best, {}, now
        kind = size.bit_length()
        self._best[kind] = min(seconds, self._best.get(kind, math.inf))
        self._round = min(self._round, now - seconds)
        self._came += size
        self._busy += size * min(self._best[kind], self._earlier.get(kind, math.inf))
        if self._came >= self.most and now - self._round >= _ROUND_SECONDS:
            took = now - self._round
            self._needed = max(self._busy / took, self._needed * max(0.0, 1 - _FORGET * took))
            self._round, self._came, self._busy = now, 0, 0.0
