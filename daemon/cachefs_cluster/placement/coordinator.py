"""Chooses the group that leads the decisions about a snapshot's copies, and announces schedules for them, and whether
the snapshot is hot.

Every node has a coordinator, which follows the announcement with the highest serial. On the first node (by id) that has
a consumer of the snapshot it issues announcements. Every node passes on the one that it follows: when the issuer goes,
the next node continues from there.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from cachefs.planning.cluster.copies import is_hot
from cachefs.planning.cluster.schedule import (
    Announcement,
    EpochSchedule,
    GroupClock,
    GroupPace,
    LeaderCandidate,
    choose_leader,
    leader_timing,
    order_timings,
    schedules_differ,
)
from cachefs.planning.sequences.sampler_spec import MAX_EPOCHS
from cachefs_cluster.placement.group_orders import is_epoch_known
from cachefs_cluster.placement.groups import ConsumerGroup
from cachefs_cluster.placement.snapshot_context import EpochPosition

# Part of an epoch that passes until all nodes know an announcement: blocks read before stay where they are.
NOTICE: Final = 0.05
# Epochs of the leader by which groups may drift apart, and part of an epoch after which they are compared again.
MAX_DRIFT: Final = 0.1
# Most epochs ahead that are looked up for a group that publishes its orders one by one.
_MAX_KNOWN: Final = 16

Positions = Callable[[ConsumerGroup], Sequence[EpochPosition]]
SlowestPosition = Callable[[ConsumerGroup], EpochPosition]


class Coordinator:
    """Coordinates one snapshot. Used on the event loop."""

    def __init__(
        self, me: str, positions_of: Positions, slowest_position: SlowestPosition, lead_seconds: Callable[[], float]
    ) -> None:
        """me: id of this node. slowest_position: returns the position of the slowest consumer of a group. lead_seconds:
        returns by how much earlier than they are read blocks may change hands, as nodes fetch them ahead."""
        self.announcement = Announcement()
        self._me = me
        self._positions_of = positions_of
        self._slowest_position = slowest_position
        self._lead_seconds = lead_seconds
        self._clocks: dict[str, GroupClock] = {}  # by digest of the group, on the clock of `_clocks_of`
        self._clocks_of = 0, ""  # term, and digest of the group that leads
        self._progress = 0.0  # epochs done by the slowest consumer of the leader
        self._lead = 0.0  # epochs of the leader by which blocks change hands before they are read
        self._announced_at = 0.0  # `_progress` at the latest announcement

    def follow(self, announcement: Announcement) -> bool:
        """Follow the announcement of another node, if it outranks the one that this node follows. Returns whether it
        does."""
        is_newer = announcement.outranks(self.announcement)
        if is_newer:
            self.announcement = announcement
        return is_newer

    def find_leader(self, groups: Sequence[ConsumerGroup]) -> ConsumerGroup | None:
        """Return the group that leads; None if there is none, or its consumers are not known here."""
        named = [group for group in groups if group.name == self.announcement.leader]
        digests = [schedule.groups[0].group for schedule in self.announcement.schedules]
        return next((group for group in named if group.digest in digests), named[0] if named else None)

    def issue(
        self,
        groups: Sequence[ConsumerGroup],
        eligible: Sequence[ConsumerGroup],
        sizes: Mapping[str, int],
        block_reads: float | None = None,
    ) -> bool:
        """Announce what has changed, if this node is the issuer. Returns whether anything has. Call several times a
        second.

        groups: all that read the snapshot, of nodes that count for placement; eligible: those whose reads may decide;
        sizes: number of blocks that each may read, by digest. block_reads: reads of each block per second, by all of
        them; None: unknown.
        """
        before, last = self.announcement, self.find_leader(eligible)
        self._follow_progress(self.find_leader(groups))
        if self._me != min((node for group in groups for node in group.nodes), default=""):
            return False
        self._announce_schedules({group.digest: group for group in eligible}, last, sizes)
        hot = is_hot(block_reads, before.is_hot)
        if hot != self.announcement.is_hot:
            now = self.announcement
            self.announcement = replace(now, serial=now.serial + 1, issuer=self._me, is_hot=hot)
        return self.announcement is not before

    def _announce_schedules(
        self, by_digest: Mapping[str, ConsumerGroup], last: ConsumerGroup | None, sizes: Mapping[str, int]
    ) -> None:
        """Announce the leader and its schedules, if they have changed. by_digest: the eligible groups; last: the
        leader until now."""
        before = self.announcement
        if not by_digest:
            if before.leader:
                self._announce("", 0, (), is_new_term=True)
            return
        candidates = [
            LeaderCandidate(digest, sizes[digest], len(group.members), self._known_epochs(group))
            for digest, group in by_digest.items()
        ]
        chosen = choose_leader(candidates, last.digest if last is not None else "")
        leader = by_digest[chosen]
        first = self._slowest_position(leader).epoch
        is_new_term = leader.name != before.leader or first < self._first_number
        clocks_of = before.term + is_new_term, chosen
        if clocks_of != self._clocks_of:
            self._clocks, self._clocks_of = {}, clocks_of
        schedules = self._schedules(leader, [group for digest, group in by_digest.items() if digest != chosen])
        if is_new_term:
            self._announce(leader.name, first, schedules, is_new_term=True)
            self._follow_progress(leader)
            self._announced_at = self._progress  # that of the new leader
        elif schedules != before.schedules:
            self._announce(leader.name, before.first_epoch, schedules, is_new_term=False)

    def _follow_progress(self, leader: ConsumerGroup | None) -> None:
        """Follow the leader as far as it goes on."""
        if leader is not None and (at := self._slowest_position(leader)).epoch >= self._first_number:
            self._progress = at.epoch + at.done
            self._lead = min(1.0, self._lead_seconds() * at.rate)

    @property
    def _first_number(self) -> int:
        """The leader's first epoch with a schedule: if its slowest consumer is in an earlier one, it has gone back."""
        return min((schedule.number for schedule in self.announcement.schedules), default=0)

    def _announce(
        self, leader: str, first_epoch: int, schedules: tuple[EpochSchedule, ...], *, is_new_term: bool
    ) -> None:
        before = self.announcement
        term, left_at = before.term, before.left_at
        if is_new_term:
            term, left_at = term + 1, min(self._progress + self._lead, MAX_EPOCHS)
        self.announcement = Announcement(
            before.serial + 1, self._me, term, leader, first_epoch, left_at, schedules, before.is_hot
        )
        self._announced_at = self._progress

    def _schedules(self, leader: ConsumerGroup, others: Sequence[ConsumerGroup]) -> tuple[EpochSchedule, ...]:
        """Return the schedules of the leader's epoch and the next, as far as its orders are known: those announced
        before, where they still hold."""
        pace = self._pace(leader)
        paces = [self._pace(group) for group in others]
        self._clocks = {one.group: self._clocks.get(one.group) or GroupClock() for one in paces}
        for one in paces:
            self._clocks[one.group].follow(one, pace)
        epoch = self._slowest_position(leader).epoch
        fastest = max((at.epoch + at.done for at in self._positions_of(leader)), default=float(epoch))
        lead = self._lead_seconds() * pace.rate
        is_compared = abs(pace.progress - self._announced_at) >= MAX_DRIFT
        found = []
        for number in (epoch, epoch + 1):
            own = leader_timing(pace, number)
            if own.known < (2 if leader.spec is None else 1):
                continue
            timings = order_timings(own, (self._clocks[one.group].timing(one, pace, number) for one in paces))
            before = self.announcement.schedule_of(number) if self.announcement.leader == leader.name else None
            # What was decided before may have been done already, by as much as blocks change hands ahead of reads.
            notice = NOTICE + (lead if before is not None else 0.0)
            since = fastest - number + notice if fastest > number else 0.0
            now = EpochSchedule(number, since, timings)
            holds = before is not None and not schedules_differ(before, now, MAX_DRIFT if is_compared else math.inf)
            if before is not None and (holds or since >= 1):
                found.append(before)
            elif since < 1:
                found.append(now)
        return tuple(found)

    def _pace(self, group: ConsumerGroup) -> GroupPace:
        positions, first = self._positions_of(group), self._slowest_position(group).epoch
        progress = [at.epoch + at.done for at in positions] or [float(first)]
        rates = [at.rate for at in positions if at.rate > 0] or [0.0]
        return GroupPace(
            group=group.digest,
            readers=group.readers_digest,
            job=group.job,
            progress=sum(progress) / len(progress),
            rate=sum(rates) / len(rates),
            reads=_reads_of_consumer(group),
            known_until=first + self._known_epochs(group),
        )

    def _known_epochs(self, group: ConsumerGroup) -> int:
        """Return the number of known epochs from the slowest consumer's on."""
        epoch = self._slowest_position(group).epoch
        if group.spec is not None:
            return max(0, group.spec.epochs - epoch)
        return next((known for known in range(_MAX_KNOWN) if not is_epoch_known(group, epoch + known)), _MAX_KNOWN)


def _reads_of_consumer(group: ConsumerGroup) -> int:
    """Return the samples that one consumer reads in an epoch."""
    if group.spec is not None:
        return max(1, group.spec.size // group.spec.replicas)
    return max([1, *(order.samples for member in group.members for order in member.facts.orders)])
