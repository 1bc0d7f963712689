"""Which epochs of a consumer are known, and which its plan still lacks."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from cachefs.planning.blocks.space import EpochReads, Samples
from cachefs.planning.sequences.sampler import SamplerSpec
from cachefs_daemon.jobs import epochs as module
from cachefs_daemon.jobs.epochs import Epochs

SPEC = SamplerSpec(kind="numpy", size=10, epochs=3)
EXPLICIT = SamplerSpec(kind="explicit", size=10)
ORDER = np.arange(10, dtype=np.uint32)
READS = EpochReads(np.arange(20, dtype=np.int32), None, 10, 0)
SAMPLES = cast(Samples, SimpleNamespace())


def test_the_current_epoch_and_the_next_are_missing_until_the_plan_has_them() -> None:
    epochs = Epochs(SPEC)
    assert epochs.next_unplanned(0) is None  # nobody knows yet what the samples are
    epochs.samples = SAMPLES
    assert epochs.next_unplanned(0) == 0
    epochs.reads[0] = READS
    assert epochs.next_unplanned(0) == 1
    epochs.reads[1] = READS
    assert epochs.next_unplanned(0) is None
    assert epochs.next_unplanned(1) == 2
    epochs.keep_from(1)
    assert list(epochs.reads) == [1]
    assert (epochs.shortest, epochs.reads_to_samples(8.0)) == (20, 4.0)
    assert [epochs.is_last(number) for number in range(3)] == [False, False, True]
    assert [epochs.may_be_read(number) for number in (2, 3)] == [True, False]
    assert epochs.known_epochs(1) == [1, 2]


def test_orders_that_are_published_wait_to_be_taken_and_are_kept_while_they_matter() -> None:
    epochs = Epochs(EXPLICIT)
    epochs.samples = SAMPLES
    assert (epochs.first, epochs.next_unplanned(0)) == (0, None)
    for number in (3, 4, 5):
        epochs.add_order(number, ORDER, 0)
    assert (epochs.first, epochs.next_unplanned(3), epochs.known_epochs(3)) == (3, 3, [3, 4, 5])
    assert epochs.waiting_order(3) is ORDER
    assert epochs.next_unplanned(3) == 3  # until it is in the plan
    newer = ORDER.copy()
    epochs.add_order(3, newer, 0)
    epochs.mark_planned(3, ORDER)
    assert epochs.waiting_order(3) is newer
    epochs.mark_planned(3, newer)
    assert epochs.waiting_order(3) is None
    assert epochs.next_unplanned(3) == 4
    assert list(epochs.published(4)) == [4, 5]
    assert epochs.may_be_read(77)


def test_what_is_published_too_far_ahead_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 3 * ORDER.nbytes)
    epochs = Epochs(EXPLICIT)
    assert [epochs.add_order(number, ORDER, 0) for number in (9, 1, 5, 3)] == [True] * 4
    assert sorted(epochs.published(0)) == [1, 3, 5]
    assert epochs.waiting_order(9) is None
    assert epochs.forgotten(0) == [9]  # it had been accepted
    assert not epochs.add_order(8, ORDER, 0)  # it is not: whoever publishes it learns that
    assert (epochs.forgotten(0), epochs.forgotten(10)) == ([9], [])
    for number in (1, 3, 5):
        epochs.mark_planned(number, ORDER)
    assert epochs.add_order(9, ORDER, 7)
    assert epochs.forgotten(7) == []
    epochs.note_lost([12], [])
    assert epochs.forgotten(7) == [12]


def test_many_empty_epochs_cost_no_more_than_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_ORDERS", 5)
    epochs = Epochs(EXPLICIT)
    added = [epochs.add_order(number, ORDER[:0], 0) for number in range(20)]
    assert added == [True] * 5 + [False] * 15
    for number in range(-1, -20, -1):
        epochs.add_order(number, ORDER[:0], -20)
    assert len(epochs.forgotten(-20)) == 5


def test_of_a_million_epochs_the_next_ones_are_shown() -> None:
    epochs = Epochs(SamplerSpec(kind="numpy", size=10, epochs=10**6))
    assert epochs.known_epochs(7) == list(range(7, 7 + module.MAX_SHOWN))


def test_orders_of_epochs_that_are_over_are_not_kept() -> None:
    epochs = Epochs(EXPLICIT)
    for number in range(5):
        epochs.add_order(number, ORDER, 0)
    epochs.mark_planned(0, ORDER)
    epochs.keep_from(3)
    assert (list(epochs.published(0)), epochs.waiting_order(2), epochs.order_bytes) == ([3, 4], None, 2 * ORDER.nbytes)
    # It goes back: what it publishes for that waits until the plan has it.
    epochs.add_order(0, ORDER, 3)
    epochs.keep_from(3)
    assert epochs.waiting_order(0) is ORDER


def test_of_the_epochs_at_hand_those_are_wanted_that_nobody_knows() -> None:
    """Of one that was published, a daemon that was killed may know nothing."""
    epochs = Epochs(EXPLICIT)
    assert epochs.missing_orders(3) == [3, 4]
    epochs.add_order(3, ORDER, 0)
    epochs.reads[4] = READS
    assert epochs.missing_orders(3) == []
    epochs.refuse_order(3)
    assert epochs.missing_orders(3) == [3]
    assert [Epochs(SPEC).missing_orders(epoch) for epoch in (1, 2)] == [[], []]
