from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.eviction.policies.alsd import Alsd
from cachefs.planning.sequences.plan import Plan
from tests.simulated import space_of

BLOCKS = 1000
SPACE = space_of([1] * (BLOCKS + 1))
FOREIGN = b"f" * 20


def plan_of(positions: Sequence[int], epochs: int = 2, rates: Sequence[float] | None = None) -> Plan:
    """A plan of jobs that all read the blocks 0 to 999 in this order, and are at these positions."""
    plan = Plan()
    plan.add_space(SPACE)
    for job, position in enumerate(positions):
        for epoch in range(epochs):
            plan.set_epoch(f"job{job}", "space", epoch, np.arange(BLOCKS))
        plan.set_progress(f"job{job}", 0, position, rates[job] if rates else 1.0)
    return plan


def scores(plan: Plan, certain: int, blocks: Sequence[int]) -> list[float]:
    policy = Alsd(plan, certain=certain)
    return [policy.incoming_score(SPACE.key(block)) for block in blocks]


def test_distances_are_known_for_a_moment_only() -> None:
    plan = plan_of([200])
    certain, likely, visited, unknown = scores(plan, 100, [250, 900, 10, BLOCKS])
    assert (certain, likely, visited) == (50, 100 + (800 - 100) / 2, 800 + 500)
    assert unknown > visited
    assert Alsd(plan).incoming_score(FOREIGN) == float("inf")


def test_certain_reads_may_be_of_the_next_epoch() -> None:
    assert scores(plan_of([950]), 100, [960, 20, 500]) == [10, 70, 100 + (50 + 1000 - 100) / 2]


def test_a_block_that_more_jobs_will_read_is_expected_sooner() -> None:
    assert scores(plan_of([200, 200, 200]), 100, [900, 10]) == pytest.approx([100 + 350 / 3, 800 + 500 / 3])


def test_a_read_that_cannot_come_before_a_time_does_not_hasten_earlier_ones() -> None:
    """Of two jobs one may read the block from second 100 on, with 500 more on average; the other from 800 on."""
    assert scores(plan_of([900, 200]), 50, [10]) == [pytest.approx(100 + 500)]
    assert scores(plan_of([900, 700]), 50, [10]) == [pytest.approx(300 + 500 / 2)]


def test_the_soonest_certain_read_counts_whatever_others_are_expected() -> None:
    assert scores(plan_of([0, 80, 999]), 100, [90]) == [10]


def test_faster_jobs_count_for_more() -> None:
    plan = plan_of([200, 200], rates=[1.0, 9.0])
    assert scores(plan, 100, [10]) == [pytest.approx(min(800 / 9 + 500 / 9, 800 + 1 / (9 / 500 + 1 / 500)))]


def test_a_job_without_further_reads_counts_for_nothing() -> None:
    plan = plan_of([200])
    plan.set_epoch("last", "space", 0, np.arange(BLOCKS), is_last=True)
    plan.set_progress("last", 0, 500, 1.0)
    assert scores(plan, 100, [300]) == [100 + 700 / 2]
    plan.remove_consumer("job0")
    assert scores(plan, 100, [300]) == [float("inf")]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 50)), min_size=1, max_size=4), st.integers(0, 1 << 30))
def test_with_certain_reads_it_is_clairvoyant(jobs: list[tuple[int, int]], seed: int) -> None:
    draw = np.random.default_rng(seed)
    space = space_of([1] * 30)
    plan = Plan()
    plan.add_space(space)
    for job, (position, rate) in enumerate(jobs):
        for epoch in (0, 1):
            plan.set_epoch(f"job{job}", "space", epoch, draw.permutation(30), is_last=epoch == 1)
        plan.set_progress(f"job{job}", 0, position, rate)
    keys = space.keys(np.arange(30))
    policy = Alsd(plan, certain=1000)
    assert [policy.incoming_score(key) for key in keys] == pytest.approx(plan.next_use(keys).tolist())
