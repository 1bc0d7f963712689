"""Learns from late reads how much further ahead to fetch than latency alone asks for.

The latency of fetches does not tell how reads arrive: a loader whose workers each read a batch at once wants more in
one moment than its rate says, and a busy machine begins fetches late. A read that waited w seconds for its block would
not have waited, had the fetch begun w seconds earlier. Late reads therefore widen the window at once by the time they
waited, and a long time without late reads narrows it slowly.

A wider window costs origin bytes: blocks fetched w seconds early take the place of w * d bytes of kept blocks, where d
is what readers take per second. With datasets of F bytes read in ever new orders, each byte less that is kept is read
from the origin once more per epoch, which lasts F / d seconds. Each second of window therefore costs d * d / F bytes
per second. The window is widened as long as that is less than the worth of the stalled seconds.
"""

from collections.abc import Sequence
from typing import Final

# Seconds after the last late read when the window begins to narrow.
QUIET_SECONDS: Final = 20.0
# Seconds in which it narrows by half.
HALF_LIFE_SECONDS: Final = 30.0
# Seconds over which stalls are set against what a wider window costs.
COST_PERIOD_SECONDS: Final = 60.0
# One late read in this many is tolerated: latencies have long tails, and blocks fetched earlier cost bytes.
TOLERATED_READS: Final = 500
# Seconds after which a read has half its weight in that ratio.
_HALF_WEIGHT_SECONDS: Final = 20.0
# Shorter waits are no stalls: the block was about to arrive.
_MIN_WAIT_SECONDS: Final = 0.005


class LearnedWindow:
    """The learned seconds, in addition to margin and latency. *now* is seconds of one monotonic clock."""

    def __init__(self, worth: float) -> None:
        """worth: bytes from the origin that a second of stall is worth."""
        self._worth = worth
        self._extra = 0.0  # seconds, as of `_since`
        self._since = 0.0
        self._settled = 0.0  # until then, reads may be late whose fetches began before the window was widened
        self._step = 0.0  # seconds by which it was widened last
        self._last = -QUIET_SECONDS  # when it was last widened
        self._reads = 0.0  # decayed number of reads, as of `_counted`
        self._late = 0.0  # decayed number of late ones
        self._counted = 0.0

    def extra_seconds(self, now: float) -> float:
        """Return the seconds to fetch further ahead."""
        quiet = now - max(self._since, self._last + QUIET_SECONDS)
        return self._extra * 0.5 ** (quiet / HALF_LIFE_SECONDS) if quiet > 0 else self._extra

    def note_late_reads(self, waits: Sequence[float], reads: int, window: float, cost: float, now: float) -> None:
        """Record late reads that occurred although more could have been requested of the origin: how long each waited,
        in seconds, and how many planned reads there were in all.

        window: current seconds ahead in all; cost: bytes per second from the origin that one more second of window
        takes.
        """
        waits = [wait for wait in waits if wait >= _MIN_WAIT_SECONDS]
        if not self._count_late_reads(reads, len(waits), now) or not waits:
            return
        self._late = 0.0  # each late read widens the window only once
        wider = sum(waits) / len(waits)
        if now < self._settled:
            wider -= self._step  # already widened by this much
        worth = self._worth * sum(waits)
        affordable = worth / (cost * COST_PERIOD_SECONDS) if cost > 0 else wider
        step = min(wider, affordable)
        self._extra, self._since, self._last = self.extra_seconds(now), now, now
        if step <= 0:
            return
        self._extra += step
        self._step = step + (self._step if now < self._settled else 0.0)
        self._settled = now + window + step

    def _count_late_reads(self, reads: int, late: int, now: float) -> bool:
        """Update the counts. Returns whether more reads are late than tolerated."""
        faded = 0.5 ** ((now - self._counted) / _HALF_WEIGHT_SECONDS)
        self._reads, self._late, self._counted = self._reads * faded + reads, self._late * faded + late, now
        return self._late * TOLERATED_READS > self._reads
