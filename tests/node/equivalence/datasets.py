"""Datasets, samplers and loaders of the set-ups. They know nothing of cachefs."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

FILES = 48


def number(path: str) -> int:
    with open(path) as file:
        return int(file.read())


def paths(root: str) -> list[str]:
    return [f"{root}/class{one % 5}/{one:03}.bin" for one in range(FILES)]


class Listed(Dataset[int]):
    """As torchvision's folders: it has a list of its samples."""

    def __init__(self, root: str) -> None:
        self.samples = [(path, 0) for path in paths(root)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        return number(self.samples[index][0])


class Unread(Listed):
    """Lists files and reads none."""

    def __getitem__(self, index: int) -> int:
        return index


class Hidden(Dataset[int]):
    """Which file a sample is, only the code knows."""

    def __init__(self, root: str) -> None:
        self.table = dict(enumerate(reversed(paths(root))))

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> int:
        return number(self.table[int(index)])


class Augmented(Hidden):
    """Draws from every generator for each sample."""

    def __getitem__(self, index: int) -> Any:
        drawn = random.random(), numpy.random.random(), float(torch.rand(()))
        return super().__getitem__(index), *drawn


class InBatches(Hidden):
    def __getitems__(self, indices: list[int]) -> list[int]:
        assert type(indices) is list
        return [number(self.table[index]) for index in indices]


class Failing(Hidden):
    def __getitem__(self, index: int) -> int:
        if index == 30:
            raise ValueError(f"sample {index} is damaged")
        return super().__getitem__(index)


class Counting(Hidden):
    """With a state of its own that a checkpoint has."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.reads = 0

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return super().__getitem__(index)

    def state_dict(self) -> dict[str, int]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.reads = state["reads"]


class Inner(Hidden):
    """Goes through a loader of its own for each sample."""

    def __getitem__(self, index: int) -> int:
        loader = torch.utils.data.DataLoader(torch.arange(4), shuffle=True)  # type: ignore[arg-type]
        return super().__getitem__(index) * 1000 + int(next(iter(loader)))


class Stream(IterableDataset[int]):
    def __init__(self, root: str) -> None:
        self.root = root

    def __iter__(self) -> Iterator[int]:
        return map(number, paths(self.root))


class InPlace(Sampler[int]):
    """Counts its epochs, shuffles its own list, and draws from three generators."""

    def __init__(self) -> None:
        self.indices = list(range(FILES))
        self.epoch = 0

    def __len__(self) -> int:
        return FILES

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        random.shuffle(self.indices)
        shift = int(numpy.random.randint(100)) + int(torch.randint(100, ())) + self.epoch
        return iter([(index + shift) % FILES for index in self.indices])


class OneByOne(InPlace):
    """The same, drawing for each sample."""

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            yield (index + random.randrange(3) + int(torch.randint(3, ()))) % FILES


class OfNumpy(InPlace):
    """Numpy's numbers from numpy's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = numpy.random.default_rng(5)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.generator.permutation(FILES))


class FromFile(Sampler[int]):
    """Reads its indices from a file that it keeps open."""

    def __init__(self) -> None:
        Path("order").write_bytes(b"".join(b"%03d\n" % one for one in torch.randperm(FILES).tolist()))
        self.file = open("order", "rb", buffering=0)  # noqa: SIM115

    def __len__(self) -> int:
        return FILES

    def __iter__(self) -> Iterator[int]:
        self.file.seek(0)
        while line := self.file.read(4):
            yield int(line)


class FromQueue(Sampler[int]):
    """Takes its indices from a queue, which anybody may empty who has it."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()

    def __len__(self) -> int:
        return FILES

    def __iter__(self) -> Iterator[int]:
        os.write(self.write, bytes(torch.randperm(FILES).tolist()))
        for _ in range(FILES):
            yield os.read(self.read, 1)[0]


class FromStore(Sampler[int]):
    """Shares work with other ranks by a counter, in a store or in shared memory."""

    def __init__(self, add: Any) -> None:
        self.add = add

    def __iter__(self) -> Iterator[int]:
        while (chunk := self.add() - 1) % 7 < 6:
            yield from range(chunk % 7 * 8, chunk % 7 * 8 + 8)


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(FILES).tolist()


class Broken(InPlace):
    def __iter__(self) -> Iterator[int]:
        yield from range(20)
        raise KeyError("the sampler has lost its table")


class Closing(InPlace):
    """Says when its iterator is closed."""

    def __iter__(self) -> Iterator[int]:
        try:
            yield from super().__iter__()
        finally:
            print("the sampler's iterator is closed", flush=True)


class Buckets(Sampler[list[int]]):
    """Batches of changing sizes."""

    def __len__(self) -> int:
        return FILES // 3

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(FILES).tolist()
        while order:
            for length in (2, 4):
                batch, order = order[:length], order[length:]
                if batch:
                    yield batch
