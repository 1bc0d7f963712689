"""A program for any Python from 3.6 on: how fast does it open, read and close files, in the ways of training code?

    python pyread.py LIST ROUNDS NATIVE_DIR MOUNT_DIR

LIST is a file with the paths to read, one per line, relative to both directories. The directories are read in turns.
Prints one JSON object: way -> microseconds per file below each directory, of the best round.
"""

import json
import os
import pathlib
import sys
import time
import typing


def by_open(path: str) -> int:
    """As PIL, torchvision, json and pickle do. Before Python 3.14 it asks isatty() of each file, which is an ioctl."""
    with open(path, "rb") as file:
        return len(file.read())


def by_path(path: str) -> int:
    return len(pathlib.Path(path).read_bytes())


def by_buffer(path: str) -> int:
    """With a size of buffer, open() does not ask isatty()."""
    with open(path, "rb", buffering=65536) as file:
        return len(file.read())


def by_raw(path: str) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return len(os.read(descriptor, os.fstat(descriptor).st_size))
    finally:
        os.close(descriptor)


WAYS = {"open": by_open, "path": by_path, "buffer": by_buffer, "raw": by_raw}


def measure(read: typing.Callable[[str], int], names: "list[str]", rounds: int, roots: "list[str]") -> "list[float]":
    """The best microseconds per file of each root."""
    best = [float("inf")] * len(roots)
    trees = [[os.path.join(root, name) for name in names] for root in roots]
    for _ in range(rounds):
        for number, paths in enumerate(trees):
            began = time.perf_counter()
            for path in paths:
                read(path)
            best[number] = min(best[number], (time.perf_counter() - began) / len(paths) * 1e6)
    return best


def main() -> None:
    listing, rounds, *roots = sys.argv[1:]
    with open(listing) as file:
        names = file.read().splitlines()
    print(json.dumps({way: measure(read, names, int(rounds), roots) for way, read in WAYS.items()}))


if __name__ == "__main__":
    main()
