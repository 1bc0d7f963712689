"""Estimates a consumer's position between its reports, and sets the distance of its tripwires accordingly."""

import math
from typing import Final

from cachefs.planning.sequences.follower import SequenceFollower
from cachefs.planning.sequences.tripwires import TripwireInterval

# A mount reports after the first two of these, or after reads of a part of the tiers (cachefs.mount.processes.worker),
# but not before the third. The times include the transfer of the report.
REPORT_SECONDS: Final = 0.12
REPORT_READS: Final = 64
MIN_REPORT_SECONDS: Final = 0.04
# Seconds from a report until the plan has its content.
REPORT_TRAVEL_SECONDS: Final = 0.02

# A consumer that reports its position does so again within this time.
HEARTBEAT_SECONDS: Final = 2.0
# A consumer that does not move counts as stopped after this time.
UNSEEN_SECONDS: Final = 10.0
# Seconds for which the search for a silent reader grows.
MAX_SEARCH_SECONDS: Final = 16.0


class PositionEstimate:
    """The estimate for one consumer. Its follower knows where the consumer was last seen. *now* is seconds, of the same
    clock in each call."""

    def __init__(self, follower: SequenceFollower, batch_size: int) -> None:
        self.follower = follower
        self._shortest_epoch = 0  # reads of the shortest epoch nearby, 0 while unknown
        self._batch_size = batch_size  # of its loader, in samples
        self._heartbeat_at = -math.inf  # time of its last heartbeat
        self._interval = TripwireInterval()
        self._last_progress = (-1, 0)  # where it was last seen
        self._since = 0.0  # when it was first seen there

    def set_shortest_epoch(self, reads: int) -> None:
        """Set the number of reads of the shortest epoch nearby."""
        self._shortest_epoch = reads

    def on_heartbeat(self, now: float) -> None:
        """Record a heartbeat of the consumer."""
        self._heartbeat_at = now

    def margin(self, now: float, report_reads: float = math.inf) -> float:
        """Return the seconds by which the consumer may be ahead of its place in the plan.

        The sum of its reads since the last report, the recent distance between its loader's workers, and the batch that
        the next worker begins. While no read is observed, as between two epochs, it may begin all that its loader can
        hold. report_reads: reads of a part of the tiers after which a mount reports at once
        (cachefs.messages.REPORT_SHARE).
        """
        follower = self.follower
        demand = follower.rate.demand
        if not follower.is_following or demand <= 0:
            return REPORT_SECONDS
        rested = min(self.unseen_reads(now), follower.reorder_window)
        soonest, travelling = MIN_REPORT_SECONDS * demand, REPORT_TRAVEL_SECONDS * demand
        unreported = min(REPORT_SECONDS * demand, max(soonest, report_reads + travelling), REPORT_READS)
        return (unreported + follower.reach(unreported) + max(self._batch_size, rested)) / demand

    def tripwire_interval(self, now: float) -> int:
        """Return the reads from one tripwire to the next; 0 while the consumer itself reports its position."""
        self._interval.update(self.follower.rate.value, self._shortest_epoch, now)
        return self._interval.current if now - self._heartbeat_at >= HEARTBEAT_SECONDS else 0

    def left_out_interval(self, now: float) -> int:
        """Return the interval of tripwires still left out from before, when they were closer."""
        return self._interval.left_out if self.tripwire_interval(now) else 0

    def reads_done_within(self, now: float, seconds: float) -> int:
        """Return the reads, from its place in the plan on, that it has done by *seconds* after *now* at its rate: at
        most to its next tripwire, which would have been observed, or to the next report."""
        return int(
            min(self.unseen_reads(now), self.tripwire_interval(now) or REPORT_READS)
            + seconds * self.follower.rate.value
        )

    def unseen_reads(self, now: float) -> int:
        """Return the reads that it may have done since it was last seen to move, had it missed its tripwires."""
        follower = self.follower
        if not follower.has_begun or follower.rate.value <= 0:
            return 0
        if self._last_progress != follower.progress:
            self._since, self._last_progress = now, follower.progress
        return int(min(now - self._since, UNSEEN_SECONDS) * follower.rate.value)

    def search_distance(self, now: float) -> int:
        """Return the reads ahead within which its tripwires are expected. While none is read, the consumer may be
        beyond all of them, as after an outage of the daemon, at an unknown rate. The distance therefore doubles each
        second, until it overtakes the consumer."""
        unseen = self.unseen_reads(now)
        silence = min(now - self._since, MAX_SEARCH_SECONDS) if unseen else 0.0
        return int(unseen * 2**silence)
