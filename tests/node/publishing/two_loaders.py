"""Two loaders of one dataset class, one after the other in each epoch: `two_loaders.py DIRECTORY` (see
test_two_loaders.py). Prints what each loader has read in each epoch, and ends when it reads a line."""

import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, random_split

BATCH = 4
EPOCHS = 3


class Listed(Dataset[int]):
    def __init__(self, root: str) -> None:
        self.files = sorted(entry.path for entry in os.scandir(root))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> int:
        with open(self.files[index]) as file:
            return int(file.read())


class Moved(Listed):
    """It lists where the files lay on another machine."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.root = root
        self.files = [f"/of/another/machine/{os.path.basename(path)}" for path in self.files]

    def __getitem__(self, index: int) -> int:
        with open(f"{self.root}/{os.path.basename(self.files[index])}") as file:
            return int(file.read())


class Hashed(Dataset[int]):
    """No list says its files, which have nothing of their numbers in their names."""

    def __init__(self, root: str, begin: int, end: int) -> None:
        self.root, self.begin, self.end = root, begin, end

    def __len__(self) -> int:
        return self.end - self.begin

    def __getitem__(self, index: int) -> int:
        with open(f"{self.root}/{hashed(self.begin + index)}") as file:
            return int(file.read())


def hashed(index: int) -> str:
    return hashlib.sha256(str(index).encode()).hexdigest()


class Unruly(Sampler[int]):
    """Nobody knows what comes next."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.random = random.Random(3)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        left = list(range(self.length))
        while left:
            yield left.pop(self.random.randrange(len(left)))


def loaders(root: str) -> dict[str, DataLoader[Any]]:
    """Pairs of loaders: for training and validation."""
    listed = Listed(root)
    train, val = random_split(listed, [0.75, 0.25], generator=torch.Generator().manual_seed(1))
    half = len(listed) // 2
    workers: dict[str, Any] = {"batch_size": BATCH, "num_workers": 2}
    return {
        "split train": DataLoader(train, sampler=Unruly(len(train)), **workers),
        "split val": DataLoader(val, **workers),
        "class train": DataLoader(Hashed(root, 0, half), shuffle=True, **workers),
        "class val": DataLoader(Hashed(root, half, 2 * half), shuffle=True, **workers),
        "object train": DataLoader(listed, shuffle=True, **workers),
        "object val": DataLoader(listed, **workers),
        "moved train": DataLoader(Moved(root), shuffle=True, **workers),
        "moved val": DataLoader(Moved(root), **workers),
        "here train": DataLoader(Hashed(root, 0, 2 * half), BATCH, shuffle=True),
        "here val": DataLoader(Subset(Hashed(root, 0, 2 * half), range(half)), BATCH),
    }


def main() -> None:
    torch.manual_seed(5)
    found = loaders(sys.argv[1])
    for epoch in range(EPOCHS):
        for name, loader in found.items():
            read = [int(one) for batch in loader for one in batch]
            print(json.dumps({"loader": name, "epoch": epoch, "read": read}), flush=True)
    print("all are read", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
