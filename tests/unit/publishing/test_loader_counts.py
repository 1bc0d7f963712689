"""How long a loop waits for its loader is counted right, whatever the loop does."""

from cachefs.publishing.page import Stopwatch


def test_a_loop_waits_from_when_it_asks_until_it_gets() -> None:
    watch = Stopwatch()
    watch.begin_epoch(100, 8)
    for start in (110, 150):
        watch.record_request(start)
        watch.record_batch(start + 20, 4)
    tally = watch.counts
    assert (tally.epochs, tally.epoch_length, tally.epoch_samples, tally.samples) == (1, 8, 8, 8)
    assert (tally.busy, tally.waited, tally.first_busy, tally.first_waited) == (70, 40, 70, 40)


def test_batches_whose_length_is_not_seen_are_counted_apart() -> None:
    watch = Stopwatch()
    watch.begin_epoch(0)
    for is_measured in (True, False, True):
        watch.record_request(1)
        watch.record_batch(2, 10, is_measured=is_measured)
    assert (watch.counts.batches, watch.counts.unmeasured, watch.counts.samples) == (3, 1, 30)


def test_what_lies_between_two_epochs_counts_for_nothing() -> None:
    """As a validation, and the question for a batch that is answered by the end of the epoch."""
    watch = Stopwatch()
    watch.begin_epoch(1)
    watch.record_request(1)
    watch.record_batch(11, 1)
    watch.record_request(12)  # this one ends the epoch
    watch.begin_epoch(1000)
    watch.record_request(1001)
    watch.record_batch(1011, 1)
    tally = watch.counts
    assert (tally.epochs, tally.busy, tally.waited) == (2, 21, 20)
    assert (tally.epoch_busy, tally.epoch_samples, tally.samples) == (11, 1, 2)
    assert (tally.first_busy, tally.first_waited) == (10, 10)


def test_without_workers_an_epoch_begins_with_its_first_question() -> None:
    watch = Stopwatch()
    watch.record_request(50)
    watch.begin_epoch(60, 4, has_requested=True)
    watch.record_batch(80, 4)
    assert (watch.counts.busy, watch.counts.waited) == (30, 30)


def test_a_batch_that_nobody_has_asked_for_is_none() -> None:
    watch = Stopwatch()
    watch.record_batch(10, 4)
    watch.begin_epoch(20)
    watch.record_batch(30, 4)
    assert watch.counts.samples == 0


def test_the_length_of_an_epoch_is_what_is_known_best() -> None:
    watch = Stopwatch()
    watch.begin_epoch(0)
    watch.assume_length(100)
    assert watch.counts.epoch_length == 100
    watch.set_length(90)
    assert (watch.counts.epoch_length, watch.last_length) == (90, 90)
    watch.record_request(1)
    watch.record_batch(2, 95)
    assert watch.counts.epoch_length == 95
