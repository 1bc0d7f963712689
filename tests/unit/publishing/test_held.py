"""What lies ready in a sampler's iterator is read without advancing it."""

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler

from cachefs.hooks.loader_watch import count_samples
from cachefs.hooks.order import remaining
from cachefs.hooks.order.foresee import numbers_in
from cachefs.hooks.order.library_iterators import read_iterator
from cachefs.hooks.order.remaining import UnreadableItems


class Sampler:
    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class Delegating(Sampler):
    def __iter__(self) -> Iterator[Any]:
        yield from Sampler(self.items)


class OneByOne(Sampler):
    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            yield item * 2 % 20


class ListOfOnesOwn(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("code of the job was run")


HELD: list[Any] = [
    Sampler(list(range(20))), Sampler(tuple(range(20))), Sampler(range(0, 40, 2)), Delegating(list(range(20))),
    Sampler(list(numpy.arange(20))), BatchSampler(Sampler(list(range(20))), 4, False),
    BatchSampler(Delegating(list(range(20))), 4, True), BatchSampler(RandomSampler(range(20)), 3, False),
    BatchSampler(Sampler(range(20)), 4, False), Sampler([[1, 2], [3], [4, 5, 6]]),
]  # fmt: skip
NOT_HELD: list[Any] = [
    OneByOne(range(20)), BatchSampler(OneByOne(range(20)), 4, False),
    Sampler(ListOfOnesOwn(range(20))), BatchSampler(SubsetRandomSampler(range(20)), 4, False),
]  # fmt: skip


def flat(items: Any) -> list[int]:
    return [int(one) for item in items for one in (item if isinstance(item, list) else [item])]


@pytest.mark.parametrize("sampler", HELD)
def test_the_rest_of_an_epoch_lies_ready(sampler: Any) -> None:
    iterator = iter(sampler)
    next(iterator)
    found = read_iterator(iterator)
    assert found is not None
    assert found.samples.tolist() == flat(iterator)
    at_end = read_iterator(iterator)
    assert at_end is None or not len(at_end.samples)


@pytest.mark.parametrize("sampler", NOT_HELD)
def test_nothing_lies_ready(sampler: Any) -> None:
    iterator = iter(sampler)
    next(iterator)
    assert read_iterator(iterator) is None


def test_a_last_batch_that_is_dropped_is_not_counted() -> None:
    iterator = iter(BatchSampler(Sampler(list(range(10))), 4, True))
    next(iterator)
    found = read_iterator(iterator)
    assert found is not None
    assert found.samples.tolist() == flat(iterator) == [4, 5, 6, 7]


def test_of_a_range_without_an_end_only_the_beginning_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remaining, "MAX_NUMBERS", 5)
    iterator = iter(Delegating(range(10**15)))
    next(iterator)
    found = read_iterator(iterator)
    assert found is not None
    assert found.samples.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("items", [["a", "b", "c"], [[1, 2], {"of": 3}], [{}, {}], [2**70, 2**70]])
def test_what_is_no_number_is_told_from_nothing(items: list[Any]) -> None:
    iterator = iter(Sampler(items))
    if items[0] == [1, 2]:
        found = read_iterator(iterator)
        assert found is not None
        assert (found.samples.tolist(), found.is_complete) == ([1, 2], False), "what comes before it is read"
        next(iterator)
    with pytest.raises(remaining.UnreadableItems):
        read_iterator(iterator)


class Counted(list[Any]):
    """What the job's own lists are asked for."""

    asked = 0

    def __len__(self) -> int:
        Counted.asked += 1
        return super().__len__()

    def __iter__(self) -> Iterator[Any]:
        Counted.asked += 1
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        Counted.asked += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("batches", "sizes"),
    [
        ([torch.arange(3), torch.arange(2), range(4)], [3, 2, 4]),
        ([[numpy.int32(3), 7], (8, numpy.int32(9), torch.tensor(4))], [2, 3]),
        ([1, 2, 3], None),
    ],
)
def test_the_samples_of_batches_are_counted(batches: list[Any], sizes: list[int] | None) -> None:
    found = read_iterator(iter(Sampler(batches)))
    assert found is not None
    assert (None if found.sizes is None else found.sizes.tolist()) == sizes
    assert [count_samples(one) for one in batches] == (sizes or [1, 1, 1])
    assert len(found.samples) == sum(count_samples(one) for one in batches)


@pytest.mark.parametrize(
    "batch",
    [
        [(7, 320), (9, 320)],
        [[1, 2], [3]],
        [(7, "flipped"), 9],
        torch.arange(6).reshape(2, 3),
        [numpy.arange(3), numpy.arange(1)],
        [(7, 0.5), (9, 0.5)],
    ],
)
def test_an_item_that_is_no_number_is_one_sample_without_a_number(batch: Any) -> None:
    assert count_samples(batch) == 2
    assert numbers_in(batch) is None
    with pytest.raises(UnreadableItems):
        read_iterator(iter(Sampler([batch, batch])))


def test_a_batch_of_a_class_of_the_jobs_own_is_counted_without_its_code() -> None:
    Counted.asked = 0
    batch = Counted([1, 2, 3])
    assert count_samples(batch) == 3
    assert numbers_in(batch) is None
    assert Counted.asked == 0


def test_a_long_list_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remaining, "MAX_NUMBERS", 8)
    batches = [[4 * one, 4 * one + 1, 4 * one + 2, 4 * one + 3] for one in range(5)]
    iterator = iter(Sampler(batches))
    read: list[int] = []
    while len(read) < 20:
        found = read_iterator(iterator)
        assert found is not None
        assert found.sizes is not None
        assert 0 < len(found.samples) <= 12
        assert found.is_complete == (len(read) + len(found.samples) == 20)
        read += found.samples.tolist()
        for _ in found.sizes:
            next(iterator)
    assert read == list(range(20))


def test_a_last_batch_of_what_is_read_in_parts_is_no_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remaining, "MAX_NUMBERS", 10)
    found = read_iterator(iter(Sampler(list(range(20)))))
    assert found is not None
    batches = found.in_batches(4, drop_last=False)
    assert (batches.samples.tolist(), batches.is_complete) == (list(range(8)), False)
