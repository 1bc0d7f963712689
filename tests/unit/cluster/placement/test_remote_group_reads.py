"""What others read here, in the node's plan."""

import numpy as np

from cachefs.planning.cluster.epoch_reads import RemoteEpochReads
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.timeline import PlannedEpoch
from cachefs_cluster.placement.remote_group_reads import PassedReads, RemoteGroupReads
from tests.simulated import space_of

SPACE = space_of([10] * 8)


def planned() -> tuple[Plan, RemoteGroupReads]:
    plan = Plan()
    plan.add_space(SPACE)
    return plan, RemoteGroupReads(plan, "space", "job/peers")


def set_epoch(reads: RemoteGroupReads, epoch: int, *blocks: int, last: bool = False) -> None:
    numbers = np.array(blocks, np.int32)
    when = (np.arange(len(blocks)) / max(1, len(blocks))).astype(np.float32)
    duty = RemoteEpochReads(numbers, when, np.full(len(blocks), 1, np.uint16))
    reads.set_epoch(epoch, duty, PlannedEpoch.of(numbers, SPACE, last))


def passed(found: list[PassedReads]) -> list[tuple[int, list[int]]]:
    assert all(set(one.readers.tolist()) <= {1} for one in found)
    return [(one.epoch, one.blocks.tolist()) for one in found]


def hand_over(reads: RemoteGroupReads, *blocks: int, reader: int) -> list[tuple[int, list[int]]]:
    """Return, by epoch, the blocks that the reader was to read."""
    ids = np.array(blocks, np.int32)
    epochs, seconds = reads.find_reads(ids, reader)
    found = []
    for epoch in np.unique(epochs[np.isfinite(seconds)]).tolist():
        mine = ids[np.isfinite(seconds) & (epochs == epoch)]
        reads.note_handed_over(epoch, mine)
        found.append((epoch, mine.tolist()))
    return found


def test_what_others_read_next_is_in_the_plan_until_they_have_read_it() -> None:
    plan, reads = planned()
    set_epoch(reads, 0, 3, 1, 2, 0)
    set_epoch(reads, 1, 0, 5)
    assert passed(reads.follow_reader(0, 0.5, 0.25)) == [(0, [3, 1])]
    seconds = plan.next_use_of("space", np.array([2, 0, 5, 3]))
    assert seconds[:3].tolist() == [0.0, 1.0, 3.0], "4 reads in 4 s"
    assert seconds[3] > 3, "nobody is known to read it"
    assert passed(reads.follow_reader(0, 0.4, 0.0)) == [], "nobody goes back"
    assert passed(reads.follow_reader(1, 0.5, 0.0)) == [(0, [2, 0]), (1, [0])]
    assert plan.progress("job/peers") == (1, 1)


def test_epochs_that_nobody_has_set_are_passed_over() -> None:
    plan, reads = planned()
    assert passed(reads.follow_reader(3, 0.5, 0.0)) == []
    set_epoch(reads, 3, 1, 2)
    assert passed(reads.follow_reader(5, 0.5, 0.0)) == [(3, [1, 2])]
    set_epoch(reads, 5, 4, 6)
    assert passed(reads.follow_reader(5, 0.5, 0.0)) == [(5, [4])]
    assert plan.progress("job/peers") == (5, 1)


def test_a_block_that_was_handed_over_is_read() -> None:
    plan, reads = planned()
    set_epoch(reads, 0, 3, 1, 2, 0)
    set_epoch(reads, 1, 2, 6)
    assert hand_over(reads, 2, 7, reader=1) == [(0, [2])]
    beyond = plan.next_use_of("space", np.array([6, 2]))
    assert hand_over(reads, 6, 3, reader=1) == [(0, [3]), (1, [6])]
    later = plan.next_use_of("space", np.array([6, 2]))
    assert later[0] > beyond[0], "who reads it in the next epoch has it already: it is not brought back for that"
    assert later[1] == beyond[1]
    assert hand_over(reads, 1, reader=2) == [], "another node reads it"
    reads.follow_reader(0, 0.0, 1.0)
    window = plan.window("job/peers", 0, 9)
    assert window is not None
    numbers = window.start + np.arange(len(window.blocks))
    assert window.blocks[plan.is_coming("job/peers", numbers, window.blocks)].tolist() == [1, 0]
    reads.follow_reader(1, 0.0, 1.0)
    coming = plan.window("job/peers", 0, 9)
    assert coming is not None
    numbers = coming.start + np.arange(len(coming.blocks))
    assert coming.blocks[plan.is_coming("job/peers", numbers, coming.blocks)].tolist() == [2], "6 is there already"


def test_an_epoch_that_is_set_anew_goes_on_where_it_was() -> None:
    plan, reads = planned()
    set_epoch(reads, 0, 3, 1, 2, 0)
    reads.follow_reader(0, 0.5, 1.0)
    reads.mark_outdated()
    assert not reads.is_current(0)
    set_epoch(reads, 0, 5, 1, 6, 0)
    assert reads.is_current(0)
    assert passed(reads.follow_reader(0, 0.5, 1.0)) == [], "what was read before is not read again"
    assert plan.next_use_of("space", np.array([6, 0])).tolist() == [0.0, 0.25]


def test_nothing_is_left_of_it_in_the_end() -> None:
    plan, reads = planned()
    set_epoch(reads, 0, 1)
    reads.close()
    assert plan.is_empty


def test_a_group_that_grows_is_planned_anew() -> None:
    plan, reads = planned()
    reads.set_members(["rank 0"])
    set_epoch(reads, 0, 3, 1)
    reads.set_members(["rank 0"])
    assert reads.is_current(0)
    reads.set_members(["rank 0", "rank 1"])
    assert not reads.is_current(0), "what the second one reads is in no plan yet"
    set_epoch(reads, 0, 3, 5, 1, 6)
    assert reads.is_current(0)
    assert np.isfinite(plan.next_use_of("space", np.array([5, 6]))).all()
