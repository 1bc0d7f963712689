import numpy as np
import pytest

from cachefs.planning.sequences.tripwires import (
    MAX_INTERVAL,
    MIN_INTERVAL,
    MIN_TRIPWIRES_PER_EPOCH,
    UNKNOWN_RATE_INTERVAL,
    TripwireInterval,
    are_tripwires,
    interval_for_rate,
    next_tripwires,
)


def test_intervals_are_powers_of_two_for_at_most_25_a_second() -> None:
    assert [interval_for_rate(rate) for rate in (0, 1, 200, 201, 450, 12_000, 1e9)] == [
        UNKNOWN_RATE_INTERVAL,
        8,
        8,
        16,
        32,
        512,
        MAX_INTERVAL,
    ]
    assert MIN_INTERVAL == 8


def test_tripwires_of_a_longer_interval_are_those_of_a_shorter_one_too() -> None:
    reads = np.arange(4096)
    every = {k: set(reads[are_tripwires(reads, k)].tolist()) for k in (8, 32, 1024)}
    assert every[1024] < every[32] < every[8]
    assert len(every[8]) == 512
    assert not are_tripwires(reads, 0).any()


def test_only_the_next_ones_move_a_consumer() -> None:
    reads = np.array([31, 63, 95, 400])
    assert next_tripwires(reads, 0, 128).tolist() == [31, 63, 95]
    assert next_tripwires(reads, 300, 128).tolist() == [31, 63, 95, 400]
    assert next_tripwires(reads, 0, 16).tolist() == []


def test_an_interval_is_kept_at_a_rate_near_its_limit_and_follows_beyond() -> None:
    interval = TripwireInterval()
    assert [follow(interval, rate, 0.0) for rate in (0, 399, 401, 310, 290, 399, 401)] == [32, 32, 32, 32, 16, 16, 32]
    assert [follow(interval, rate, 0.0) for rate in (12_000, 1e9, 1)] == [512, 1024, 8]


def test_what_was_left_out_is_known_until_its_pages_have_come() -> None:
    interval = TripwireInterval()
    follow(interval, 100, 0.0)
    assert interval.left_out == 8
    follow(interval, 800, 1.0)
    assert (interval.current, interval.left_out) == (32, 8)
    follow(interval, 800, 2.9)
    assert interval.left_out == 8
    follow(interval, 800, 3.1)
    assert interval.left_out == 32


@pytest.mark.parametrize("count", [*range(1, 40), 100, 1000, 4095, 4096])
@pytest.mark.parametrize("rate", [0, 100, 12_000, 1e9])
def test_every_epoch_has_tripwires(count: int, rate: float) -> None:
    wires = TripwireInterval()
    every = follow(wires, rate, 0.0, count)
    assert every == 1 << (every.bit_length() - 1)
    assert are_tripwires(np.arange(count), every).sum() >= min(count // MIN_INTERVAL, MIN_TRIPWIRES_PER_EPOCH)
    assert wires.left_out == min(every, UNKNOWN_RATE_INTERVAL)
    # And no more of them than in long epochs, where the rate allows.
    assert every == interval_for_rate(rate) or every > count / MIN_TRIPWIRES_PER_EPOCH / 2


def test_an_interval_grows_again_with_the_epochs() -> None:
    interval = TripwireInterval()
    assert [follow(interval, 800, time, epoch) for time, epoch in enumerate((0, 10, 10**6))] == [32, 8, 32]


def follow(interval: TripwireInterval, rate: float, time: float, epoch: int = 10**6) -> int:
    interval.update(rate, epoch, time)
    return interval.current
