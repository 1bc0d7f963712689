"""What a sampler will give is said without touching it or what it draws from."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import cachefs
from cachefs.hooks.order import foresee
from cachefs.hooks.order.foresee import SamplerOrder, numbers_in


def generator_of(kind: str) -> torch.Generator | None:
    return torch.Generator().manual_seed(5) if kind == "own" else None


def sampler_of(kind: str, size: int, generator: torch.Generator | None) -> Any:
    numbers = range(size)
    return {
        "random": lambda: RandomSampler(numbers, generator=generator),
        "fewer": lambda: RandomSampler(numbers, num_samples=max(1, size // 2), generator=generator),
        "more": lambda: RandomSampler(numbers, num_samples=2 * size + 1, generator=generator),
        "replacement": lambda: RandomSampler(numbers, replacement=True, num_samples=77, generator=generator),
        "subset": lambda: SubsetRandomSampler(numbers, generator=generator),
        "weighted": lambda: WeightedRandomSampler([1.0] * size, size, generator=generator),
    }[kind]()


def foreseen(loader: Any) -> tuple[list[int], list[int]]:
    found = SamplerOrder(loader).foresee_orders()
    assert found is not None
    current, following = found
    return current.tolist(), following.tolist()


@given(
    kind=st.sampled_from(["random", "fewer", "more", "replacement", "subset", "weighted"]),
    generator=st.sampled_from(["own", "global"]),
    loaders_own=st.booleans(),
    size=st.integers(1, 50),
    batch=st.integers(1, 9),
    drop_last=st.booleans(),
)
def test_two_epochs_come_as_foreseen(
    kind: str, generator: str, loaders_own: bool, size: int, batch: int, drop_last: bool
) -> None:
    torch.manual_seed(9)
    own = generator_of(generator)
    sampler = sampler_of(kind, size, own)
    loader: DataLoader[Any] = DataLoader(
        range(size),  # type: ignore[arg-type]
        batch, sampler=sampler, drop_last=drop_last, generator=own if loaders_own else None,
    )  # fmt: skip
    iterator = iter(loader)
    current, following = foreseen(loader)
    assert [int(index) for indices in iterator for index in indices] == current
    assert [int(index) for indices in loader for index in indices] == following


@pytest.mark.parametrize("kind", ["random", "subset", "weighted"])
def test_a_rank_of_many_says_one_epoch_more(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    loader: DataLoader[Any] = DataLoader(range(30), 4, sampler=sampler_of(kind, 30, generator_of("own")))  # type: ignore[arg-type]
    monkeypatch.setattr(SamplerOrder, "rank", lambda _: (0, 8))
    ours, iterator = SamplerOrder(loader), iter(loader)
    found = ours.foresee_orders()
    assert found is not None
    assert len(found) == 3
    for epoch, batches in enumerate((iterator, loader, loader)):
        assert [int(index) for indices in batches for index in indices] == found[epoch].tolist()
    monkeypatch.setattr(foresee, "MAX_COST", 29)
    assert ours.foresee_orders() is None, "the job would wait for large ones"


def test_a_distributed_sampler_whose_epoch_is_not_set_repeats_itself() -> None:
    sampler = DistributedSampler(range(9), 2, 0)  # type: ignore[arg-type, var-annotated]
    found = SamplerOrder(DataLoader(range(9), sampler=sampler)).foresee_orders()  # type: ignore[arg-type]
    assert found is not None
    assert [one.tolist() for one in found] == [list(sampler)] * 3


def test_foreseeing_draws_nothing() -> None:
    own = torch.Generator().manual_seed(1)
    loader: DataLoader[Any] = DataLoader(range(99), shuffle=True, generator=own)  # type: ignore[arg-type]
    before = own.get_state(), torch.get_rng_state()
    foreseen(loader)
    assert torch.equal(before[0], own.get_state())
    assert torch.equal(before[1], torch.get_rng_state())


def test_where_torch_computes_otherwise_nothing_is_foreseen() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    ours = SamplerOrder(DataLoader(range(9), shuffle=True))  # type: ignore[arg-type]
    with FakeTensorMode():
        assert ours.foresee_orders() is None
    with torch.device("meta"):  # the default device of what the job makes
        assert ours.foresee_orders() is not None


class Derived(RandomSampler):
    """Leaves iterating to torch."""


class Reversed(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(reversed(list(super().__iter__())))


@cachefs.pure_sampler
class Pure:
    epoch = 3

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[int]:
        return iter([(one * self.epoch) % 7 for one in range(9)])


class OfPure(Pure):
    """Iterates as a sampler that is pure."""


KNOWN: list[tuple[Any, bool]] = [
    (RandomSampler(range(9)), True),
    (Derived(range(9)), True),
    (Reversed(range(9)), False),
    (SubsetRandomSampler(torch.arange(9)), False),  # type: ignore[arg-type]  # computes its items
    (Pure(), True),
    (OfPure(), True),
    (DistributedSampler(range(9), 2, 0), True),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("sampler", "known"), KNOWN)
def test_only_samplers_that_iterate_as_known_ones_are_known(sampler: Any, known: bool) -> None:
    loader: DataLoader[Any] = DataLoader(range(9), sampler=sampler)  # type: ignore[arg-type]
    assert (SamplerOrder(loader).foresee_orders() is not None) is known


def test_a_sampler_that_says_it_is_pure_is_iterated() -> None:
    loader: DataLoader[Any] = DataLoader(range(9), 2, sampler=Pure(), drop_last=True)  # type: ignore[arg-type]
    found = SamplerOrder(loader).foresee_orders()
    assert found is not None
    assert [one.tolist() for one in found] == [[0, 3, 6, 2, 5, 1, 4, 0]]


def test_numbers_and_batches_of_them_are_found_and_others_refused() -> None:
    assert numbers_in([6, torch.tensor(7), numpy.int64(8)]) == [6, 7, 8]
    assert numbers_in([[3, 4], 5]) is None
    assert numbers_in(range(3, 5)) == [3, 4]
    assert numbers_in(numpy.arange(3)) == [0, 1, 2]
    assert numbers_in(numpy.int32(3)) == [3]
    assert numbers_in([("a", 1)]) is None
    assert numbers_in([[None, None]]) is None
    assert numbers_in("a") is None


@cachefs.pure_sampler
class Endless:
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


@pytest.mark.parametrize("patience", [100.0, 0.0])
def test_of_a_pure_sampler_without_an_end_only_the_beginning_is_taken(
    monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    monkeypatch.setattr(foresee, "MAX_COST", 1000)
    monkeypatch.setattr(foresee, "PURE_SECONDS", patience)
    loader: DataLoader[Any] = DataLoader(range(9), 2, sampler=Endless())  # type: ignore[arg-type, call-overload]
    found = SamplerOrder(loader).foresee_orders()
    assert found is not None
    assert found[0].tolist() == list(range(1000 if patience else 1))


def test_a_pure_sampler_that_is_slow_is_not_iterated_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    @cachefs.pure_sampler
    class Slow:
        def __iter__(self) -> Iterator[int]:
            nonlocal now
            now += 60  # before it gives anything: it does so for the job as well
            for sample in range(10**6):
                now += 0.01
                yield sample

    monkeypatch.setattr(foresee, "clock", SimpleNamespace(monotonic=lambda: now))
    found = SamplerOrder(DataLoader(range(9), sampler=Slow())).foresee_orders()  # type: ignore[arg-type, call-overload]
    assert found is not None
    assert 10 < len(found[0]) < 200
    assert now < 60 + foresee.PURE_SECONDS + 0.03


def test_the_clock_is_looked_at_between_samples_and_what_was_too_slow_is_not_foreseen_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    given = 0

    @cachefs.pure_sampler
    class Reading:
        """Reads a length from somewhere for each sample, but for the first ones."""

        def __iter__(self) -> Iterator[int]:
            nonlocal now, given
            for sample in range(1000):
                now += 2.0 if sample >= 100 else 0.0
                given += 1
                yield sample

    monkeypatch.setattr(foresee, "clock", SimpleNamespace(monotonic=lambda: now))
    ours = SamplerOrder(DataLoader(range(9), sampler=Reading()))  # type: ignore[arg-type, call-overload]
    found = ours.foresee_orders()
    assert found is not None
    assert found[0].tolist() == list(range(101))
    assert (now, given) == (2.0, 101)
    assert ours.foresee_orders() is None
    assert (now, given) == (2.0, 101)


@cachefs.pure_sampler
class Sized:
    """Says of each sample how large it is to be."""

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter([("a", 320), ("b", 320)])


@pytest.mark.parametrize(
    "sampler",
    [
        Sized(),
        SubsetRandomSampler(["a", "b"]),  # type: ignore[list-item]
        SubsetRandomSampler([(7, 320), (9, 320)]),  # type: ignore[list-item]
        SubsetRandomSampler([(7, 320), 9]),  # type: ignore[list-item]
        SubsetRandomSampler(numpy.ones((4, 2), dtype=numpy.int64)),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_sample_numbers_is_not_foreseen(sampler: Any) -> None:
    loader: DataLoader[Any] = DataLoader(range(9), 2, sampler=sampler)  # type: ignore[arg-type]
    assert SamplerOrder(loader).foresee_orders() is None


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler(torch.ones(9), foresee.MAX_COST // foresee.COST_DRAWN_BY_WEIGHT + 1),  # type: ignore[arg-type]
        WeightedRandomSampler(torch.ones(foresee.MAX_COST // foresee.COST_WEIGHT + 1), 9),  # type: ignore[arg-type]
        WeightedRandomSampler(
            torch.ones(foresee.MAX_COST // foresee.COST_WEIGHT_WITHOUT_REPLACEMENT + 1), 9, replacement=False
        ),  # type: ignore[arg-type]
    ],
)
def test_samples_by_weight_cost_more_than_a_permutation(monkeypatch: pytest.MonkeyPatch, sampler: Any) -> None:
    monkeypatch.setattr(torch, "multinomial", None)  # it would take seconds
    assert SamplerOrder(DataLoader(range(9), sampler=sampler)).foresee_orders() is None  # type: ignore[arg-type]


def test_samples_with_replacement_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    size = (1 << 20) + 7
    loader: DataLoader[Any] = DataLoader(
        range(1000),  # type: ignore[arg-type]
        sampler=RandomSampler(range(1000), replacement=True, num_samples=size, generator=generator_of("own")),
    )
    ours, theirs = SamplerOrder(loader), list(loader.sampler)
    loader.sampler.generator = generator_of("own")  # type: ignore[attr-defined]
    calls, draw = [], torch.randint
    monkeypatch.setattr(torch, "randint", lambda *given, **named: calls.append(given) or draw(*given, **named))  # type: ignore[func-returns-value]
    found = ours.foresee_orders()
    assert found is not None
    assert found[0].tolist() == theirs
    assert len(calls) == len(found)


class Virtual:
    """A dataset that says it has no end, as far as that goes."""

    def __len__(self) -> int:
        return 10**15

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    "sampler",
    [
        SequentialSampler(Virtual()),
        RandomSampler(Virtual(), replacement=True),
        RandomSampler(range(9), replacement=True, num_samples=10**12),
        RandomSampler(range(9), num_samples=10**12),
        SubsetRandomSampler(range(10**15)),
    ],
)
def test_orders_of_any_length_are_not_computed_before_they_are_drawn(sampler: Any) -> None:
    found = SamplerOrder(DataLoader(Virtual(), sampler=sampler))  # type: ignore[arg-type, var-annotated]
    assert found.foresee_orders() is None


@pytest.mark.parametrize(("size", "number"), [(1, 1_000_000), (10, 1_000_000), (1, foresee.MAX_PERMUTATIONS)])
def test_of_few_samples_not_any_number_of_permutations_is_drawn(
    monkeypatch: pytest.MonkeyPatch, size: int, number: int
) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(foresee._DrawingState, "draw_permutation", lambda self, size, generator: drawn.append(size))
    assert (
        SamplerOrder(DataLoader(range(size), sampler=RandomSampler(range(size), num_samples=number))).foresee_orders()
        is None
    )
    assert drawn == []


def test_what_cannot_be_drawn_in_time_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(foresee.clock, "monotonic", lambda: now[0])
    real = foresee._DrawingState.draw_permutation

    def slow(self: Any, size: int, generator: Any) -> Any:
        now[0] += foresee.DRAWING_SECONDS * 0.4
        return real(self, size, generator)

    monkeypatch.setattr(foresee._DrawingState, "draw_permutation", slow)
    sampler = RandomSampler(range(5), num_samples=7)
    found = SamplerOrder(DataLoader(range(5), sampler=sampler)).foresee_orders()
    assert found is not None
    assert [one.tolist() for one in found] == [list(sampler)]
    sampler = RandomSampler(range(5), num_samples=21)
    ours = SamplerOrder(DataLoader(range(5), sampler=sampler))
    assert ours.foresee_orders() is None
    before = now[0]
    assert ours.foresee_orders() is None
    assert now[0] == before, "what was too slow is not drawn again"
    sampler = RandomSampler(range(5))
    monkeypatch.setattr(foresee, "FORESEE_SECONDS", 0.0)
    ours = SamplerOrder(DataLoader(range(5), sampler=sampler))
    found = ours.foresee_orders()
    assert found is not None
    assert len(found) == 2
    assert ours.foresee_orders() is None
    assert SamplerOrder(DataLoader(range(5), sampler=sampler)).foresee_orders() is not None, (
        "each loader is looked at once"
    )
