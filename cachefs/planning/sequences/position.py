"""Where a consumer may be between its reports, and how far apart its tripwires are for that."""

import math
from typing import Final

from cachefs.planning.sequences.follower import Follower
from cachefs.planning.sequences.tripwires import Interval

# A mount reports once one of the first two has passed, or a part of the tiers was read (cachefs.mount.worker), but
# no sooner than the third. These times include the way of the report.
REPORT_SECONDS: Final = 0.12
REPORT_READS: Final = 64
SOONEST_REPORT_SECONDS: Final = 0.04
# Seconds from a report until the plan has what it says.
REPORT_TRAVELS: Final = 0.02

# A consumer that has said where it is does so again within this time.
HEARTBEAT_SECONDS: Final = 2.0
# One that does not move is taken to have stopped after so long.
UNSEEN_SECONDS: Final = 10.0
# Seconds in which the search for a silent reader goes on to grow.
LONGEST_SEARCH: Final = 16.0


class Position:
    """An estimate for one consumer. Its follower says where the consumer was when it was seen last. *now* is seconds,
    of the same clock in each call."""

    def __init__(self, follower: Follower, batch_size: int) -> None:
        self.follower = follower
        self.shortest_epoch = 0  # reads of the shortest epoch that is near, 0 while that is unknown
        self._batch_size = batch_size  # of its loader, in samples
        self._heard = -math.inf  # when it has last said where it is
        self._interval = Interval()
        self._place = (-1, 0)  # where it was last seen
        self._since = 0.0  # when it was first seen there

    def on_heartbeat(self, now: float) -> None:
        """The consumer has said where it is."""
        self._heard = now

    def margin(self, now: float, report_reads: float = math.inf) -> float:
        """Returns the seconds by which the consumer may be ahead of its place in the plan.

        Reads since the last report, the distance between its loader's workers as it was of late, and the batch that the
        next of them begins. While nothing is seen of it, as between two epochs, it may begin all that its loader has
        room for.
        report_reads: reads of a part of the tiers after which a mount reports at once (cachefs.messages.REPORT_SHARE).
        """
        follower = self.follower
        demand = follower.rate.demand
        if not follower.following or demand <= 0:
            return REPORT_SECONDS
        rested = min(self.unseen(now), follower.reorder_window)
        soonest, on_the_way = SOONEST_REPORT_SECONDS * demand, REPORT_TRAVELS * demand
        unreported = min(REPORT_SECONDS * demand, max(soonest, report_reads + on_the_way), REPORT_READS)
        return (unreported + follower.reach(unreported) + max(self._batch_size, rested)) / demand

    def tripwires(self, now: float) -> int:
        """Reads from one tripwire to the next; 0 while the consumer itself says how far it is."""
        self._interval.follow(self.follower.rate.value, self.shortest_epoch, now)
        return self._interval.now if now - self._heard >= HEARTBEAT_SECONDS else 0

    def left_out(self, now: float) -> int:
        """`tripwires` as they may still be from before, when they were closer."""
        return self._interval.left_out if self.tripwires(now) else 0

    def passed_by(self, now: float, seconds: float) -> int:
        """Reads, from its place in the plan on, that it has done by *seconds* after *now*, as far as its rate tells:
        no further than to its next tripwire, which would have shown, or than a report brings it."""
        return int(min(self.unseen(now), self.tripwires(now) or REPORT_READS) + seconds * self.follower.rate.value)

    def unseen(self, now: float) -> int:
        """Reads that it may have done since it was last seen to move, had it missed its tripwires."""
        follower = self.follower
        if not follower.begun or follower.rate.value <= 0:
            return 0
        if self._place != follower.place:
            self._since, self._place = now, follower.place
        return int(min(now - self._since, UNSEEN_SECONDS) * follower.rate.value)

    def searched(self, now: float) -> int:
        """Reads ahead within which its tripwires are to show. While none shows, the consumer may be beyond all of them,
        as after the daemon was away, and nobody knows its rate. So the search reaches twice as far with each second,
        until it overtakes the consumer."""
        unseen = self.unseen(now)
        silence = min(now - self._since, LONGEST_SEARCH) if unseen else 0.0
        return int(unseen * 2**silence)
