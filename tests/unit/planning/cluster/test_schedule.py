"""The clock by which holders are decided: when the epochs of each group come, on that of the leader."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.cluster.schedule import (
    MAX_EPOCHS_OF_GROUP,
    MAX_GROUPS,
    MAX_SCHEDULED,
    Announcement,
    EpochSchedule,
    GroupClock,
    GroupPace,
    GroupTiming,
    LeaderCandidate,
    choose_leader,
    leader_timing,
    order_timings,
    scheduled_epochs,
    schedules_differ,
)


def pace(group: str, progress: float, rate: float, job: str = "", reads: int = 100, known_until: int = 90) -> GroupPace:
    return GroupPace(group, "", job or group, progress, rate, reads, known_until)


def timing(
    group: str, begin: float, length: float = 1.0, interval: float = 0.0, known: int = 90, epoch: int = 0
) -> GroupTiming:
    return GroupTiming(group, "", epoch, begin, length, interval or length, known)


def test_a_group_of_half_the_pace_has_epochs_of_twice_the_length() -> None:
    clock, leader, group = GroupClock(), pace("l", 3.5, 0.1), pace("g", 1.25, 0.05)
    clock.follow(group, leader)
    found = clock.timing(group, leader, 3)
    assert (found.epoch, found.length, found.interval) == (1, 2.0, 2.0)
    assert found.begin == pytest.approx(0.0), "a quarter of it is done: half an epoch of the leader"
    assert clock.timing(group, leader, 4).begin == pytest.approx(-1.0)
    assert found.known == 89


def test_before_rates_are_known_groups_read_at_one_pace() -> None:
    leader, group = pace("l", 0.0, 0.0, reads=100), pace("g", 0.0, 0.0, reads=300)
    found = GroupClock().timing(group, leader, 0)
    assert (found.begin, found.length) == (0.0, 3.0)


def test_a_loader_for_validation_reads_after_each_epoch_of_training() -> None:
    clock = GroupClock()
    found = clock.timing(pace("v", 0.0, 0.0, job="j", reads=5), pace("t", 0.3, 0.1, job="j"), 0)
    assert (found.begin, found.length, found.interval) == (1.0, 0.05, 1.0)
    for epoch in (0, 1, 2):  # it is seen in the midst of each of its epochs
        clock.follow(pace("v", epoch + 0.5, 2.0, job="j"), pace("t", epoch + 1.0, 0.1, job="j"))
    found = clock.timing(pace("v", 3.0, 2.0, job="j"), pace("t", 3.4, 0.1, job="j"), 3)
    assert found.begin == pytest.approx(0.975), "the next one begins an epoch of training later"
    assert (found.length, found.interval) == (pytest.approx(0.05), pytest.approx(1.0))


def test_the_interval_of_epochs_is_what_was_observed() -> None:
    """A job that computes for a while after each epoch."""
    clock = GroupClock()
    for number in range(3):
        clock.follow(pace("g", number + 0.5, 0.1), pace("l", 1.5 * number + 0.5, 0.1))
    assert clock.timing(pace("g", 2.6, 0.1), pace("l", 3.6, 0.1), 3).interval == pytest.approx(1.5)


def test_the_epochs_that_decide_are_those_within_the_epoch_and_as_many_known_ones_after_it() -> None:
    alone = EpochSchedule(7, 0.0, (timing("l", 0.0, epoch=7),))
    assert [(one.epoch, one.begin) for one in scheduled_epochs(alone, 4)] == [(7, 0), (8, 1), (9, 2), (10, 3), (11, 4)]
    known = EpochSchedule(7, 0.0, (timing("l", 0.0, epoch=7, known=2),))
    assert [one.epoch for one in scheduled_epochs(known, 4)] == [7, 8]
    both = EpochSchedule(7, 0.0, (timing("l", 0.0, epoch=7), timing("g", -2.5, 2.0, epoch=3)))
    found = [(one.group, one.epoch, one.begin) for one in scheduled_epochs(both, 4)]
    assert found == [("g", 4, -0.5), ("l", 7, 0), ("l", 8, 1), ("g", 5, 1.5), ("l", 9, 2), ("l", 10, 3), ("g", 6, 3.5)]
    assert scheduled_epochs(EpochSchedule(7, 0.0, (timing("l", 0.0, known=0),)), 4) == []


@given(
    st.lists(
        st.tuples(st.floats(-1e5, 1e5), st.floats(1e-4, 1e6), st.floats(0, 1e6), st.integers(0, 1_000_000)),
        min_size=1, max_size=MAX_GROUPS,
    ),
    st.integers(1, 16),
)  # fmt: skip
def test_no_announcement_makes_a_node_compare_more_than_some_epochs(
    groups: list[tuple[float, float, float, int]], ahead: int
) -> None:
    timings = tuple(
        timing(str(number), begin, length, length + more, known)
        for number, (begin, length, more, known) in enumerate(groups)
    )
    found = scheduled_epochs(EpochSchedule(0, 0.0, timings), ahead)
    assert len(found) <= MAX_SCHEDULED
    for one in timings:
        epochs = [epoch for epoch in found if epoch.group == one.group]
        assert len(epochs) <= MAX_EPOCHS_OF_GROUP
        assert all(one.epoch <= epoch.epoch < one.epoch + one.known for epoch in epochs)
        assert all(epoch.begin + epoch.length > -1e-6 * max(1.0, abs(one.begin)) for epoch in epochs)
    assert [epoch.begin for epoch in found] == sorted(epoch.begin for epoch in found)


def test_a_schedule_holds_until_groups_change_or_drift_apart() -> None:
    before = EpochSchedule(3, 0.0, (timing("l", 0.0, epoch=3), timing("g", -0.5, 2.0, epoch=1)))

    def differs(*groups: GroupTiming, drift: float = 0.1) -> bool:
        return schedules_differ(before, EpochSchedule(3, 0.2, groups), drift)

    leader = timing("l", 0.0, epoch=3)
    assert not differs(leader, timing("g", -0.45, 2.0, epoch=1))
    assert differs(leader, timing("g", -0.3, 2.0, epoch=1))
    assert not differs(leader, timing("g", -0.3, 2.0, epoch=1), drift=math.inf)
    assert not differs(leader, timing("g", 1.5, 2.0, epoch=2)), "the next epoch of the same group"
    assert differs(leader, timing("g", -0.5, 2.5, epoch=1)), "it ends later"
    assert differs(leader)
    assert differs(leader, timing("g", -0.5, 2.0, epoch=1), timing("h", 0.0))
    moved = GroupTiming("g", "others", 1, -0.5, 2.0, 2.0, 90)
    assert differs(leader, moved, drift=math.inf), "its consumers are others"
    early = EpochSchedule(3, 0.0, (timing("l", 0.0, epoch=3, known=1),))
    assert schedules_differ(early, EpochSchedule(3, 0.0, (timing("l", 0.0, epoch=3, known=2),)), math.inf)


def test_as_many_groups_decide_as_can_be_compared() -> None:
    leader = leader_timing(pace("z", 3.0, 0.1, known_until=5), 3)
    assert (leader.epoch, leader.known) == (3, 2)
    found = order_timings(leader, (timing(f"{number:02}", 0.0) for number in reversed(range(40))))
    assert found[0] is leader
    assert [one.group for one in found[1:]] == [f"{number:02}" for number in range(MAX_GROUPS - 1)]


def test_the_group_that_may_read_most_leads_and_of_equals_the_one_that_did() -> None:
    def candidate(group: str, blocks: int = 100, consumers: int = 4, known: int = 9) -> LeaderCandidate:
        return LeaderCandidate(group, blocks, consumers, known)

    training, validation = candidate("t", 90), candidate("v", 10)
    assert choose_leader([validation, training], "v") == "t", "a loader for validation that began first"
    assert choose_leader([candidate("b"), candidate("a")], "b") == "b"
    assert choose_leader([candidate("b"), candidate("a", consumers=2)], "") == "b"
    assert choose_leader([candidate("b"), candidate("a", known=3)], "") == "b"
    assert choose_leader([candidate("b"), candidate("a")], "") == "a"


def test_the_latest_announcement_counts_and_of_two_that_of_the_smaller_node() -> None:
    first, second, third = Announcement(3, "b"), Announcement(4, "c"), Announcement(4, "b")
    assert second.outranks(first)
    assert not first.outranks(second)
    assert third.outranks(second)
    assert not third.outranks(third)
