"""Datasets whose files a library in C opens: `c_datasets.py DIRECTORY SCENARIO...` (see test_c_files.py).

Each scenario has files of its own, in the directory of its name, so that nobody has read them. In the first epoch the
script reads slowly until the daemon was told the order of their files. Each epoch is printed as it was read.
"""

import csv
import ctypes
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from told import was_told
from torch.utils.data import DataLoader, Dataset

BATCH = 4
EPOCHS = 2
# Seconds between two batches while nothing is known: a mount hears ten times a second that somebody asks.
PAUSE = 0.15

_libc = ctypes.CDLL(None)


def content(path: str) -> int:
    """What a library in C reads: no audit event tells of its open."""
    fd = _libc.open(path.encode(), os.O_RDONLY)
    try:
        return int(os.pread(fd, 100, 0))
    finally:
        _libc.close(fd)


class Table(Dataset[int]):
    """A table of names and classes, and a directory."""

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


def hashed(index: int) -> str:
    """A name that no column has."""
    return hashlib.sha1(b"%d" % index).hexdigest()


class Hashed(Dataset[int]):
    def __init__(self, root: str) -> None:
        self.root = root
        self.size = len(os.listdir(root))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return content(f"{self.root}/{hashed(index)}")


class Ahead(Hashed):
    """A thread reads other samples ahead."""

    def __getitem__(self, index: int) -> int:
        later = [f"{self.root}/{hashed((index * 7 + step) % self.size)}" for step in (11, 17)]
        thread = threading.Thread(target=lambda: [content(path) for path in later])
        thread.start()
        thread.join()
        return super().__getitem__(index)


class Pairs(Hashed):
    """Two files per sample, of which half are in the page cache."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.size //= 2
        for number in random.sample(range(2 * self.size), self.size):
            content(f"{root}/{hashed(number)}")

    def __getitem__(self, index: int) -> int:
        super().__getitem__(index + self.size)
        return super().__getitem__(index)


class Raced(Hashed):
    """Another process reads the same files."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        paths = [f"{root}/{hashed(number)}" for number in random.sample(range(self.size), self.size)]
        program = "import os, sys, time\nfor path in sys.argv[1:]: os.pread(os.open(path, 0), 9, 0); time.sleep(0.03)"
        subprocess.Popen([sys.executable, "-I", "-S", "-c", program, *paths])


SCENARIOS: dict[str, Callable[[str], DataLoader[Any]]] = {
    "table": lambda root: DataLoader(Table(root), BATCH, shuffle=True, num_workers=2),
    "table-here": lambda root: DataLoader(Table(root), BATCH, shuffle=True),
    "hashed": lambda root: DataLoader(Hashed(root), BATCH, shuffle=True, num_workers=2),
    "ahead": lambda root: DataLoader(Ahead(root), BATCH, shuffle=True, num_workers=2),
    "pairs": lambda root: DataLoader(Pairs(root), BATCH, shuffle=True),
    "raced": lambda root: DataLoader(Raced(root), BATCH, shuffle=True, num_workers=2),
}
INFERRED = ("table", "table-here")


def main() -> None:
    top, *names = sys.argv[1:]
    random.seed(1)
    torch.manual_seed(3)
    loaders = []  # kept, so that each is a consumer of its own to the end
    for number, name in enumerate(names):
        loader = SCENARIOS[name](str(Path(top, name)))
        loaders.append(loader)
        for epoch in range(EPOCHS):
            read = []
            for batch in loader:
                read += [int(value) for value in batch]
                if not epoch and not (name in INFERRED and was_told("JobEpoch", 0, number)):
                    time.sleep(PAUSE if "TOLD" in os.environ else 0)
            print(json.dumps({"scenario": name, "epoch": epoch, "read": read}), flush=True)
    print(random.random(), float(torch.rand(())))


if __name__ == "__main__":
    main()
