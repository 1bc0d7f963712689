"""Datasets, samplers and loaders of the set-ups. They know nothing of cachefs."""

import ctypes
import hashlib
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

FILES = 48
_libc = ctypes.CDLL(None)


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


class OpenedInC(Hidden):
    """A library in C opens its files. It tells what it is called by."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.root = root

    def __getitem__(self, index: int) -> int:
        called_by, frame = [], sys._getframe(1)
        for _ in range(4):
            called_by.append(frame.f_code.co_name)
            frame = frame.f_back or frame
        fd = _libc.open(f"{self.root}/class{index % 5}/{index:03}.bin".encode(), os.O_RDONLY)
        content = os.pread(fd, 100, 0)
        _libc.close(fd)
        return int(content) + 100 * int(hashlib.sha1("".join(called_by).encode()).hexdigest()[:4], 16)


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


class Watchful:
    """Tells whoever touches it, in whatever way."""

    __slots__ = ("_told", "inner")

    def __init__(self, told: list[str]) -> None:
        object.__setattr__(self, "_told", told)

    def _tell(self, what: str) -> Any:
        object.__getattribute__(self, "_told").append(what)

    def __getattribute__(self, name: str) -> Any:
        object.__getattribute__(self, "_tell")(name)
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        return [f"/made/{name}"]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        object.__getattribute__(self, "_tell")("__class__")
        return Watchful

    @property
    def __dict__(self) -> Any:
        object.__getattribute__(self, "_tell")("__dict__")
        return {"samples": ["/of/a/property"]}

    @property
    def samples(self) -> list[str]:
        object.__getattribute__(self, "_tell")("samples")
        return ["/of/a/property"]

    def __len__(self) -> int:
        object.__getattribute__(self, "_tell")("len")
        return FILES

    def __getitem__(self, index: Any) -> Any:
        object.__getattribute__(self, "_tell")("item")
        return "/of/an/item"

    def __fspath__(self) -> str:
        object.__getattribute__(self, "_tell")("fspath")
        return "/of/fspath"

    def __str__(self) -> str:
        object.__getattribute__(self, "_tell")("str")
        return "/of/str"


class LazyList(list[str]):
    """Loads its entries when they are asked for."""

    told: list[str]

    def __getitem__(self, index: Any) -> Any:
        self.told.append("lazy item")
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[str]:
        self.told.append("lazy iter")
        return super().__iter__()

    def __len__(self) -> int:
        self.told.append("lazy len")
        return super().__len__()


class Name(str):
    """A text with code of its own."""

    told: list[str]

    def __str__(self) -> str:
        self.told.append("text")
        return super().__str__()

    def encode(self, *_: Any, **__: Any) -> bytes:
        self.told.append("encode")
        return b""

    def __hash__(self) -> int:
        self.told.append("hash")
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        self.told.append("eq")
        return super().__eq__(other)


class Row(tuple[str, int]):
    """A tuple with code of its own."""

    told: list[str]

    def __getitem__(self, index: Any) -> Any:
        self.told.append("row item")
        return super().__getitem__(index)


class Table(numpy.ndarray):
    """An array with code of its own."""

    told: list[str] = []  # noqa: RUF012

    def __array_finalize__(self, made: Any) -> None:
        Table.told.append("finalize")


class Watched(Dataset[int]):
    """Everything that it has tells who touches it."""

    def __init__(self, root: str) -> None:
        told: list[str] = []
        self.told = told
        self.root = root
        self.reader = Watchful(told)
        self.samples = [Watchful(told) for _ in range(FILES)]
        self.files = LazyList(paths(root))
        self.files.told = LazyList.told = Name.told = Row.told = told
        self.names = [Name(path) for path in paths(root)]
        self.rows = [Row((path, 0)) for path in paths(root)]
        self.records = [{"image": Watchful(told), Name("label"): path} for path in paths(root)]
        self.objects = numpy.array([None, *self.samples][1:], dtype=object)
        self.table = numpy.arange(FILES).view(Table)
        self.huge = numpy.broadcast_to(numpy.float32(0), (1 << 40, 3, 32, 32))
        self.numbers = range(1 << 40)
        self.weights = torch.zeros(1 << 20, requires_grad=True)
        self.entries = list(reversed([path.removeprefix(root) for path in paths(root)]))
        told.clear()
        Table.told.clear()

    @property
    def imgs(self) -> list[str]:
        self.told.append("imgs")
        return paths(self.root)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            self.__dict__["told"].append(name)
        raise AttributeError(name)

    def __len__(self) -> int:
        return FILES

    def __getitem__(self, index: int) -> int:
        return number(self.root + self.entries[index])


class Reshuffled(Dataset[int]):
    """Shuffles its own list whenever an epoch has gone by, and takes another file now and then."""

    def __init__(self, root: str) -> None:
        self.files = paths(root)
        self.reads = 0

    def __len__(self) -> int:
        return FILES

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        if self.reads % FILES == 0:
            random.shuffle(self.files)
        return number(self.files[index if self.reads % 7 else random.randrange(FILES)])


def contents(shards: Iterator[dict[str, Any]]) -> Iterator[int]:
    """A stage of WebDataset's: what is in the files that the stage before has opened."""
    for shard in shards:
        with shard["stream"] as file:
            yield int(file.read())


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


class ByPlace(InPlace):
    """Keeps its order, and goes through it by its places; numbers of torch, that anybody may change."""

    def __iter__(self) -> Iterator[int]:
        self.order = torch.randperm(FILES)
        for place in range(FILES):
            yield int(self.order[place])
            self.order[place] = -1


class Taking(InPlace):
    """Takes each sample from the end of a list, which it then no longer has."""

    def __iter__(self) -> Iterator[int]:
        left = torch.randperm(FILES).tolist()
        while left:
            yield left.pop()
        print("nothing is left", flush=True)


class WatchfulList(list[int]):
    """A list that says when it is looked at."""

    def __getitem__(self, place: Any) -> Any:
        print("looked at", place, flush=True)
        return super().__getitem__(place)

    def __iter__(self) -> Iterator[int]:
        print("gone through", flush=True)
        return super().__iter__()


class Looking(InPlace):
    """Says when anything of it is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.watchful = WatchfulList(range(FILES))

    @property
    def order(self) -> list[int]:
        print("a property was run", flush=True)
        return self.indices

    def __getattr__(self, name: str) -> Any:
        print("asked for", name, flush=True)
        raise AttributeError(name)

    def __iter__(self) -> Iterator[int]:
        for place in torch.randperm(FILES).tolist():
            yield self.watchful[place]


class Rows(Buckets):
    """Batches that are arrays, and views of one array, which is shuffled anew for each epoch."""

    def __init__(self) -> None:
        self.rows = numpy.arange(FILES).reshape(-1, 6)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Any]:
        numpy.random.shuffle(self.rows)
        for number, row in enumerate(self.rows):
            yield row if number % 2 else torch.from_numpy(row)


class Repeated(Buckets):
    """Goes through another one again and again, as loaders do that keep their workers."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield from iter(self.sampler)


class Skipping(Buckets):
    """Leaves out the first batches of another one."""

    def __init__(self, sampler: Any, skipped: int) -> None:
        self.sampler, self.skipped = sampler, skipped

    def __iter__(self) -> Iterator[list[int]]:
        for number, batch in enumerate(self.sampler):
            if number >= self.skipped:
                yield batch


class Mixed(InPlace):
    """Gives what its list has for a while, and then something else: whoever trusts in the list is wrong."""

    def __iter__(self) -> Iterator[int]:
        self.order = torch.randperm(FILES).tolist()
        for place in range(FILES):
            yield self.order[place if place < 14 else FILES - 1 - int(torch.randint(20, ()))]
