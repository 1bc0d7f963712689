"""A training script that knows nothing of cachefs: `training_script.py DIRECTORY SCENARIO...` (see test_run.py).

For each scenario and epoch it prints what it has read, in the order it got it, and last a number that depends on every
random generator: equal output means that watching it has changed nothing.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from told import wait_until_told
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

EPOCHS = 3
BATCH = 8
# Each worker costs 0.2 s of a processor in every epoch; two are where their order matters.
WORKER: dict[str, Any] = {"num_workers": 1}
# How the worker of "learned-spawned" is started. It draws and reads the same however that is.
SPAWN = os.environ.get("SPAWN", "spawn")
PAUSE = float(os.environ.get("PAUSE", "0.4"))  # seconds after each epoch, where it waits for nothing else
# Scenarios whose spec tells all epochs, and those of which nothing can be told in the first epoch.
SPECIFIED = ("distributed", "distributed-persistent")
LATER = ("distributed-never-told", "learned", "learned-here", "learned-subset", "learned-pairs", "learned-spawned")


def files(root: str) -> list[str]:
    return sorted(str(path) for path in Path(root).rglob("*.bin"))


def number(path: str) -> int:
    """What the file says it is."""
    with open(path) as file:
        return int(file.read())


class Listed(Dataset[int]):
    """As torchvision's folders: it has a list of its samples."""

    def __init__(self, root: str) -> None:
        self.samples = [(path, 0) for path in files(root)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        return number(self.samples[index][0])


class Hidden(Dataset[int]):
    """Which file a sample is, only the code knows: here, from the last to the first."""

    def __init__(self, root: str) -> None:
        self._table = dict(enumerate(reversed(files(root))))

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> int:
        return number(self._table[index])


class Pairs(Hidden):
    """Samples of two files each."""

    def __len__(self) -> int:
        return len(self._table) // 2

    def __getitem__(self, index: int) -> int:
        return number(self._table[2 * index]) * 1000 + number(self._table[2 * index + 1])


class Stream(IterableDataset[int]):
    def __init__(self, root: str) -> None:
        self._files = files(root)

    def __iter__(self) -> Iterator[int]:
        return map(number, self._files)


class InPlaceSampler(Sampler[int]):
    """Counts its epochs, shuffles its own list, and draws from three generators: nothing may be run twice."""

    def __init__(self, size: int) -> None:
        self.indices = list(range(size))
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        random.shuffle(self.indices)
        shift = int(numpy.random.randint(100)) + int(torch.randint(100, ())) + self.epoch
        return iter([(index + shift) % len(self.indices) for index in self.indices])


class BucketBatches(Sampler[list[int]]):
    """Batches of changing sizes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size // 6 * 2

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.size).tolist()
        while order:
            for length in (2, 4):
                batch, order = order[:length], order[length:]
                if batch:
                    yield batch


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def distributed(root: str, told: bool, **options: Any) -> tuple[DataLoader[int], Callable[[int], None]]:
    dataset = Listed(root)
    sampler: DistributedSampler[int] = DistributedSampler(dataset, num_replicas=2, rank=1, seed=3)
    return DataLoader(dataset, BATCH, sampler=sampler, **options), sampler.set_epoch if told else lambda epoch: None


def without_epochs(loader: DataLoader[Any]) -> tuple[DataLoader[Any], Callable[[int], None]]:
    return loader, lambda epoch: None


def concatenated(root: str) -> DataLoader[int]:
    both = ConcatDataset([Subset(Listed(root), range(0, 40, 2)), Listed(root)])
    return DataLoader(both, BATCH, shuffle=True, num_workers=2)


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0, 2.0] * 30, 50)


SCENARIOS: dict[str, Callable[[str], tuple[DataLoader[Any], Callable[[int], None]]]] = {
    "distributed": lambda root: distributed(root, True, num_workers=2),
    "distributed-persistent": lambda root: distributed(root, True, num_workers=2, persistent_workers=True),
    "distributed-never-told": lambda root: distributed(root, False, num_workers=2),
    "sequential": lambda root: without_epochs(DataLoader(Listed(root), BATCH)),
    "shuffle": lambda root: without_epochs(DataLoader(Listed(root), BATCH, shuffle=True, num_workers=2)),
    "shuffle-here": lambda root: without_epochs(DataLoader(Listed(root), BATCH, shuffle=True, drop_last=True)),
    "shuffle-generator": lambda root: without_epochs(
        DataLoader(Listed(root), BATCH, shuffle=True, generator=seeded(), **WORKER)
    ),
    "shuffle-persistent": lambda root: without_epochs(
        DataLoader(
            Listed(root), BATCH, shuffle=True, generator=seeded(), **WORKER, persistent_workers=True
        )
    ),
    "replacement": lambda root: without_epochs(
        DataLoader(Listed(root), BATCH, sampler=RandomSampler(range(60), replacement=True, num_samples=70))
    ),
    "weighted": lambda root: without_epochs(DataLoader(Listed(root), BATCH, sampler=weighted(), num_workers=1)),
    "subset-random": lambda root: without_epochs(
        DataLoader(Listed(root), BATCH, sampler=SubsetRandomSampler(range(10, 50)), **WORKER)
    ),
    "unbatched": lambda root: without_epochs(
        DataLoader(
            Listed(root), batch_size=None, sampler=RandomSampler(range(60)), **WORKER,
        )
    ),
    "custom": lambda root: without_epochs(
        DataLoader(Listed(root), BATCH, sampler=InPlaceSampler(60), num_workers=2)
    ),
    "custom-persistent": lambda root: without_epochs(
        DataLoader(Listed(root), BATCH, sampler=InPlaceSampler(60), **WORKER, persistent_workers=True)
    ),
    "custom-batches-here": lambda root: without_epochs(
        DataLoader(Listed(root), batch_sampler=BucketBatches(60))
    ),
    "custom-batches": lambda root: without_epochs(
        DataLoader(Listed(root), batch_sampler=BucketBatches(60), **WORKER)
    ),
    "concatenated": lambda root: without_epochs(concatenated(root)),
    "learned": lambda root: without_epochs(DataLoader(Hidden(root), BATCH, shuffle=True, num_workers=2)),
    "learned-here": lambda root: without_epochs(DataLoader(Hidden(root), BATCH, shuffle=True)),
    "learned-subset": lambda root: without_epochs(
        DataLoader(Subset(Hidden(root), range(5, 45)), BATCH, shuffle=True, **WORKER)
    ),
    "learned-pairs": lambda root: without_epochs(DataLoader(Pairs(root), BATCH, shuffle=True, **WORKER)),
    "learned-spawned": lambda root: without_epochs(
        DataLoader(
            Hidden(root), BATCH, shuffle=True, num_workers=1, persistent_workers=True, multiprocessing_context=SPAWN
        )
    ),
    "custom-here": lambda root: without_epochs(DataLoader(Listed(root), BATCH, sampler=InPlaceSampler(60))),
    "iterable": lambda root: without_epochs(DataLoader(Stream(root), BATCH, num_workers=1)),
    "batches-of-batches": lambda root: without_epochs(
        DataLoader(Listed(root), batch_sampler=BatchSampler(SubsetRandomSampler(range(60)), 7, True), **WORKER)
    ),
}  # fmt: skip


def pause(scenario: str, number: int, epoch: int) -> None:
    """Give the helper time to tell the daemon of this epoch, or wait until it has."""
    if "TOLD" not in os.environ:
        time.sleep(PAUSE)
    elif scenario in SPECIFIED:
        wait_until_told("JobPublication", number=number)
    elif epoch > 0 or scenario not in LATER:
        # Not every order is told in its epoch; those of a plain shuffle are.
        wait_until_told("JobEpoch", epoch, number, 30 if scenario == "shuffle" else 1)


def main() -> None:
    root, *names = sys.argv[1:]
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    loaders = []  # kept, so that each is a consumer of its own to the end
    for number, name in enumerate(names):
        loader, set_epoch = SCENARIOS[name](root)
        loaders.append(loader)
        for epoch in range(EPOCHS):
            set_epoch(epoch)
            read = [int(value) for batch in loader for value in torch.as_tensor(batch).reshape(-1)]
            print(json.dumps({"scenario": name, "epoch": epoch, "read": read}), flush=True)
            pause(name, number, epoch)
    print(random.random(), numpy.random.rand(), float(torch.rand(())))


if __name__ == "__main__":
    main()
