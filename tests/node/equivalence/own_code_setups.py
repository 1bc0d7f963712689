"""Set-ups whose datasets, samplers and batches count how often their own code is run, or have less than torch's."""

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from tests.node.equivalence import datasets as d
from tests.node.equivalence.setups import BATCH, SetUp, read, say

ran: list[str] = []


def counted(run: SetUp) -> SetUp:
    """The set-up, which then tells how often which code of its own was run in this process."""

    def counting(root: str) -> None:
        ran.clear()
        run(root)
        say({name: ran.count(name) for name in sorted(set(ran))})

    return counting


def through(dataset: Callable[[str], Any], sampler: Callable[[Any], dict[str, Any]], **options: Any) -> SetUp:
    """A counted set-up that goes through one loader. sampler: arguments of the loader, made of the dataset."""

    def run(root: str) -> None:
        made = dataset(root)
        read(DataLoader(made, **sampler(made), **options), 3)

    return counted(run)


def shuffled(dataset: Any) -> dict[str, Any]:
    return {"batch_size": BATCH, "shuffle": True}


def in_batches(dataset: Any) -> dict[str, Any]:
    return {"batch_sampler": Pairs()}


class Counting(d.Hidden):
    """Its length is counted, and computed."""

    def __len__(self) -> int:
        ran.append("len")
        return sum(1 for _ in self.table)


class Raising(d.Hidden):
    """Its length is not known."""

    def __len__(self) -> int:
        ran.append("len")
        raise NotImplementedError("the length is not known")


class Without:
    """A dataset that has `__getitem__` and nothing else."""

    def __init__(self, root: str) -> None:
        self.root = root

    def __getitem__(self, index: int) -> int:
        return d.number(d.paths(self.root)[index])


class Slots:
    """A dataset that cannot be referred to weakly."""

    __slots__ = ("paths",)

    def __init__(self, root: str) -> None:
        self.paths = d.paths(root)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        return d.number(self.paths[index])


class Pairs:
    """Batches of which only the iterator is there."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[one, one + 1] for one in range(0, d.FILES, 2)])


class Groups:
    """A list of batches of batches."""

    def __init__(self, groups: list[Any]) -> None:
        self.groups = groups

    def __iter__(self) -> Iterator[Any]:
        return iter(self.groups)


class WithSizes:
    """Batches of samples, each with the size that it is to have."""

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return iter([[(one, 320), (one + 1, 320)] for one in range(0, d.FILES, 2)])


class Sized(d.Listed):
    """Is asked for a sample and its size."""

    def __getitem__(self, index: Any) -> Any:
        return d.Listed.__getitem__(self, index[0]), index[1]


class Nested(d.Hidden):
    """Gives the sum of what it is asked for: a number, or lists or tensors of numbers."""

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor(sum(d.Hidden.__getitem__(self, one) for one in flat(index)))


def flat(index: Any) -> list[int]:
    return (
        [one for part in index for one in flat(part)]
        if type(index) is list or getattr(index, "ndim", 0)
        else [int(index)]
    )


class Batch(list[int]):
    """A batch of a class of the job's own."""

    def __len__(self) -> int:
        ran.append("batch len")
        return super().__len__()

    def __getitem__(self, index: Any) -> Any:
        ran.append("batch item")
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[int]:
        ran.append("batch iter")
        return super().__iter__()


class OwnBatches(Sampler[Any]):
    def __len__(self) -> int:
        ran.append("sampler len")
        return d.FILES // BATCH

    def __iter__(self) -> Iterator[Any]:
        for first in range(0, d.FILES, BATCH):
            yield Batch(range(first, first + BATCH))


def counted_property(name: str) -> Any:
    def get(self: Any) -> Any:
        ran.append(name)
        return self.__dict__["_" + name]

    def put(self: Any, value: Any) -> None:
        self.__dict__["_" + name] = value

    return property(get, put)


class OfSubset(SubsetRandomSampler):
    indices = counted_property("indices")


class AtRandom(RandomSampler):
    generator = counted_property("generator")
    replacement = counted_property("replacement")
    data_source = counted_property("data_source")


class InBatches(BatchSampler):
    sampler = counted_property("sampler")
    batch_size = counted_property("batch_size")
    drop_last = counted_property("drop_last")


class Lazy:
    """Data of a sampler whose length is looked up somewhere."""

    def __len__(self) -> int:
        ran.append("lazy len")
        return d.FILES

    def __getitem__(self, index: int) -> int:
        raise IndexError


def contents(paths: list[Any]) -> list[int]:
    """Collates samples that are paths, or rows with one."""
    return [d.number(row["path"] if type(row) is dict else str(row)) for row in paths]


def container(made: Callable[[list[str]], Any], **options: Any) -> SetUp:
    def run(root: str) -> None:
        dataset = made(d.paths(root))
        loader = DataLoader(dataset, BATCH, shuffle=True, collate_fn=contents, **options)
        for _ in range(3):
            say(list(loader))
        say(dataset is loader.dataset, type(dataset).__name__)

    return run


class Late(Exception):
    """A timeout of the job's own."""


class Armed:
    """Sets a timer whenever it is asked for a sample."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> "Armed":
        return self

    def __next__(self) -> int:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        self.given += 1
        return self.given % d.FILES


def timers(root: str) -> None:
    """A loop that gives each batch some time: every timeout comes, wherever it finds the process."""

    def ring(number: int, frame: Any) -> None:
        raise Late

    signal.signal(signal.SIGALRM, ring)
    iterator = iter(DataLoader(d.Hidden(root), 1, sampler=Armed()))  # type: ignore[arg-type]
    came = 0
    for _ in range(6):
        try:
            next(iterator)
            time.sleep(2)
        except Late:
            came += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    say(came)


def logs(root: str) -> None:
    """A job that opens a file for each epoch, and keeps them open."""
    loader = DataLoader(d.Listed(root), BATCH, shuffle=True)
    kept = []
    for epoch in range(4):
        kept.append(open(f"log{epoch}", "w"))  # noqa: SIM115
        say([batch.tolist() for batch in loader])
        kept[-1].write(f"epoch {epoch}\n")
    for file in kept:
        file.close()


OWN_CODE_SETUPS: dict[str, SetUp] = {
    "length-counted": through(Counting, shuffled),
    "length-counted-workers": through(Counting, shuffled, num_workers=1),
    "length-behind-batches": through(Counting, in_batches),
    "length-raises": through(Raising, in_batches),
    "no-length": through(Without, in_batches),
    "no-length-workers": through(Without, in_batches, num_workers=1),
    "slots": through(Slots, shuffled),
    "sizes": through(Sized, lambda _: {"batch_sampler": WithSizes()}),
    "sizes-workers": through(Sized, lambda _: {"batch_sampler": WithSizes()}, num_workers=1),
    "groups": through(Nested, lambda _: {"sampler": Groups([[[1, 2], [3]], [[4], [5, 6]]] * 9), "batch_size": None}),
    "groups-of-tensors": through(
        Nested, lambda _: {"sampler": Groups([torch.arange(6).reshape(3, 2)] * 9), "batch_size": None}
    ),
    "groups-mixed": through(Nested, lambda _: {"sampler": Groups([1, [2, 3], numpy.arange(3)]), "batch_size": None}),
    "batches-of-own-lists": through(d.Hidden, lambda _: {"batch_sampler": OwnBatches()}),
    "properties-of-a-subset": through(d.Listed, lambda _: {"sampler": OfSubset(range(40)), "batch_size": BATCH}),
    "properties-at-random": through(d.Listed, lambda made: {"sampler": AtRandom(made), "batch_size": BATCH}),
    "properties-of-batches": through(
        d.Listed, lambda made: {"batch_sampler": InBatches(RandomSampler(made), BATCH, False)}
    ),
    "lazy-data": through(d.Listed, lambda _: {"sampler": SequentialSampler(Lazy()), "batch_size": BATCH}),
    "list": container(list),
    "list-workers": container(list, num_workers=1),
    "list-of-rows": container(lambda paths: [{"path": path} for path in paths]),
    "tuple": container(tuple),
    "dict": container(lambda paths: dict(enumerate(paths))),
    "array": container(numpy.array),
    "timers": timers,
    "logs": logs,
}
