"""Limits the bytes of readahead under way from one server to what keeps its link busy, and little more.

Concurrent requests share the link. With 64 requests of 4 MiB on a link of 40 MB/s all of them come after 6 s, and so do
blocks that are needed first, and blocks that a reader waits for. Readahead therefore gets what the server delivers in
the time that its answers take at their best, which grows as long as it delivers more (Little's law; the model of a path
is that of BBR: Cardwell et al., "Congestion-Based Congestion Control", ACM Queue 2016).
"""

import math
from typing import Final

# Initial and least value: two blocks of the default size, or requests enough where files are small.
MIN_BYTES: Final = 8 << 20
# Factor on the bytes that would be under way if each answer took its best time. The limit therefore grows with each
# round in which all do, and three quarters and more of a link without other traffic are used (simulated; with 2.5, two
# thirds).
_HEADROOM: Final = 4.0
# A round ends when as many bytes have come as were under way, and at least after this time.
_ROUND_SECONDS: Final = 0.02
# Part of the recent maximum that is forgotten per second.
_FORGET: Final = 0.02
# Least seconds after which an earlier best time is forgotten; at most twice as many.
_REMEMBERED: Final = 60.0


class ReadaheadLimit:
    """The limit for one server. *now* is seconds of one monotonic clock."""

    __slots__ = ("_best", "_busy", "_earlier", "_needed", "_received", "_round", "_since")

    def __init__(self) -> None:
        # By number of binary digits of a request's bytes: the shortest seconds since `_since`, and before.
        self._best: dict[int, float] = {}
        self._earlier: dict[int, float] = {}
        self._since = -math.inf
        # Recent maximum of the bytes that would be under way if each answer took its best time.
        self._needed = 0.0
        # The current round: its begin; bytes that have come; sum of bytes times seconds of their best answers.
        self._round = math.inf
        self._received = 0
        self._busy = 0.0

    @property
    def max_bytes(self) -> float:
        """Most bytes that readahead may have under way; a single read may exceed them."""
        return max(float(MIN_BYTES), _HEADROOM * self._needed)

    def note_response(self, size: int, seconds: float, now: float) -> None:
        """Record a good answer to a request for *size* bytes after *seconds*."""
        if now - self._since >= _REMEMBERED:
            self._earlier, self._best, self._since = self._best, {}, now
        kind = size.bit_length()
        self._best[kind] = min(seconds, self._best.get(kind, math.inf))
        self._round = min(self._round, now - seconds)
        self._received += size
        self._busy += size * min(self._best[kind], self._earlier.get(kind, math.inf))
        if self._received >= self.max_bytes and now - self._round >= _ROUND_SECONDS:
            took = now - self._round
            self._needed = max(self._busy / took, self._needed * max(0.0, 1 - _FORGET * took))
            self._round, self._received, self._busy = now, 0, 0.0
