"""Running a sampler ahead of time says what it will give, and leaves no trace."""

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from cachefs.hooks.order import SamplerOrder, flattened


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


@settings(deadline=None, max_examples=60)
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
    current, following = SamplerOrder(loader).run_ahead()
    assert [int(index) for indices in iterator for index in indices] == current.tolist()
    assert [int(index) for indices in loader for index in indices] == following.tolist()


def test_running_ahead_draws_nothing() -> None:
    own = torch.Generator().manual_seed(1)
    loader: DataLoader[Any] = DataLoader(range(99), shuffle=True, generator=own)  # type: ignore[arg-type]
    before = own.get_state(), torch.get_rng_state()
    SamplerOrder(loader).run_ahead()
    assert torch.equal(before[0], own.get_state())
    assert torch.equal(before[1], torch.get_rng_state())


class Derived(RandomSampler):
    """Leaves iterating to torch."""


class Reversed(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(reversed(list(super().__iter__())))


@pytest.mark.parametrize(("kind", "known"), [(RandomSampler, True), (Derived, True), (Reversed, False)])
def test_only_samplers_that_iterate_as_torchs_do_are_known(kind: type[RandomSampler], known: bool) -> None:
    loader: DataLoader[Any] = DataLoader(range(9), sampler=kind(range(9)))  # type: ignore[arg-type]
    assert SamplerOrder(loader).is_known is known


def test_indices_and_batches_are_flattened_and_others_refused() -> None:
    given = [[3, 4], (5,), 6, torch.tensor(7), numpy.int64(8)]
    found = flattened(given)
    assert found is not None
    assert found.tolist() == [3, 4, 5, 6, 7, 8]
    assert flattened([("a", 1)]) is None
    assert flattened([[None, None]]) is None
