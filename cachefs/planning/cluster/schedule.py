"""The clock by which holders are decided: one group of consumers leads, and the epochs of all groups that read the
snapshot are placed on the time of the leader's epochs.

Holders are decided for one epoch of the leader after the other (`cachefs.planning.cluster.moves`). All nodes must
decide alike, though they hear of progress at different moments. So one node, the issuer, publishes an `Announcement`:
which group leads, and for the current and the next epoch an `EpochSchedule` that says when each epoch of each group
begins and how long it lasts, in epochs of the leader. What a node needs beside it are the orders themselves.

Rates differ between groups, so times and not positions are compared. A loader that reads in bursts, as for validation
after each epoch of training, has epochs that last a short time and begin at long intervals.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

# Most groups whose reads decide where copies go; the reads of further ones look for blocks where they are.
MAX_GROUPS: Final = 16
# Most epochs of one group, and of all groups, that are compared at one decision.
MAX_EPOCHS_OF_GROUP: Final = 16
MAX_SCHEDULED: Final = 32
# Schedules of one announcement: of the current epoch and the next.
MAX_SCHEDULES: Final = 2
# Longest and shortest length and interval, in epochs of the leader.
MAX_LENGTH: Final = 1e6
MIN_LENGTH: Final = 1e-4
# Part of an epoch within which a group's place tells when its epoch began: at the ends it may be waiting.
_MIDST: Final = (0.02, 0.98)


@dataclass(frozen=True, slots=True)
class GroupTiming:
    """The epochs of one group. Times are epochs of the leader since the start of the one that is decided."""

    # Identity of the group, and of its consumers and their nodes (see cachefs_cluster.placement.groups).
    group: str
    readers: str
    # Number of one of its epochs, the time at which that begins, and how long each epoch lasts.
    epoch: int
    begin: float
    length: float
    # Time from the begin of one epoch to that of the next.
    interval: float
    # Number of epochs, from `epoch` on, whose orders are known.
    known: int


@dataclass(frozen=True, slots=True)
class EpochSchedule:
    """The timings by which nodes decide which blocks change hands in one epoch of the leader."""

    # The leader's epoch.
    number: int
    # Blocks stay where they are at all reads before this time: nodes learn of the schedule in that epoch.
    since: float
    # The leader first.
    groups: tuple[GroupTiming, ...]

    def timing_of(self, group: str) -> GroupTiming | None:
        """Return the timing of a group; None if its reads do not decide."""
        return next((one for one in self.groups if one.group == group), None)


@dataclass(frozen=True, slots=True)
class Announcement:
    """Announces the leader and its schedules for one snapshot. Nodes follow the announcement with the highest serial,
    of equal ones that of the smallest issuer."""

    serial: int = 0
    # Id of the node that made it; other nodes pass it on.
    issuer: str = ""
    # Number of the leadership: it grows when another group leads, or the leader goes back to earlier epochs.
    term: int = 0
    # Name of the leader's job and loader; empty: no group leads, and blocks stay where they are.
    leader: str = ""
    # The leader's first epoch; and up to where copies had followed the leader before when it ceased to lead: its epoch
    # and part of that.
    first_epoch: int = 0
    left_at: float = 0.0
    # By number.
    schedules: tuple[EpochSchedule, ...] = ()
    # Whether the snapshot is hot: it has second copies, where the configuration allows two.
    is_hot: bool = False

    def outranks(self, other: "Announcement") -> bool:
        """Return whether nodes follow this one rather than *other*."""
        return (-self.serial, self.issuer) < (-other.serial, other.issuer)

    def schedule_of(self, number: int) -> EpochSchedule | None:
        return next((one for one in self.schedules if one.number == number), None)


@dataclass(frozen=True, slots=True)
class ScheduledEpoch:
    """One epoch of a group, on the leader's clock."""

    group: str
    epoch: int
    begin: float
    length: float


@dataclass(frozen=True, slots=True)
class GroupPace:
    """The progress and the rate of a group."""

    # As in GroupTiming.
    group: str
    readers: str
    # Full name of its job.
    job: str
    # Epochs done, with the part of the current one; and epochs per second, 0 where it has not begun.
    progress: float
    rate: float
    # Reads of one consumer in an epoch.
    reads: int
    # The first epoch from the current one on whose order is not known.
    known_until: int


class GroupClock:
    """Places the epochs of one group on the leader's clock, as the two progress. The interval between its epochs shows
    once two have begun."""

    def __init__(self) -> None:
        # Number and begin, on the leader's clock, of two epochs: the latest, and the first one seen.
        self._latest: tuple[int, float] | None = None
        self._first: tuple[int, float] | None = None
        self._length = 0.0

    def follow(self, group: GroupPace, leader: GroupPace) -> None:
        """Follow the progress of both."""
        epoch, done = divmod(group.progress, 1.0)
        if not (group.rate > 0 and leader.rate > 0 and _MIDST[0] <= done <= _MIDST[1]):
            return
        self._length = _clamp(leader.rate / group.rate)
        begin = leader.progress - done * self._length
        if self._latest is None or self._first is None or epoch < self._latest[0]:
            self._first = int(epoch), begin
        self._latest = int(epoch), begin

    def timing(self, group: GroupPace, leader: GroupPace, number: int) -> GroupTiming:
        """Return the timing for the leader's epoch *number*."""
        length = self._length or _clamp(group.reads / max(1, leader.reads))
        epoch, done = int(group.progress), group.progress % 1.0
        if self._latest is not None and self._first is not None and self._latest[0] > self._first[0]:
            interval = (self._latest[1] - self._first[1]) / (self._latest[0] - self._first[0])
        else:
            interval = 1.0 if group.job == leader.job else length
        interval = _clamp(max(interval, length))
        if self._latest is not None:
            begin = self._latest[1] + (epoch - self._latest[0]) * interval
            if epoch > self._latest[0] or done < _MIDST[0]:
                begin = max(begin, leader.progress - done * length)  # late, as it has not begun
        elif group.job == leader.job and not done:
            begin = math.ceil(leader.progress)  # after the epoch of training
        else:
            begin = leader.progress - done * length
        known = max(0, group.known_until - epoch)
        return GroupTiming(group.group, group.readers, epoch, begin - number, length, interval, known)


def _clamp(length: float) -> float:
    return min(max(length, MIN_LENGTH), MAX_LENGTH)


def leader_timing(leader: GroupPace, number: int) -> GroupTiming:
    """Return the leader's own timing for its epoch *number*."""
    return GroupTiming(leader.group, leader.readers, number, 0.0, 1.0, 1.0, max(0, leader.known_until - number))


def schedules_differ(before: EpochSchedule, now: EpochSchedule, drift: float) -> bool:
    """Return whether groups or consumers came or went, more is known of their orders, or the groups have drifted apart
    by *drift* epochs of the leader."""
    if {(one.group, one.readers) for one in before.groups} != {(one.group, one.readers) for one in now.groups}:
        return True
    known = {one.group: one for one in before.groups}
    for one in now.groups:
        old = known[one.group]
        if min(old.known + old.epoch, one.epoch + MAX_EPOCHS_OF_GROUP) < min(one.known + one.epoch, one.epoch + 2):
            return True
        # Begin and end of the same epoch, by the former timing.
        begin = old.begin + (one.epoch - old.epoch) * old.interval
        if max(abs(begin - one.begin), abs(begin + old.length - one.begin - one.length)) > drift:
            return True
    return False


def scheduled_epochs(schedule: EpochSchedule, ahead: int) -> list[ScheduledEpoch]:
    """Return the epochs whose reads decide, in order of their begin: those with reads in the leader's epoch, and as
    many known ones after it as read each block *ahead* times more."""
    rate = sum(1 / one.interval for one in schedule.groups)
    horizon = 1.0 + max(1.0, math.ceil(ahead / rate)) if rate > 0 else 1.0
    found: list[ScheduledEpoch] = []
    for one in schedule.groups:
        # The first epoch that has not ended when the leader's epoch begins.
        passed = max(0, math.floor(-(one.begin + one.length) / one.interval) + 1) if one.begin + one.length <= 0 else 0
        for step in range(passed, min(one.known, passed + MAX_EPOCHS_OF_GROUP)):
            begin = one.begin + step * one.interval
            if begin >= horizon:
                break
            found.append(ScheduledEpoch(one.group, one.epoch + step, begin, one.length))
    return sorted(found, key=lambda one: one.begin)[:MAX_SCHEDULED]


def order_timings(leader: GroupTiming, others: Iterable[GroupTiming]) -> tuple[GroupTiming, ...]:
    """Return the timings of a schedule: the leader, and the others by identity, as many as count."""
    return leader, *sorted(others, key=lambda one: one.group)[: MAX_GROUPS - 1]


@dataclass(frozen=True, slots=True)
class LeaderCandidate:
    """The facts that decide which group leads."""

    group: str
    # Blocks that it may read, its consumers, and the epochs of which its orders are known.
    blocks: int
    consumers: int
    known: int


def choose_leader(candidates: Sequence[LeaderCandidate], before: str) -> str:
    """Return which group leads: the one that may read the most blocks; of these the one that led *before*, else the one
    with the most consumers, then with the longest known future, then by identity.

    A leader that reads faster than other groups is better, as a block changes hands once in its epochs: with a job on 4
    nodes and one of half its pace on 2 of them .438 and .407 of their reads are local, and .418 and .384 where the
    slower one leads.
    """
    ranked = min(candidates, key=lambda one: (-one.blocks, one.group != before, -one.consumers, -one.known, one.group))
    return ranked.group
