"""Where a consumer may be between its reports, at times that the test makes up."""

import numpy as np
import pytest

from cachefs.planning.sequences.follower import SequenceFollower, observe_reads
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.position_estimate import (
    HEARTBEAT_SECONDS,
    MAX_SEARCH_SECONDS,
    MIN_REPORT_SECONDS,
    REPORT_READS,
    REPORT_SECONDS,
    REPORT_TRAVEL_SECONDS,
    UNSEEN_SECONDS,
    PositionEstimate,
)
from tests.simulated import space_of

NOW = 50_000.0


def position_in(reads: int, reorder_window: int = 0, batch_size: int = 1) -> PositionEstimate:
    plan = Plan()
    plan.add_space(space_of([1000] * reads, "s"))
    plan.set_epoch("c", "s", 0, np.arange(reads))
    position = PositionEstimate(SequenceFollower(plan, "c", reorder_window), batch_size)
    position.set_shortest_epoch(reads)
    return position


def test_who_has_not_moved_since_his_rate_is_known_was_not_away_before() -> None:
    """Workers of a loader read on while the first batch is missing: a rate, and no other place."""
    position = position_in(200)
    follower = position.follower
    follower.has_begun, follower.rate.value = True, 1000.0
    assert (position.unseen_reads(NOW), position.search_distance(NOW)) == (0, 0)
    assert (position.unseen_reads(NOW + 1), position.search_distance(NOW + 1)) == (1000, 2000)
    follower.on_heartbeat(0, 100)
    assert (position.unseen_reads(NOW + 2), position.search_distance(NOW + 2)) == (0, 0)


def test_who_is_silent_is_taken_to_have_stopped_and_is_searched_ever_further() -> None:
    position = position_in(200)
    follower = position.follower
    follower.has_begun, follower.rate.value = True, 10.0
    assert position.unseen_reads(NOW) == 0
    assert position.unseen_reads(NOW + 3 * UNSEEN_SECONDS) == 10 * UNSEEN_SECONDS
    assert position.search_distance(NOW + 3 * MAX_SEARCH_SECONDS) == 10 * UNSEEN_SECONDS * 2**MAX_SEARCH_SECONDS


def test_who_has_not_begun_or_has_no_rate_has_passed_nothing() -> None:
    position = position_in(200)
    position.follower.rate.value = 1000.0
    assert position.unseen_reads(NOW) == position.unseen_reads(NOW + 5) == 0
    position.follower.has_begun, position.follower.rate.value = True, 0.0
    assert position.unseen_reads(NOW + 5) == position.reads_done_within(NOW + 5, 1.0) == 0


def test_it_has_passed_no_more_than_a_report_or_a_tripwire_shows() -> None:
    position = position_in(100_000)
    position.follower.has_begun, position.follower.rate.value = True, 1000.0
    assert position.reads_done_within(NOW, 0.1) == 100
    assert position.reads_done_within(NOW + 9, 0.0) == position.tripwire_interval(NOW + 9)
    position.on_heartbeat(NOW + 9)
    assert position.reads_done_within(NOW + 9, 0.0) == REPORT_READS


def test_tripwires_are_there_while_it_does_not_say_itself_where_it_is() -> None:
    position = position_in(100_000)
    assert position.tripwire_interval(NOW) == position.left_out_interval(NOW) == 32
    position.on_heartbeat(NOW)
    assert position.tripwire_interval(NOW) == position.left_out_interval(NOW) == 0
    assert position.tripwire_interval(NOW + HEARTBEAT_SECONDS) == 32


def test_an_interval_leaves_tripwires_in_a_short_epoch() -> None:
    position = position_in(10)
    assert (position.tripwire_interval(NOW), position.left_out_interval(NOW)) == (8, 8)


def test_closer_tripwires_of_before_are_left_out_for_a_while() -> None:
    position = position_in(100_000)
    position.follower.rate.value = 10_000.0
    assert (position.tripwire_interval(NOW), position.left_out_interval(NOW)) == (512, 32)
    assert (position.tripwire_interval(NOW + 3), position.left_out_interval(NOW + 3)) == (512, 512)


def test_the_margin_is_what_was_read_since_the_last_report() -> None:
    position = position_in(1000, reorder_window=50, batch_size=4)
    assert position.margin(NOW) == REPORT_SECONDS
    follower = position.follower
    follower.rate.demand = 100.0
    assert position.margin(NOW) == pytest.approx((REPORT_SECONDS * 100 + 4) / 100)
    observe_reads([follower], np.array([0, 1, 5], np.int32))
    assert follower.span == 4
    assert position.margin(NOW) == pytest.approx((REPORT_SECONDS * 100 + 4 + 4) / 100)
    follower.rate.value = 100.0
    assert position.margin(NOW) == pytest.approx((REPORT_SECONDS * 100 + 4 + 4) / 100)
    assert position.margin(NOW + 0.2) == pytest.approx((REPORT_SECONDS * 100 + 4 + 20) / 100, abs=0.011), (
        "it may have read on"
    )
    assert position.margin(NOW + 9) == pytest.approx((REPORT_SECONDS * 100 + 4 + 50) / 100), "as far as its loader goes"
    follower.rate.value = 0.0
    follower.rate.demand = 1e6
    assert position.margin(NOW) == pytest.approx((REPORT_READS + 4 + 4) / 1e6)
    follower.is_following = False
    assert position.margin(NOW) == REPORT_SECONDS


def test_the_margin_is_small_where_a_mount_reports_each_part_of_small_tiers() -> None:
    position = position_in(1000, batch_size=4)
    position.follower.rate.demand = 500.0
    assert position.margin(NOW, 15) == pytest.approx((15 + 4) / 500 + REPORT_TRAVEL_SECONDS)
    assert position.margin(NOW, 5) == pytest.approx(MIN_REPORT_SECONDS + 4 / 500), "a report travels"
    assert position.margin(NOW, 1e6) == position.margin(NOW)


def round_of(workers: int, batch: int, rows: int, first: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """The first *rows* reads of each worker, where all of them read their batches at the same time."""
    return (first + np.arange(rows)[:, None] + batch * np.arange(workers)).ravel().astype(np.int32)


def test_workers_that_began_their_batches_together_will_begin_the_next_ones_together() -> None:
    plan = Plan()
    plan.add_space(space_of([1000] * 640, "s"))
    plan.set_epoch("c", "s", 0, np.arange(640))
    follower = SequenceFollower(plan, "c", reorder_window=128, batch=16)
    position = PositionEstimate(follower, batch_size=16)
    follower.rate.demand = 400.0
    own = 16 + 16 + REPORT_TRAVEL_SECONDS * 400  # a batch, and what was read since the last report
    assert position.margin(NOW, 16) == pytest.approx(own / 400)
    observe_reads([follower], round_of(4, 16, 8))
    assert (follower.progress, follower.span) == ((0, 8), 48)
    assert position.margin(NOW, 16) == pytest.approx((own + 48) / 400)
    observe_reads([follower], round_of(4, 16, 16)[32:])
    assert (follower.progress, follower.span) == ((0, 64), 0)
    assert position.margin(NOW, 16) == pytest.approx((own + 48) / 400), "nothing is between them for a moment"
    observe_reads([follower], round_of(4, 16, 12, 64))
    assert follower.progress == (0, 76)
    assert position.margin(NOW, 16) == pytest.approx((own + 48 + 4 + 48) / 400), "before it is reported that all ended"


def test_a_loader_whose_batches_are_read_one_after_the_other_is_not_taken_for_one_that_reads_them_together() -> None:
    plan = Plan()
    plan.add_space(space_of([1000] * 640, "s"))
    plan.set_epoch("c", "s", 0, np.arange(640))
    follower = SequenceFollower(plan, "c", reorder_window=128, batch=16)
    observe_reads([follower], round_of(4, 16, 16))
    assert follower.reach(0) == 48, "as a loader is filled"
    for batch in range(4, 4 + 2 * 128 // 16):
        observe_reads([follower], np.arange(16 * batch, 16 * batch + 16, dtype=np.int32))
    assert follower.reach(0) == 0
