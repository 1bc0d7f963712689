"""What is fetched next, how much of it at once, and what failures change."""

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest

from cachefs.planning.blocks.presence import IN_MEMORY, Presence
from cachefs.planning.blocks.space import Ids
from cachefs.planning.cluster.ownership import Ownership
from cachefs.planning.prefetch.fetch_plan import (
    MAX_WINDOW_SECONDS,
    REFRESH_SECONDS,
    SETTLE_SECONDS,
    FetchBatch,
    FetchLimits,
    FetchPlan,
    fit_into_quotas,
)
from cachefs.planning.prefetch.fetch_window import COST_PERIOD_SECONDS, FetchLatency, find_missing_reads
from cachefs.planning.prefetch.job_demand import find_demands
from cachefs.planning.prefetch.lookahead import UpcomingBlock
from cachefs.planning.sequences.plan import Plan
from tests.simulated import space_of

SIZE = 100
RATE = 10.0
MANY = 1 << 30
WORTH = 1e12


class Scene:
    """Jobs that each read their own snapshot, of which nothing is here; they begin at 1000 s."""

    def __init__(self, limits: FetchLimits | None = None, **orders: list[int]) -> None:
        self.plan, self.presence = Plan(), Presence()
        for seed, (name, order) in enumerate(orders.items()):
            space = space_of([SIZE] * 1000, name=name, seed=seed)
            self.plan.add_space(space)
            self.presence.add_space(space)
            self.plan.set_epoch(name, name, 0, np.array(order), is_last=True)
            self.plan.set_progress(name, 0, 0, RATE)
        self.now = 1000.0
        self.delivered = 0
        self.fetches = FetchPlan(self.plan, self.presence, limits or FetchLimits(2.0, WORTH, MANY, 1000), self.now)
        self.look_again()

    def look_again(self, after: float = 0.0) -> None:
        self.now += after
        self.fetches.refresh(self.now, self.delivered)

    def fill(self, blocks: int) -> list[UpcomingBlock]:
        """What is started for room of so many blocks."""
        found = self.fetches.choose_for_free_room(blocks * SIZE)
        self.fetches.note_started(found)
        return found

    def land(self, found: list[UpcomingBlock]) -> None:
        for one in found:
            self.presence.states[one.snapshot][one.number] = IN_MEMORY
            self.fetches.note_landed(one)
            self.delivered += one.size


def numbers(found: list[UpcomingBlock] | FetchBatch | None) -> list[int]:
    if found is None:
        return []
    return [one.number for one in (found.blocks if isinstance(found, FetchBatch) else found)]


def test_free_room_is_filled_in_the_order_of_deadlines() -> None:
    scene = Scene(slow=[7, 5, 9], fast=[3, 1, 4])
    scene.plan.set_progress("fast", 0, 0, 3 * RATE)
    names = [one.name for one in scene.fill(5)]
    assert set(names[:2]) == {("slow", 7), ("fast", 3)}, "both are needed now"
    assert names[2:] == [("fast", 1), ("fast", 4), ("slow", 5)]


def test_each_job_has_places_of_its_own_and_jobs_that_want_nothing_take_none() -> None:
    scene = Scene(FetchLimits(2.0, WORTH, 8 * SIZE, 8), slow=list(range(100)), fast=list(range(100)))
    scene.plan.set_progress("fast", 0, 0, 100 * RATE)
    found = scene.fill(1000)
    assert Counter(one.consumer for one in found) == {"slow": 8, "fast": 8}
    assert scene.fill(1000) == []
    scene.land([one for one in found if one.consumer == "fast"])
    assert Counter(one.consumer for one in scene.fill(1000)) == {"fast": 8}
    many = Scene(FetchLimits(2.0, WORTH, 8 * SIZE, 8), **{f"job{number}": list(range(100)) for number in range(40)})
    for number in range(1, 40):
        many.presence.states[f"job{number}"][:] = IN_MEMORY
    many.look_again(2.0)
    assert Counter(one.consumer for one in many.fill(1000)) == {"job0": 8}


def test_a_block_is_urgent_when_its_job_needs_it_soon_or_would_not_be_in_time() -> None:
    scene = Scene(job=list(range(100)))
    scene.fetches.update_window({}, FetchLatency(0.1), scene.now)
    found = {one.number: scene.fetches.urgent_after(one) for one in scene.fill(100)}
    assert (found[0], found[10]) == (0, 0)
    assert found[99] == pytest.approx(9.9 - 2 * scene.fetches.last_window)
    for _ in range(100):
        scene.delivered += 5 * SIZE  # a second: less than the job reads
        scene.look_again(1.01)
    [late] = [one for one in found if one == 99]
    block = UpcomingBlock("job", late, SIZE, 9.0, "job")
    assert scene.fetches.urgent_after(block) == 0, "it must begin now, at the rate of that origin"


@dataclass
class PageCaches:
    """What the only mount has."""

    there: set[int]
    asked: list[tuple[str, str, float]] = field(default_factory=list)

    def are_cached(
        self, consumer: str, snapshot: str, ids: Ids, left: npt.NDArray[np.float64], now: float
    ) -> npt.NDArray[np.bool_]:
        self.asked.append((consumer, snapshot, now))
        assert np.all(np.diff(left) > 0)
        return np.isin(ids, list(self.there))


def test_what_page_caches_have_is_not_fetched_until_they_have_lost_it() -> None:
    scene, caches = Scene(job=list(range(100))), PageCaches({0, 1, 3, 6, 7, 8})
    scene.fetches = FetchPlan(
        scene.plan, scene.presence, FetchLimits(2.0, WORTH, MANY, 1000), scene.now, page_caches=caches
    )
    scene.look_again()
    assert numbers(scene.fill(3)) == [2, 4, 5]
    assert caches.asked[-1] == ("job", "job", scene.now)
    window = scene.fetches.update_window({}, FetchLatency(0.1), scene.now)
    assert numbers(scene.fetches.choose_for_window(window)) == []
    caches.there.discard(1)
    assert numbers(scene.fetches.choose_for_window(window)) == [1]
    scene.look_again(after=2.0)
    assert numbers(scene.fill(6)) == [1, 9, 10]


def test_what_page_caches_have_is_no_backlog() -> None:
    scene, caches = Scene(job=list(range(100))), PageCaches(set(range(90)))
    bandwidth = 0.5 * RATE * SIZE
    spared = partial(_in, caches)
    states = scene.presence.states
    assert find_demands(find_missing_reads(scene.plan, states, {}), bandwidth, {})["job"].backlog is not None
    assert find_demands(find_missing_reads(scene.plan, states, {}, spared), bandwidth, {})["job"].backlog is None
    caches.there.clear()
    assert find_demands(find_missing_reads(scene.plan, states, {}, spared), bandwidth, {})["job"].backlog is not None


def _in(
    caches: PageCaches, consumer: str, snapshot: str, ids: Ids, due: npt.NDArray[np.float64]
) -> npt.NDArray[np.bool_]:
    return caches.are_cached(consumer, snapshot, ids, due, 0.0)


def test_nothing_is_fetched_twice_and_room_is_counted_once() -> None:
    scene = Scene(job=list(range(100)))
    first = scene.fill(10)
    assert numbers(first) == list(range(10))
    assert scene.fill(10) == [], "what is in flight will take that room"
    second = scene.fill(15)
    assert numbers(second) == list(range(10, 15))
    scene.look_again(2 * REFRESH_SECONDS)
    assert numbers(scene.fill(25)) == list(range(15, 25)), "what is in flight is not given again"
    scene.land(first)
    scene.look_again(2 * REFRESH_SECONDS)
    assert numbers(scene.fill(20)) == list(range(25, 30))


def test_no_more_is_in_flight_than_the_limits_say() -> None:
    blocks = Scene(FetchLimits(2.0, WORTH, MANY, 5), job=list(range(100)))
    found = blocks.fill(50)
    assert numbers(found) == [0, 1, 2, 3, 4]
    assert blocks.fill(50) == []
    blocks.land(found[:2])
    assert numbers(blocks.fill(50)) == [5, 6]
    size = Scene(FetchLimits(2.0, WORTH, 3 * SIZE + 1, 1000), job=list(range(100)))
    assert numbers(size.fill(50)) == [0, 1, 2]


def test_beyond_free_room_blocks_are_fetched_within_the_window_only() -> None:
    scene = Scene(job=list(range(100)))
    batch = scene.fetches.choose_for_window(1.0)
    assert batch is not None
    assert numbers(batch) == list(range(11))
    assert batch.last_key == scene.plan.spaces["job"].key(10), "what is needed after the last one is evicted"
    assert numbers(scene.fetches.fit_into_room(batch.blocks, 4 * SIZE)) == [0, 1, 2, 3]
    scene.fetches.note_started(batch.blocks[:4])
    assert numbers(scene.fetches.fit_into_room(batch.blocks[4:], 6 * SIZE)) == [4, 5], (
        "some of that room is taken already"
    )
    assert numbers(scene.fetches.choose_for_window(1.0)) == list(range(4, 11))


def test_the_window_grows_with_the_latency_and_its_deviation() -> None:
    fetches = Scene(FetchLimits(safety=3.0, stall_worth=WORTH, max_bytes=MANY, max_blocks=10), job=[1]).fetches
    steady, uneven = FetchLatency(0.1), FetchLatency(0.1)
    for _ in range(500):
        steady.measure(0.1)
        uneven.measure(0.05)
        uneven.measure(0.15)
    assert fetches.update_window({}, steady, 1000.0) == pytest.approx(0.3)
    assert fetches.update_window({}, uneven, 1000.0) == pytest.approx(3 * (0.1 + 2 * 0.05), rel=0.05)
    assert fetches.update_window({}, FetchLatency(100.0), 1000.0) == MAX_WINDOW_SECONDS


def test_reads_that_come_late_widen_the_window_while_the_origins_could_deliver_more() -> None:
    scene = Scene(job=list(range(100)))
    scene.look_again(SETTLE_SECONDS + REFRESH_SECONDS)
    scene.fill(0)
    latency = FetchLatency(0.1)
    usual = scene.fetches.update_window({}, latency, scene.now)
    scene.fetches.note_late_reads([0.3], 1, scene.now)
    assert scene.fetches.update_window({}, latency, scene.now) == usual, (
        "all that is possible was asked for: no window helps"
    )
    scene.fetches.note_idle()
    scene.fetches.note_late_reads([0.3], 1, scene.now)
    assert scene.fetches.update_window({}, latency, scene.now) == pytest.approx(usual + 0.3)


@pytest.mark.parametrize(("in_flight", "widens"), [(5, True), (6, False)])
def test_an_origin_is_busy_while_most_of_what_may_be_in_flight_is(in_flight: int, widens: bool) -> None:
    scene = Scene(FetchLimits(2.0, WORTH, MANY, 8), job=list(range(100)))
    scene.fill(in_flight)
    for _ in range(2):
        scene.look_again(SETTLE_SECONDS + REFRESH_SECONDS)
        scene.fetches.note_idle()
    scene.fill(0)
    latency = FetchLatency(0.1)
    usual = scene.fetches.update_window({}, latency, scene.now)
    scene.fetches.note_late_reads([0.3], 1, scene.now)
    assert (scene.fetches.update_window({}, latency, scene.now) > usual) == widens


def test_late_reads_teach_nothing_while_there_is_room_or_what_is_planned_has_just_changed() -> None:
    scene = Scene(job=list(range(100)))
    latency = FetchLatency(0.1)
    usual = scene.fetches.update_window({}, latency, scene.now)
    scene.plan.set_epoch("job", "job", 1, np.arange(100))
    for room, after in ((0, 2 * REFRESH_SECONDS), (10, 2 * SETTLE_SECONDS)):
        scene.look_again(after)
        scene.fill(room)
        scene.fetches.note_idle()
        scene.fetches.note_late_reads([0.3], 1, scene.now)
        assert scene.fetches.update_window({}, latency, scene.now) == usual


def test_a_reader_that_may_be_ahead_of_its_place_widens_its_own_window_only() -> None:
    scene = Scene(behind=list(range(100)), exact=list(range(100)))
    scene.fetches.update_window({"behind": 0.5, "exact": 0.0}, FetchLatency(0.0), scene.now)
    batch = scene.fetches.choose_for_window(1.0)
    assert batch is not None
    assert [one.number for one in batch.blocks if one.snapshot == "behind"] == list(range(16))
    assert [one.number for one in batch.blocks if one.snapshot == "exact"] == list(range(11))
    assert [one.snapshot for one in batch.blocks[:5]] == ["behind"] * 5, "what may be needed first comes first"


def test_what_a_wider_window_may_cost_depends_on_how_much_is_read() -> None:
    def widened(worth: float) -> float:
        scene = Scene(FetchLimits(2.0, worth, MANY, 1000), job=list(range(1000)))
        scene.look_again(SETTLE_SECONDS + REFRESH_SECONDS)
        scene.fill(0)
        scene.fetches.note_idle()
        scene.fetches.note_late_reads([0.3], 1, scene.now)
        return scene.fetches.update_window({}, FetchLatency(0.0), scene.now)

    # RATE blocks per second, of 1000: a second of window costs so many bytes per second.
    cost = RATE * SIZE * RATE / 1000
    assert widened(cost * COST_PERIOD_SECONDS) == pytest.approx(0.3), (
        "0.3 s of stall are worth as much as 0.3 s of window"
    )
    assert widened(cost * COST_PERIOD_SECONDS / 3) == pytest.approx(0.1)


def test_what_no_tier_took_comes_again_after_a_second() -> None:
    scene = Scene(job=list(range(3)))
    refused, taken, failed = scene.fill(3)
    scene.fetches.note_refused(refused, scene.now)
    scene.fetches.note_failed(failed, scene.now)
    scene.land([taken])
    assert numbers(scene.fetches.choose_for_window(10.0)) == [], "both pause"
    scene.look_again(0.5)
    assert numbers(scene.fetches.choose_for_window(10.0)) == []
    scene.look_again(0.6)
    assert numbers(scene.fetches.choose_for_window(10.0)) == [0, 2]


def test_the_pause_of_what_fails_grows_until_something_comes() -> None:
    scene = Scene(job=list(range(200)))
    found = scene.fill(100)
    for one in found[:99]:
        scene.fetches.note_failed(one, scene.now)
    scene.look_again(5.0)
    again = numbers(scene.fetches.choose_for_window(100.0))
    assert again[:17] == list(range(17)), "1.1 ** 17 s are more than 5 s"
    assert 17 not in again
    scene.look_again(30.0)
    assert numbers(scene.fetches.choose_for_window(100.0))[:99] == list(range(99)), "no pause is longer than 30 s"
    scene.land([found[99]])
    scene.fetches.note_started(found[:1])
    scene.fetches.note_failed(found[0], scene.now)
    scene.look_again(1.1)
    assert numbers(scene.fetches.choose_for_window(100.0))[0] == 0


def test_what_was_dropped_takes_no_room_and_does_not_pause() -> None:
    scene = Scene(job=list(range(10)))
    for one in scene.fill(4):
        scene.fetches.note_dropped(one)
    assert scene.fetches.bytes_in_flight("job") == 0
    assert numbers(scene.fetches.choose_for_window(0.35)) == [0, 1, 2, 3]


def test_a_quota_stops_its_dataset_only() -> None:
    scene = Scene(limited=[1, 2, 3, 4], free=[1, 2, 3, 4])
    found = scene.fetches.choose_for_free_room(MANY)
    kept = fit_into_quotas(found, {"limited": 2.5 * SIZE})
    assert [one.number for one in kept if one.snapshot == "limited"] == [1, 2]
    assert [one.number for one in kept if one.snapshot == "free"] == [1, 2, 3, 4]
    assert fit_into_quotas(found, {}) == found
    scene.fetches.note_started(kept)
    assert scene.fetches.bytes_in_flight("limited") == 2 * SIZE


def test_what_was_read_before_its_turn_is_left_for_later() -> None:
    scene = Scene(job=[1, 2, 3])
    scene.plan.note_early_reads("job", np.array([1]))
    assert numbers(scene.fill(10)) == [1, 3]


def test_for_a_slow_origin_a_gap_is_begun_before_its_readers_come_to_it() -> None:
    scene = Scene(job=list(range(100)))
    scene.presence.states["job"][:50] = IN_MEMORY
    scene.look_again(2.0)
    assert scene.fetches.choose_for_backlog(1.0) == [], "nothing has come yet"
    for _ in range(100):
        scene.delivered += 5 * SIZE
        scene.look_again(1.01)
    [batch] = scene.fetches.choose_for_backlog(1.0)
    assert batch is not None
    assert numbers(batch) == list(range(50, 100))
    assert batch.last_key == scene.plan.spaces["job"].key(99)
    assert scene.fetches.choose_for_backlog(1.0) == [], "no block is given twice"
    assert scene.fetches.choose_for_backlog(math.inf) == [], "the window reaches as far"


@pytest.mark.parametrize("idle", [True, False])
def test_a_low_rate_says_nothing_while_more_could_have_been_asked_for(idle: bool) -> None:
    scene = Scene(FetchLimits(2.0, WORTH, MANY, 1), job=list(range(100)))
    scene.presence.states["job"][:50] = IN_MEMORY
    busy = [] if idle else scene.fill(1)
    for rate in (50, 5):
        for _ in range(30):
            scene.delivered += rate * SIZE
            scene.fetches.note_idle()
            scene.look_again(1.01)
    for one in busy:
        scene.fetches.note_dropped(one)
    assert (scene.fetches.choose_for_backlog(1.0) == []) == idle


def test_of_a_snapshot_that_is_gone_nothing_is_asked_for() -> None:
    scene = Scene(job=[1, 2])
    [one, _] = scene.fetches.choose_for_free_room(MANY)
    scene.plan.remove_consumer("job")
    scene.plan.remove_space("job")
    assert scene.fetches.choose_for_window(10.0) is None
    with pytest.raises(KeyError):
        scene.fetches.file_blocks_of([one])


def test_blocks_are_named_as_the_origin_knows_them() -> None:
    scene = Scene(job=[5])
    [one] = scene.fill(1)
    assert scene.fetches.file_blocks_of([one]) == [(5, 0)]
    assert scene.fetches.key_of(one) == scene.plan.spaces["job"].key(5)


# --- in a cluster -----------------------------------------------------------------------------------------------------


def clustered(mine: range, limits: FetchLimits | None = None) -> tuple[Scene, Ownership]:
    """A job that reads 0, 1, 2, ...; blocks *mine* are this node's to keep."""
    scene, standing = Scene(limits, job=list(range(1000))), Ownership()
    marks = np.zeros(1000, np.bool_)
    marks[list(mine)] = True
    standing.set_owned("job", marks)
    scene.fetches = FetchPlan(
        scene.plan, scene.presence, limits or FetchLimits(2.0, WORTH, MANY, 1000), scene.now, standing
    )
    scene.look_again()
    return scene, standing


def test_free_room_is_for_what_is_this_node_s_to_keep_and_the_window_for_all() -> None:
    scene, standing = clustered(range(0, 1000, 4))
    assert numbers(scene.fill(5)) == [0, 4, 8, 12, 16]
    assert numbers(scene.fetches.choose_for_window(0.5)) == [1, 2, 3, 5]
    standing.update_owned("job", np.array([1, 3], np.int32), True)
    scene.look_again(2 * REFRESH_SECONDS)
    assert numbers(scene.fill(9)) == [1, 3, 20, 24], "what has become this node's is seen within a second"
    standing.forget_snapshot("job")
    scene.look_again(2 * REFRESH_SECONDS)
    assert numbers(scene.fill(11)) == [2, 5]


def test_copies_are_told_apart() -> None:
    scene, standing = clustered(range(0, 1000, 4))
    batch = scene.fetches.choose_for_window(1.0)
    assert batch is not None
    mine, copies = scene.fetches.split_copies(batch)
    assert numbers(mine) == [0, 4, 8]
    assert numbers(copies) == [1, 2, 3, 5], "copies come from nodes, and that does not take as long as an origin"
    assert mine.last_key == scene.fetches.key_of(mine.blocks[-1])
    standing.forget_snapshot("job")
    assert scene.fetches.split_copies(batch) == [batch]


def test_late_copies_widen_the_window_though_there_is_room() -> None:
    """They are fetched within it however much is free."""
    scene, _ = clustered(range(0, 1000, 4))
    scene.look_again(SETTLE_SECONDS + REFRESH_SECONDS)
    latency = FetchLatency(0.1)
    usual = scene.fetches.update_window({}, latency, scene.now)
    scene.fill(10)
    scene.fetches.note_idle()
    scene.fetches.note_late_reads([0.3], 1, scene.now)
    assert scene.fetches.update_window({}, latency, scene.now) == pytest.approx(usual + 0.3)


def test_the_backlog_counts_only_what_comes_from_the_origin() -> None:
    """All of it would be too much for the origin; a quarter of it is not, where it begins some seconds ahead."""
    scene, standing = clustered(range(100, 1000, 4))
    states = scene.presence.states
    bandwidth = 0.5 * RATE * SIZE
    assert find_demands(find_missing_reads(scene.plan, states, {}), bandwidth, {})["job"].backlog is not None
    assert find_demands(find_missing_reads(scene.plan, states, standing.owned), bandwidth, {})["job"].backlog is None
    standing.set_owned("job", np.arange(1000) >= 500)
    found = find_demands(find_missing_reads(scene.plan, states, standing.owned), bandwidth, {})["job"].backlog
    assert found is not None
    assert (found.last_block, found.seconds) == (999, pytest.approx(99.9))
