"""What a job fetches although the node had it, as `job show` says it."""

import numpy as np

from cachefs.job_messages import RefetchedBytes
from cachefs.planning.blocks.presence import IN_SSD, Presence
from cachefs.planning.sequences.plan import Plan
from cachefs_daemon.jobs.refetch_log import MAX_EPOCHS, SAME_FETCH_SECONDS, RefetchLog
from cachefs_tools.cachectl.job_page import fetched_again_text
from tests.simulated import space_of

MIB = 1 << 20


def log_of(*here: int, capacity: int = 6 * MIB) -> RefetchLog:
    """Of a snapshot of 10 blocks of 1 MiB, of which the blocks *here* are on the node."""
    plan, presence, space = Plan(), Presence(), space_of([MIB] * 10, "s")
    plan.add_space(space)
    presence.add_space(space)
    presence.set_states("s", np.array(here, np.int32), [IN_SSD] * len(here))
    log = RefetchLog(plan, presence, lambda: capacity)
    log.start_snapshot(space, 10.0)
    return log


def test_only_what_the_node_had_before_is_fetched_again() -> None:
    log = log_of(7)
    for number in range(4):
        log.count_fetch("job", 0, "s", number, 100.0)
    assert log.refetches_of("job") == []
    log.count_fetch("job", 2, "s", 3, 200.0)
    log.count_fetch("job", 2, "s", 7, 200.0)
    log.count_fetch("other", 1, "s", 2, 200.0)
    assert log.refetches_of("job") == [RefetchedBytes(epoch=2, bytes=2 * MIB, dataset=10 * MIB, tiers=6 * MIB)]
    log.forget("job")
    assert log.refetches_of("job") == []
    assert log.refetches_of("other") != []


def test_blocks_of_one_batch_that_arrive_before_the_first_is_noted_are_not_fetched_again() -> None:
    plan, presence, space = Plan(), Presence(), space_of([MIB] * 10, "s")
    plan.add_space(space)
    presence.add_space(space)
    log = RefetchLog(plan, presence, lambda: 6 * MIB)
    log.start_snapshot(space, 99.0)
    presence.set_states("s", np.arange(10, dtype=np.int32), [IN_SSD] * 10)
    log.start_snapshot(space, 100.0)  # of another consumer
    for number in range(10):
        log.count_fetch("job", 0, "s", number, 110.0)
    assert log.refetches_of("job") == []


def test_a_fetch_that_somebody_has_waited_for_counts_once() -> None:
    log = log_of()
    log.count_fetch("job", 0, "s", 3, 100.0)
    log.count_fetch("job", 0, "s", 3, 100.0 + SAME_FETCH_SECONDS / 2)
    assert log.refetches_of("job") == []


def test_the_latest_epochs_are_kept_and_snapshots_that_nobody_reads_are_not() -> None:
    log = log_of(3)
    for epoch in range(MAX_EPOCHS + 2):
        log.count_fetch("job", epoch, "s", 3, 100.0 * (1 + epoch))
    assert [one.epoch for one in log.refetches_of("job")] == list(range(2, MAX_EPOCHS + 2))
    log.keep_snapshots(())
    log.count_fetch("job", 200, "s", 3, 1e6)
    assert log.refetches_of("job")[-1].epoch == MAX_EPOCHS + 1
    log.count_fetch("job", 1, "unknown", 3, 1e6)


def test_what_is_said_of_it() -> None:
    first, third = (RefetchedBytes(epoch=n, bytes=n * MIB, dataset=10 * MIB, tiers=6 * MIB) for n in (1, 2))
    because = "; the tiers have room for 6 MiB of 10 MiB, and the page cache has lost the rest"
    assert fetched_again_text([third]) == f"fetched again: 2 MiB in epoch 3{because}"
    assert fetched_again_text([first, third]) == f"fetched again: 2 MiB in epoch 3, 3 MiB in 2 epochs{because}"
    enough = RefetchedBytes(epoch=0, bytes=MIB, dataset=10 * MIB, tiers=20 * MIB)
    assert fetched_again_text([enough]) == "fetched again: 1 MiB in epoch 1"
