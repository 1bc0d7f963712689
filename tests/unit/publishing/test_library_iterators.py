"""What samplers of the real libraries will give is read from their iterators; so is what is left of an epoch that is
resumed. Those of large libraries run with the marker `programs`: `make programs` has them in an environment."""

import importlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader import sampler as stateful_samplers

from cachefs.hooks.order.foresee import SamplerOrder
from cachefs.hooks.order.library_iterators import read_iterator

SIZE = 53


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of the programs' libraries. What both environments have comes from that of the tests."""
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    python = [os.environ["PROGRAMS_PYTHON"], "-c", where]
    place = subprocess.run(python, check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.setattr(sys, "path", [*sys.path, place])
    return importlib.import_module


def flat(items: Any) -> list[int]:
    return [int(one) for item in items for one in (item if isinstance(item, (list, tuple)) else [item])]


def rest_is_read(iterator: Any, most_missing: int = 0) -> None:
    """After each batch what is left is known, but for *most_missing* samples at the end."""
    given = [next(iterator), next(iterator)]
    found = read_iterator(iterator)
    assert found is not None
    given.append(next(iterator))
    again = read_iterator(iterator)
    rest = flat(one for one in iter(lambda: next(iterator, None), None))
    assert again is not None
    assert again.tolist() == rest[: len(again)]
    assert len(again) >= len(rest) - most_missing
    assert found.samples.tolist() == [*flat(given[2:]), *again.tolist()]
    assert len(again) > 0


def batches(size: int = 4, *, drop_last: bool = False, sampler: Any = None) -> BatchSampler:
    return BatchSampler(sampler if sampler is not None else RandomSampler(range(SIZE)), size, drop_last)


@pytest.mark.programs
@pytest.mark.parametrize(("split", "even", "drop_last"), list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("index", [0, 1])
def test_the_shard_of_a_process(
    library: Callable[[str], Any], split: bool, even: bool, drop_last: bool, index: int
) -> None:
    accelerate = library("accelerate.data_loader")
    shard = accelerate.BatchSamplerShard(batches(drop_last=drop_last), 2, index, split_batches=split, even_batches=even)
    rest_is_read(iter(shard), most_missing=4)
    skipping = accelerate.SkipBatchSampler(shard, 2)
    rest_is_read(iter(skipping), most_missing=4)


@pytest.mark.programs
def test_batches_that_are_skipped(library: Callable[[str], Any]) -> None:
    accelerate = library("accelerate.data_loader")
    sampler = accelerate.SeedableRandomSampler(range(SIZE), data_seed=3)
    rest_is_read(iter(accelerate.SkipBatchSampler(batches(sampler=sampler), 3)))
    rest_is_read(iter(accelerate.SkipBatchSampler(batches(drop_last=True), 1)))


@pytest.mark.programs
@pytest.mark.parametrize("module", ["timm.data.loader", "ultralytics.data.build"])
def test_a_sampler_that_repeats_itself(library: Callable[[str], Any], module: str) -> None:
    repeated = library(module)._RepeatSampler(batches())
    iterator = iter(repeated)
    for _ in range(3):
        drawn, found = next(iterator), read_iterator(iterator)
        assert found is not None
        rest = flat(itertools.islice(iterator, -(-SIZE // 4) - 1))
        assert sorted([*drawn, *rest]) == list(range(SIZE))
        assert found.samples.tolist() == rest


@pytest.mark.programs
@pytest.mark.parametrize("package", ["lightning.fabric", "lightning_fabric"])
def test_a_sampler_that_lightning_has_wrapped(library: Callable[[str], Any], package: str) -> None:
    distributed = library(f"{package}.utilities.distributed")
    wrapped = distributed.DistributedSamplerWrapper(RandomSampler(range(SIZE)), num_replicas=2, rank=1)
    rest_is_read(iter(batches(sampler=wrapped)))


@pytest.mark.programs
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_batches_that_lightning_remembers(library: Callable[[str], Any], package: str) -> None:
    distributed = library(f"{package}.overrides.distributed")
    rest_is_read(iter(distributed._IndexBatchSamplerWrapper(batches())))
    inner = distributed.UnrepeatedDistributedSamplerWrapper(RandomSampler(range(SIZE)), num_replicas=2, rank=1)
    rest_is_read(iter(batches(sampler=inner)))


@pytest.mark.programs
def test_samples_that_transformers_groups_by_length(library: Callable[[str], Any]) -> None:
    trainer = library("transformers.trainer_pt_utils")
    lengths = torch.randint(100, (SIZE,)).tolist()
    rest_is_read(iter(batches(sampler=trainer.LengthGroupedSampler(4, lengths=lengths))))


STATEFUL: dict[str, Callable[[Any], dict[str, Any]]] = {
    "shuffled": lambda _: {"shuffle": True, "batch_size": 4},
    "whole batches": lambda _: {"shuffle": True, "batch_size": 4, "drop_last": True},
    "replacement": lambda torchdata: {
        "sampler": torchdata.RandomSampler(range(SIZE), num_samples=2 * SIZE), "batch_size": 4,
    },
    "sequential": lambda _: {"batch_size": 4},
    "one by one": lambda torchdata: {"sampler": torchdata.RandomSampler(range(SIZE)), "batch_size": None},
    "of torch": lambda _: {"sampler": RandomSampler(range(SIZE)), "batch_size": 4},
    "of a rank": lambda _: {"sampler": DistributedSampler(range(SIZE), 2, 1), "batch_size": 4},  # type: ignore[arg-type]
    "of a rank, with a state": lambda torchdata: {
        "sampler": torchdata.StatefulDistributedSampler(range(SIZE), 2, 1), "batch_size": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("options", STATEFUL)
def test_a_stateful_loader_that_is_resumed(options: str) -> None:
    def made() -> Any:
        return StatefulDataLoader(range(SIZE), collate_fn=lambda batch: batch, **STATEFUL[options](stateful_samplers))

    first = made()
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    state = first.state_dict()
    second = made()
    second.load_state_dict(state)
    for resumed in (iterator, iter(second)):
        next(resumed)
        found = read_iterator(resumed._sampler_iter)
        assert found is not None
        rest = flat(resumed)
        assert found.samples.tolist() == rest[: len(found.samples)]
        assert len(found.samples) > 0
        assert len(found.samples) == len(rest) or options == "replacement"


@pytest.mark.parametrize("stateful", [False, True])
def test_all_epochs_of_a_rank_follow_from_its_seed(stateful: bool) -> None:
    kind: Any = stateful_samplers.StatefulDistributedSampler if stateful else DistributedSampler
    own = kind(range(SIZE), 2, 1)
    loader = StatefulDataLoader(range(SIZE), 4, sampler=own, collate_fn=lambda batch: batch, drop_last=True)
    ours = SamplerOrder(loader)
    assert ours.sampler_spec() is not None
    before = vars(own).copy()
    found = ours.foresee_orders()
    assert vars(own) == before
    assert found is not None
    assert found[0].tolist() == flat(loader)


@pytest.mark.parametrize("options", ["sequential", "of torch"])
def test_the_next_epoch_of_a_stateful_loader_is_foreseen(options: str) -> None:
    loader: Any = StatefulDataLoader(
        range(SIZE), collate_fn=lambda batch: batch, **STATEFUL[options](stateful_samplers)
    )
    iterator = iter(loader)
    found = SamplerOrder(loader).foresee_orders()
    assert found is not None
    assert [one.tolist() for one in found] == [flat(iterator), flat(loader)]
