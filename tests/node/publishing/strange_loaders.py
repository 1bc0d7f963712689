"""Loaders of which not all is understood: `strange_loaders.py DIRECTORY` (see test_diagnostics.py). Goes through each,
and ends when it reads a line."""

import hashlib
import os
import random
import sys
from collections.abc import Iterator

from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

BATCH = 4


def number(path: str) -> int:
    with open(path) as file:
        return int(file.read())


class Listed(Dataset[int]):
    def __init__(self, root: str) -> None:
        self.files = sorted(entry.path for entry in os.scandir(root))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> int:
        return number(self.files[index])


class Hashed(Dataset[int]):
    """No list says its files, which have nothing of their numbers in their names."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.length = len(os.listdir(root))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return number(f"{self.root}/{hashed(index)}")


def hashed(index: int) -> str:
    return hashlib.sha256(str(index).encode()).hexdigest()


class Unruly(Sampler[int]):
    """Nobody knows what comes next."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.generator = random.Random(3)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            yield self.generator.randrange(self.length)


class Stream(IterableDataset[int]):
    def __init__(self, root: str) -> None:
        self.root = root

    def __iter__(self) -> Iterator[int]:
        return map(number, sorted(entry.path for entry in os.scandir(self.root)))


class ListedStream(IterableDataset[int]):
    def __init__(self, root: str) -> None:
        self.shards = sorted(entry.path for entry in os.scandir(root))

    def __iter__(self) -> Iterator[int]:
        return map(number, self.shards)


def main() -> None:
    root = sys.argv[1]
    loaders = [
        DataLoader(Listed(root), BATCH, shuffle=True),
        DataLoader(Hashed(root), BATCH),
        DataLoader(Listed(root), BATCH, sampler=Unruly(len(os.listdir(root)))),
        DataLoader(Stream(root), BATCH, num_workers=1),
        DataLoader(ListedStream(root), BATCH),
    ]
    for loader in loaders:
        print([batch.tolist() for batch in loader], flush=True)
    print("all are read", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
