"""What a sampler of one's own will give is found in the lists that it goes through, and in the epoch before."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from cachefs.hooks.order.library_iterators import read_iterator
from cachefs.hooks.order.prediction import SHORTEST_RUN, OrderPrediction, samples_after

SIZE, BATCH = 120, 6


class Shuffled:
    """Has its order as an attribute, and goes through it by its places."""

    def __init__(self, order: Any) -> None:
        self.order = order

    def __iter__(self) -> Iterator[Any]:
        for place in range(len(self.order)):
            yield self.order[place]


class Watched:
    """An iterator with a class of its own."""

    def __init__(self, order: Any) -> None:
        self.order, self.place = order, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.place += 1
        if self.place > len(self.order):
            raise StopIteration
        return self.order[self.place - 1]


def permutation() -> list[int]:
    return random.Random(5).sample(range(SIZE), SIZE)


def a_local() -> Iterator[int]:
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(1))
    for place in range(SIZE):
        yield int(order[place])


def slices() -> Iterator[list[int]]:
    order = permutation()
    for start in range(0, SIZE, BATCH):
        yield order[start : start + BATCH]


def rows() -> Iterator[list[int]]:
    order = numpy.random.default_rng(1).permutation(SIZE).reshape(-1, BATCH)
    for row in order:
        yield row.tolist()


def shuffled_batches() -> Iterator[list[int]]:
    batches = [list(range(start, start + BATCH)) for start in range(0, SIZE, BATCH)]
    random.Random(7).shuffle(batches)
    for batch in batches:
        yield list(batch)


def classes_in_turns() -> Iterator[int]:
    classes = [random.Random(each).sample(range(each, SIZE, 4), SIZE // 4) for each in range(4)]
    for row in zip(*classes, strict=True):
        for sample in row:
            yield int(sample)


def popped() -> Iterator[int]:
    left = permutation()
    while left:
        yield left.pop()


def taken_from_the_left() -> Iterator[int]:
    left = deque(permutation())
    while left:
        yield left.popleft()


def cut_off() -> Iterator[list[int]]:
    order = permutation()
    while order:
        batch, order = order[:BATCH], order[BATCH:]
        yield batch


def popped_batches() -> Iterator[list[int]]:
    order = permutation()
    batches = [order[start : start + BATCH] for start in range(0, SIZE, BATCH)]
    while batches:
        yield batches.pop()


def mapped() -> Iterator[int]:
    return map(int, numpy.array(permutation()))


GUESSED: list[Callable[[], Any]] = [
    lambda: Shuffled(permutation()), lambda: Shuffled(numpy.array(permutation())),
    lambda: Shuffled(torch.tensor(permutation())), lambda: Watched(permutation()), a_local, slices, rows,
    shuffled_batches, classes_in_turns, popped, taken_from_the_left, cut_off, popped_batches, mapped,
    lambda: reversed(permutation()), lambda: (one for one in permutation()),
]  # fmt: skip


def numbers(batch: Any) -> list[int]:
    return [int(one) for one in batch] if isinstance(batch, (list, tuple)) else [int(batch)]


@pytest.mark.parametrize("made", GUESSED)
@pytest.mark.parametrize("wrapped", [True, False])
def test_the_rest_of_an_epoch_is_guessed(made: Callable[[], Any], wrapped: bool) -> None:
    sampler: Any = made()
    one_by_one = not isinstance(next(iter(made())), (list, tuple))
    if wrapped and one_by_one:
        sampler = BatchSampler(sampler, BATCH, False)
    guesses, iterator = OrderPrediction((sampler, getattr(sampler, "sampler", None))), iter(sampler)
    guesses.begin_epoch()
    found, drawn = None, 0
    while found is None and drawn < 64:
        batch = numbers(next(iterator))
        drawn += len(batch)
        assert guesses.check_drawn(batch)
        held = read_iterator(iterator)
        found = guesses.predict_order(iterator, SIZE) if held is None else held.samples
    rest = [one for batch in iterator for one in numbers(batch)]
    assert found is not None
    assert len(found) >= BATCH
    assert found.tolist() == rest[: len(found)]


def unguessable() -> Iterator[int]:
    order = permutation()
    while order:
        yield order.pop(random.randrange(len(order)))


class Ones:
    """Looks like a number, and runs code of the job."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("code of the job was run")

    __hash__ = None  # type: ignore[assignment]


class WithProperties:
    """Whose attributes and lists are not to be touched."""

    def __init__(self) -> None:
        self.many = [Ones() for _ in range(SIZE)]
        self.sampler_of = type("Derived", (list,), {"__getitem__": None})(range(SIZE))

    @property
    def order(self) -> list[int]:
        raise AssertionError("a property was run")

    def __len__(self) -> int:
        raise AssertionError("code of the job was run")

    def __iter__(self) -> Iterator[int]:
        for place in range(SIZE):
            yield place * 7 % SIZE


@pytest.mark.parametrize("seed", [0, 41, 139, 145])  # of the last three, one sample comes from an end of the list
@pytest.mark.parametrize("made", [unguessable, WithProperties])
def test_nothing_is_guessed(made: Callable[[], Any], seed: int) -> None:
    random.seed(seed)
    sampler: Any = made()
    guesses, iterator = OrderPrediction((sampler,)), iter(sampler)
    guesses.begin_epoch()
    for _ in range(SIZE // 2):
        guesses.check_drawn([next(iterator)])
        assert guesses.predict_order(iterator, SIZE) is None


def epoch_of(guesses: OrderPrediction, samples: list[int]) -> list[int]:
    """Go through an epoch, batch by batch; what was guessed in it, and how many samples of it came as guessed."""
    guesses.begin_epoch()
    said: list[int] = []
    for start in range(0, len(samples), BATCH):
        guesses.check_drawn(samples[start : start + BATCH])
        found = guesses.predict_order(iter(()), SIZE)
        more = guesses.extend_published()
        for one in (found, more):
            said += one.tolist() if one is not None else []
    return said


def test_an_epoch_that_begins_as_the_one_before_is_expected_to_go_on_so() -> None:
    guesses, samples = OrderPrediction(()), permutation()
    assert epoch_of(guesses, samples) == []
    assert epoch_of(guesses, samples) == samples[BATCH:]
    assert epoch_of(guesses, samples) == samples[BATCH:]


def test_who_is_wrong_twice_guesses_no_more() -> None:
    guesses, samples = OrderPrediction(()), permutation()
    epoch_of(guesses, samples)
    guessed: list[bool] = []
    for _ in range(5):
        rest = samples[2 * BATCH :]
        random.Random(len(guessed)).shuffle(rest)
        samples = [*samples[: 2 * BATCH], *rest]
        guessed.append(bool(epoch_of(guesses, samples)))
    assert guessed == [True, True, False, False, False]


@given(st.lists(st.integers(0, 500), min_size=1, max_size=60, unique=True), st.data())
def test_what_comes_after_a_run(samples: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(samples) - 1))
    end = data.draw(st.integers(start + 1, len(samples)))
    run = samples[start:end]
    for items in (samples, tuple(samples), numpy.array(samples), [[one] for one in samples]):
        found = samples_after(items, run)
        assert found is not None
        assert found.samples.tolist() == samples[end:]
        if len(run) >= min(SHORTEST_RUN, 2):
            backwards = samples_after(items, run[::-1])
            assert backwards is not None
            assert backwards.samples.tolist() == samples[:start][::-1]
    assert samples_after(samples, [*run, 501]) is None


def test_a_run_that_a_list_has_twice_says_nothing() -> None:
    assert samples_after([1, 2, 3, 4, 1, 2, 3, 5], [1, 2, 3]) is None
