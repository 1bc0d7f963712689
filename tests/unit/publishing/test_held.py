"""What lies ready in a sampler's iterator is read without advancing it."""

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler

from cachefs.hooks import rest
from cachefs.hooks.held import still_held


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
    OneByOne(range(20)), BatchSampler(OneByOne(range(20)), 4, False), Sampler(["a", "b"]),
    Sampler(ListOfOnesOwn(range(20))), BatchSampler(SubsetRandomSampler(range(20)), 4, False),
]  # fmt: skip


def flat(items: Any) -> list[int]:
    return [int(one) for item in items for one in (item if isinstance(item, list) else [item])]


@pytest.mark.parametrize("sampler", HELD)
def test_the_rest_of_an_epoch_lies_ready(sampler: Any) -> None:
    iterator = iter(sampler)
    next(iterator)
    found = still_held(iterator)
    assert found is not None
    assert found.tolist() == flat(iterator)
    assert still_held(iterator) is None or not len(still_held(iterator))  # type: ignore[arg-type]


@pytest.mark.parametrize("sampler", NOT_HELD)
def test_nothing_lies_ready(sampler: Any) -> None:
    iterator = iter(sampler)
    next(iterator)
    assert still_held(iterator) is None


def test_a_last_batch_that_is_dropped_is_not_counted() -> None:
    iterator = iter(BatchSampler(Sampler(list(range(10))), 4, True))
    next(iterator)
    found = still_held(iterator)
    assert found is not None
    assert found.tolist() == flat(iterator) == [4, 5, 6, 7]


def test_of_a_range_without_an_end_only_the_beginning_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest, "MAX_SAMPLES", 5)
    iterator = iter(Delegating(range(10**15)))
    next(iterator)
    found = still_held(iterator)
    assert found is not None
    assert found.tolist() == [1, 2, 3, 4, 5]
