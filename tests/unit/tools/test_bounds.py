"""What the benchmark expects, compared with brute force and with simulation."""

from collections import OrderedDict

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs_bench.bounds import belady_reads, least_reads, lru_reads, merge_reads
from cachefs_bench.training_node import budget_for
from cachefs_daemon.store.capacity import metadata_reserve


def fewest_misses(sequence: list[int], capacity: int) -> int:
    """The least number of misses, found by trying every choice of samples to keep after each read."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for sample in sequence:
        following: dict[frozenset[int], int] = {}
        for held, misses in states.items():
            after, count = held | {sample}, misses + (sample not in held)
            choices = [after] if len(after) <= capacity else [after - {one} for one in after]
            for choice in choices:
                following[choice] = min(count, following.get(choice, count))
        states = following
    return min(states.values())


@given(st.lists(st.integers(0, 5), min_size=1, max_size=14), st.integers(1, 4))
def test_belady_needs_no_more_than_any_other_choice(sequence: list[int], capacity: int) -> None:
    assert belady_reads(sequence, capacity) == fewest_misses(sequence, capacity)


def test_reads_of_several_readers_merge_in_the_order_of_time() -> None:
    quick, slow = numpy.array([1, 2, 3, 4], numpy.uint32), numpy.array([5, 6], numpy.uint32)
    assert merge_reads([(quick, 0.0, 4.0), (slow, 0.0, 4.0)]).tolist() == [1, 5, 2, 3, 6, 4]
    assert merge_reads([(slow, 10.0, 11.0), (quick, 0.0, 4.0)]).tolist() == [1, 2, 3, 4, 5, 6]
    assert merge_reads([(slow, 0.0, 0.0), (quick[:0], 0.0, 0.0)]).tolist() == [5, 6]


def test_who_does_not_know_of_a_job_keeps_the_wrong_samples() -> None:
    sequence = [1, 2, 1, 1, 2]
    assert belady_reads(sequence, 1) == 3
    assert belady_reads(sequence, 1, numpy.array([0, 0, 2, 2, 0])) == 4, (
        "for the first read of the second job 2 is kept"
    )


@pytest.mark.parametrize("share", [0.35, 0.5, 0.8])
def test_belady_over_shuffled_epochs_comes_close_to_the_closed_form(share: float) -> None:
    files, epochs = 2000, 5
    capacity = int(share * files)
    sequence = numpy.concatenate([numpy.random.RandomState(epoch).permutation(files) for epoch in range(epochs)])
    reads = belady_reads(sequence, capacity)
    assert least_reads(files, capacity, epochs) <= reads <= 1.002 * least_reads(files, capacity, epochs)


@pytest.mark.parametrize("share", [0.35, 0.5, 0.8])
def test_lru_over_shuffled_epochs_is_as_its_closed_form_says(share: float) -> None:
    files, epochs = 2000, 5
    capacity = int(share * files)
    held: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for epoch in range(epochs):
        for sample in numpy.random.RandomState(epoch).permutation(files).tolist():
            misses += sample not in held
            held[sample] = None
            held.move_to_end(sample)
            if len(held) > capacity:
                held.popitem(last=False)
    assert misses == pytest.approx(lru_reads(files, capacity, epochs), rel=0.02)


def test_tiers_that_hold_everything_need_each_sample_once() -> None:
    assert (
        least_reads(100, 100, 7) == least_reads(100, 200, 7) == lru_reads(100, 100, 7) == lru_reads(100, 200, 7) == 100
    )


@given(st.integers(0, 1 << 45))
def test_a_tier_of_that_budget_takes_just_so_many_bytes(size: int) -> None:
    budget = budget_for(size)
    assert size <= budget - metadata_reserve(budget) * bool(size) <= size + 1
