"""Datasets of one's own, as scripts have them: `own_datasets.py DIRECTORY SCENARIO...` (see test_files.py).

Each epoch is printed as it was read. In the first epoch the script waits, after some batches, until the daemon was told
which files the samples are, and says whether it was.
"""

import csv
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from told import wait_until_told
from torch.utils.data import DataLoader, Dataset

BATCH = 4
EPOCHS = 2
# Batches of the first epoch after which it is known which files the samples are; and of a later one after which it is
# known that they are others.
SOON, LATER = 6, 20
# How the worker of "table-spawned" is started. It draws and reads the same however that is.
SPAWN = os.environ.get("SPAWN", "spawn")


def content(path: str | Path) -> int:
    with open(path) as file:
        return int(file.read())


class Own(Dataset[int]):
    """A table of names and classes, as read from a CSV file, and a directory."""

    def __init__(self, root: str) -> None:
        self.root = root
        with open(os.path.join(root, "table.csv")) as table:
            rows = list(csv.reader(table))
        self.names = [name for name, _ in rows]
        self.classes = [kind for _, kind in rows]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> int:
        return content(os.path.join(self.root, self.classes[index], f"{self.names[index]}.bin"))


class Records(Own):
    """As MONAI's: a list of dictionaries, with an image and a mask."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.data = [
            {"image": f"{root}/{kind}/{name}.bin", "label": f"{root}/masks/{name}.bin"}
            for name, kind in zip(self.names, self.classes, strict=True)
        ]
        self.names = self.classes = []

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> int:
        return content(self.data[index]["image"]) + content(self.data[index]["label"])


class Numbered(Own):
    """No list says its files: their numbers are those of the samples."""

    def __init__(self, root: str) -> None:
        self.root = root

    def __len__(self) -> int:
        return len(os.listdir(f"{self.root}/masks"))

    def __getitem__(self, index: int) -> int:
        return content(f"{self.root}/masks/{index:04}.bin")


class Reader:
    """As timm's: it has the samples, relative to the directory that it names."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.samples = [(f"masks/{name}", 0) for name in sorted(os.listdir(f"{root}/masks"))]


class Nested(Dataset[int]):
    def __init__(self, root: str) -> None:
        self.reader = Reader(root)

    def __len__(self) -> int:
        return len(self.reader.samples)

    def __getitem__(self, index: int) -> int:
        return content(os.path.join(self.reader.root, self.reader.samples[index][0]))


class Part(Dataset[int]):
    """A subset of one's own."""

    def __init__(self, root: str) -> None:
        self.whole = Own(root)
        self.rows = [row for row in range(len(self.whole)) if row % 3][::-1]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> int:
        return self.whole[self.rows[index]]


class Chance(Own):
    """Any other file of the list."""

    def __getitem__(self, index: int) -> int:
        return super().__getitem__(random.randrange(len(self.names)))


class Listed(Chance):
    """It lists its files, and opens any of them: none before the list was published.

    The list is not published at all where the helper hears sooner that it is wrong.
    """

    number = 0  # of its loader's consumer

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.files = [f"{root}/{kind}/{name}.bin" for name, kind in zip(self.names, self.classes, strict=True)]

    def __getitem__(self, index: int) -> int:
        wait_until_told("JobPublication", number=self.number)
        return super().__getitem__(index)


class Changing(Own):
    """Other files in every epoch."""

    epoch = 0

    def __getitem__(self, index: int) -> int:
        row = self.names[index]
        return content(f"{self.root}/masks/{row}.bin" if self.epoch else f"{self.root}/{self.classes[index]}/{row}.bin")


SCENARIOS: dict[str, Callable[[str], DataLoader[Any]]] = {
    "table": lambda root: DataLoader(Own(root), BATCH, shuffle=True, num_workers=2),
    "table-here": lambda root: DataLoader(Own(root), BATCH, shuffle=True),
    "table-spawned": lambda root: DataLoader(
        Own(root), BATCH, shuffle=True, num_workers=1, persistent_workers=True, multiprocessing_context=SPAWN
    ),
    "records": lambda root: DataLoader(Records(root), BATCH, shuffle=True, num_workers=2),
    "numbered": lambda root: DataLoader(Numbered(root), BATCH, shuffle=True, num_workers=1),
    "nested": lambda root: DataLoader(Nested(root), BATCH, shuffle=True, num_workers=1),
    "part": lambda root: DataLoader(Part(root), BATCH, shuffle=True, num_workers=1),
    "chance": lambda root: DataLoader(Chance(root), BATCH, shuffle=True, num_workers=1),
    "listed-chance": lambda root: DataLoader(Listed(root), BATCH, num_workers=1),
    "changing": lambda root: DataLoader(Changing(root), BATCH, shuffle=True),
}


WRONG = (("listed-chance", 0), ("changing", 1))


def main() -> None:
    root, *names = sys.argv[1:]
    random.seed(1)
    torch.manual_seed(3)
    loaders = []  # kept, so that each is a consumer of its own to the end
    for number, name in enumerate(names):
        loader = SCENARIOS[name](root)
        loaders.append(loader)
        for epoch in range(EPOCHS):
            loader.dataset.epoch, loader.dataset.number = epoch, number  # type: ignore[attr-defined]
            read = []
            for count, batch in enumerate(loader):
                read += [int(value) for value in batch]
                if not epoch and count == SOON and "chance" not in name:
                    wait_until_told("JobPublication", number=number)
                if count == LATER and (name, epoch) in WRONG:
                    wait_until_told("Ended", epoch, number)
            if not epoch and "chance" not in name:
                wait_until_told("JobEpoch", 0, number, 1)
            print(json.dumps({"scenario": name, "epoch": epoch, "read": read}), flush=True)
    print(random.random(), float(torch.rand(())))


if __name__ == "__main__":
    main()
