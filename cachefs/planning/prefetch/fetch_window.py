"""Decides how far ahead of its readers a node fetches: from latency, bandwidth, late reads, and the backlog.

**Late reads** (`LearnedWindow`). Latency does not tell how reads arrive: a loader whose workers each read
a batch at once wants more in one moment than its rate says, and a busy machine begins fetches late. A read that waited
w seconds for its block would not have waited, had the fetch begun w seconds earlier. Late reads therefore widen the
window at once by the time they waited, and a long time without late reads narrows it slowly.

A wider window costs origin bytes: blocks fetched w seconds early take the place of w * d bytes of kept blocks, where d
is what readers take per second. With datasets of F bytes read in ever new orders, each byte less that is kept is read
from the origin once more per epoch, which lasts F / d seconds. Each second of window therefore costs d * d / F bytes
per second. The window is widened as long as that is less than the worth of the stalled seconds.

**Backlog** (`find_backlog`). The blocks needed last are evicted first, so the missing blocks of an epoch lie close
together: the first part of the epoch is all here, and of the part after it nothing is. Where readers would go through
the missing part faster than the origin delivers it, its fetches must begin during the first part. This is a schedule of
jobs with deadlines on one machine. In order of deadlines (Jackson's rule) all deadlines are met if, for each of them,
all that is due until then can be delivered until then. At 0.75 times the demand, with tiers for 35 % of the dataset, a
job stalled for 22 s in 176 s without this.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.presence import ABSENT, TierStates
from cachefs.planning.blocks.space import Ids
from cachefs.planning.cluster.ownership import OwnedMarks
from cachefs.planning.prefetch.lookahead import CachedReadFilter
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.timeline import Seconds

# Weight of each new measurement in the smoothed value.
_BANDWIDTH_SMOOTHING: Final = 0.25
# Most reads of an epoch that are considered. Of a longer epoch, every n-th read is taken.
_SAMPLED_READS: Final = 1 << 13
_ALL_READS: Final = 1 << 62
# Part of the measured bandwidth that is relied on.
_RELIABLE_SHARE: Final = 0.9
# Weight of each new measurement in the smoothed values.
_SMOOTHING: Final = 1 / 16
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


class Bandwidth:
    """The joint bandwidth of the origins."""

    def __init__(self, now: float) -> None:
        """now: monotonic seconds."""
        self.value = np.inf  # bytes per second; infinite before the first measurement
        self._since = now  # time of the last measurement
        self._bytes = 0  # delivered until then
        self._busy = False  # whether the origins were fully used since then
        self._was_busy = False  # the same for the time before

    @property
    def has_spare(self) -> bool:
        """True where more could have been requested recently."""
        return not (self._busy and self._was_busy)

    def note_idle(self) -> None:
        """Record that more could have been requested since the last measurement; a low rate is then meaningless."""
        self._busy = False

    def measure(self, total: int, now: float) -> None:
        """Update the value. To be called about once a second. total: bytes delivered since the start; now: monotonic
        seconds."""
        rate = (total - self._bytes) / max(now - self._since, 1e-3)
        if self._busy and self.value == np.inf:
            self.value = rate
        elif self._busy or self.value < rate:
            # Bytes in flight at the start of the second arrive in it too, so a rate may exceed what origins deliver.
            self.value += _BANDWIDTH_SMOOTHING * (rate - self.value)
        self._since, self._bytes = now, total
        self._was_busy, self._busy = self._busy, True


@dataclass(frozen=True, slots=True)
class Backlog:
    """Blocks of a job that must be fetched without a pause from now on: all missing blocks due within *seconds*."""

    # Seconds from now until the last block is due.
    seconds: float
    # Snapshot of the block that is due last.
    snapshot: str
    # Number of that block. Only blocks read after it may be evicted for the backlog: a block read earlier would be
    # missing instead.
    last_block: int


def find_backlog(parts: "Sequence[MissingReads]", bandwidth: float, lead: float = 0.0) -> Backlog | None:
    """Return which of the missing blocks to fetch from now on, or None where waiting does no harm yet.

    bandwidth: bytes per second; lead: seconds by which blocks must arrive before they are due.
    """
    parts = [part for part in parts if len(part.seconds)]
    if not parts or bandwidth <= 0:
        return None
    due = np.concatenate([part.seconds for part in parts])
    order = np.argsort(due, kind="stable")
    sizes = np.concatenate([part.sizes for part in parts])[order]
    late = np.flatnonzero(due[order] - lead - np.cumsum(sizes) / (_RELIABLE_SHARE * bandwidth) < 0)
    if not len(late):
        return None
    last = int(order[late[-1]])
    whose = np.repeat(np.arange(len(parts)), [len(part.seconds) for part in parts])[last]
    blocks = np.concatenate([part.blocks for part in parts])
    return Backlog(float(due[last]), parts[whose].snapshot, int(blocks[last]))


@dataclass(frozen=True, slots=True)
class MissingReads:
    """Missing blocks that one consumer reads, as three arrays with one element per block."""

    consumer: str
    snapshot: str
    # Numbers in the snapshot's block space.
    blocks: Ids
    # Seconds until the first read of each.
    seconds: Seconds
    # Bytes that each stands for: its own, and those of the skipped reads near it.
    sizes: npt.NDArray[np.float64]


def find_missing_reads(
    plan: Plan, states: TierStates, owned: Mapping[str, OwnedMarks], is_cached: CachedReadFilter | None = None
) -> Iterator[MissingReads]:
    """Yield the blocks that consumers read and that are not on the node, each for the consumer that reads it first.

    Takes 15 ms with 8 consumers, however much they read. states: by snapshot, the state of each of its blocks (uint8,
    see Presence.states); owned: which blocks are this node's to keep (others come from other nodes, whatever the origin
    delivers); is_cached: tells which reads need no block.
    """
    for consumer in plan.consumers():
        snapshot, _ = plan.generation(consumer)
        state = states.get(snapshot)
        start = 0
        while state is not None and (window := plan.window(consumer, start, _ALL_READS)) is not None:
            stride = 1 + len(window.blocks) // _SAMPLED_READS
            reads = np.arange(0, len(window.blocks), stride)
            reads = reads[state[window.blocks[::stride]] == ABSENT]
            blocks = window.blocks[reads]
            if snapshot in owned:
                ours = owned[snapshot][blocks]
                reads, blocks = reads[ours], blocks[ours]
            coming = plan.is_coming(consumer, window.start + reads, blocks)
            reads, blocks = reads[coming], blocks[coming]
            due = np.asarray(window.seconds + window.period * reads, np.float64)
            if is_cached is not None and len(reads):
                wanted = ~is_cached(consumer, snapshot, blocks, due)
                blocks, due = blocks[wanted], due[wanted]
            # Later reads of a block, also by other consumers, find it here after its first read.
            first = due <= plan.next_use_of(snapshot, blocks) + 1e-6
            sizes = np.multiply(plan.spaces[snapshot].sizes[blocks[first]], stride, dtype=np.float64)
            yield MissingReads(consumer, snapshot, blocks[first], due[first], sizes)
            start = window.start + len(window.blocks)


class FetchLatency:
    """Smooths latencies as TCP smooths round-trip times (RFC 6298)."""

    def __init__(self, first: float) -> None:
        """first: initial value in seconds, before any fetch was measured."""
        self.mean = first  # mean seconds of a fetch, from its permit until its block is in a tier
        self.deviation = first  # mean difference from `mean`, in seconds

    def measure(self, seconds: float) -> None:
        """Add the latency of a fetch."""
        self.deviation += _SMOOTHING * (abs(seconds - self.mean) - self.deviation)
        self.mean += _SMOOTHING * (seconds - self.mean)


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
