"""Which epochs of a consumer are known, and which its plan still lacks."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from cachefs_daemon.jobs import epochs as module
from cachefs_daemon.jobs.epochs import Epochs

from cachefs.planning.blocks.samples import Reads, Samples
from cachefs.planning.sequences.sampler import SamplerSpec

SPEC = SamplerSpec(kind="numpy", size=10, epochs=3)
EXPLICIT = SamplerSpec(kind="explicit", size=10)
ORDER = np.arange(10, dtype=np.uint32)
READS = Reads(np.arange(20, dtype=np.int32), None, 10, 0)
SAMPLES = cast(Samples, SimpleNamespace())


def test_the_current_epoch_and_the_next_are_missing_until_the_plan_has_them() -> None:
    epochs = Epochs(SPEC)
    assert epochs.missing(0) is None  # nobody knows yet what the samples are
    epochs.samples = SAMPLES
    assert epochs.missing(0) == 0
    epochs.reads[0] = READS
    assert epochs.missing(0) == 1
    epochs.reads[1] = READS
    assert epochs.missing(0) is None
    assert epochs.missing(1) == 2
    epochs.keep_from(1)
    assert list(epochs.reads) == [1]
    assert (epochs.shortest, epochs.in_samples(8.0)) == (20, 4.0)
    assert [epochs.is_last(number) for number in range(3)] == [False, False, True]
    assert [epochs.may_be_read(number) for number in (2, 3)] == [True, False]
    assert epochs.known(1) == [1, 2]


def test_orders_that_are_published_wait_to_be_taken_and_are_kept_while_they_matter() -> None:
    epochs = Epochs(EXPLICIT)
    epochs.samples = SAMPLES
    assert (epochs.first, epochs.missing(0)) == (0, None)
    for number in (3, 4, 5):
        epochs.add(number, ORDER, 0)
    assert (epochs.first, epochs.missing(3), epochs.known(3)) == (3, 3, [3, 4, 5])
    assert epochs.waiting(3) is ORDER
    assert epochs.missing(3) == 3  # until it is in the plan
    newer = ORDER.copy()
    epochs.add(3, newer, 0)
    epochs.taken(3, ORDER)
    assert epochs.waiting(3) is newer
    epochs.taken(3, newer)
    assert epochs.waiting(3) is None
    assert epochs.missing(3) == 4
    assert list(epochs.published(4)) == [4, 5]
    assert epochs.may_be_read(77)


def test_what_is_published_too_far_ahead_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 3 * ORDER.nbytes)
    epochs = Epochs(EXPLICIT)
    assert [epochs.add(number, ORDER, 0) for number in (9, 1, 5, 3)] == [True] * 4
    assert sorted(epochs.published(0)) == [1, 3, 5]
    assert epochs.waiting(9) is None
    assert epochs.forgotten(0) == [9]  # it had been accepted
    assert not epochs.add(8, ORDER, 0)  # it is not: whoever publishes it learns that
    assert (epochs.forgotten(0), epochs.forgotten(10)) == ([9], [])
    for number in (1, 3, 5):
        epochs.taken(number, ORDER)
    assert epochs.add(9, ORDER, 7)
    assert epochs.forgotten(7) == []
    epochs.lose([12], [])
    assert epochs.forgotten(7) == [12]


def test_many_empty_epochs_cost_no_more_than_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 5)
    epochs = Epochs(EXPLICIT)
    added = [epochs.add(number, ORDER[:0], 0) for number in range(20)]
    assert added == [True] * 5 + [False] * 15
    for number in range(-1, -20, -1):
        epochs.add(number, ORDER[:0], -20)
    assert len(epochs.forgotten(-20)) == 5


def test_of_a_million_epochs_the_next_ones_are_shown() -> None:
    epochs = Epochs(SamplerSpec(kind="numpy", size=10, epochs=10**6))
    assert epochs.known(7) == list(range(7, 7 + module.SHOWN))


def test_orders_of_epochs_that_are_over_are_not_kept() -> None:
    epochs = Epochs(EXPLICIT)
    for number in range(5):
        epochs.add(number, ORDER, 0)
    epochs.taken(0, ORDER)
    epochs.keep_from(3)
    assert (list(epochs.published(0)), epochs.waiting(2), epochs.order_bytes) == ([3, 4], None, 2 * ORDER.nbytes)
    # It goes back: what it publishes for that waits until the plan has it.
    epochs.add(0, ORDER, 3)
    epochs.keep_from(3)
    assert epochs.waiting(0) is ORDER


def test_of_the_epochs_at_hand_those_are_wanted_that_nobody_knows() -> None:
    """Of one that was published, a daemon that was killed may know nothing."""
    epochs = Epochs(EXPLICIT)
    assert epochs.wanted(3) == [3, 4]
    epochs.add(3, ORDER, 0)
    epochs.reads[4] = READS
    assert epochs.wanted(3) == []
    epochs.refuse(3)
    assert epochs.wanted(3) == [3]
    assert [Epochs(SPEC).wanted(epoch) for epoch in (1, 2)] == [[], []]
