"""How much further ahead to fetch than latency alone asks for, learned from reads that came too late.

The latency of fetches says how long one takes, not how readers come: a loader whose workers each read a batch at once
wants more in one moment than its rate says, and a busy machine begins fetches late. A read that waited w seconds for
its block would not have waited, had the fetch begun w seconds earlier. So late reads widen the window at once by what
they waited, and a long time without any narrows it slowly.

What a wider window costs: blocks fetched w seconds early take the place of w * d bytes of blocks that are kept, where d
is what readers take per second. Of datasets of F bytes that are read in ever new orders, every byte that is kept less
is read from the origin once more per epoch, which lasts F / d seconds. So each second of window costs d * d / F bytes
per second. A wider window is taken as long as that is less than what the stalled seconds are worth.
"""

from collections.abc import Sequence
from typing import Final

# Seconds after the last late read when the window begins to narrow.
QUIET: Final = 20.0
# Seconds in which it then narrows by half.
HALF_LIFE: Final = 30.0
# Seconds over which stalls are set against what a wider window costs.
PERIOD: Final = 60.0
# Of so many reads one may come late: latencies have long tails, and blocks fetched earlier cost bytes.
TOLERATED: Final = 500
# Seconds after which a read counts half for that.
_MEMORY: Final = 20.0
# A wait of less than this is no stall: the block was about to come.
_SHORTEST: Final = 0.005


class LearnedWindow:
    """Seconds on top of what margin and latency ask for. *now* is seconds of one monotonic clock."""

    def __init__(self, worth: float) -> None:
        """worth: bytes from the origin that a second of stall is worth."""
        self._worth = worth
        self._extra = 0.0  # seconds, as of `_since`
        self._since = 0.0
        self._settled = 0.0  # until then reads come late whose fetches began before the window was widened
        self._step = 0.0  # seconds by which it was widened then
        self._last = -QUIET  # when it was last widened
        self._reads = 0.0  # that were done of late, as of `_counted`
        self._late = 0.0  # of them, those that came late
        self._counted = 0.0

    def extra(self, now: float) -> float:
        """Seconds to fetch further ahead."""
        quiet = now - max(self._since, self._last + QUIET)
        return self._extra * 0.5 ** (quiet / HALF_LIFE) if quiet > 0 else self._extra

    def late(self, waits: Sequence[float], reads: int, window: float, cost: float, now: float) -> None:
        """Of so many reads of planned blocks, some have waited so many seconds each, though more could have been asked
        of the origin.

        window: seconds ahead that are fetched now, all in all; cost: bytes per second from the origin that one more
        second of window takes.
        """
        waits = [wait for wait in waits if wait >= _SHORTEST]
        if not self._count(reads, len(waits), now) or not waits:
            return
        self._late = 0.0  # what has widened it once does not widen it again
        wider = sum(waits) / len(waits)
        if now < self._settled:
            wider -= self._step  # so much has been done about it
        worth = self._worth * sum(waits)
        affordable = worth / (cost * PERIOD) if cost > 0 else wider
        step = min(wider, affordable)
        self._extra, self._since, self._last = self.extra(now), now, now
        if step <= 0:
            return
        self._extra += step
        self._step = step + (self._step if now < self._settled else 0.0)
        self._settled = now + window + step

    def _count(self, reads: int, late: int, now: float) -> bool:
        """Do more reads come late than may?"""
        faded = 0.5 ** ((now - self._counted) / _MEMORY)
        self._reads, self._late, self._counted = self._reads * faded + reads, self._late * faded + late, now
        return self._late * TOLERATED > self._reads
