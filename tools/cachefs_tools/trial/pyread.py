"""Measures how fast Python (3.6 or later) opens, reads and closes files, in the ways of training code.

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


def read_by_open(path: str) -> int:
    """Read like PIL, torchvision, json and pickle. Before Python 3.14, open() calls isatty(), an ioctl, for each
    file."""
    with open(path, "rb") as file:
        return len(file.read())


def read_by_path(path: str) -> int:
    return len(pathlib.Path(path).read_bytes())


def read_by_buffer(path: str) -> int:
    """Read with a buffer size, with which open() does not call isatty()."""
    with open(path, "rb", buffering=65536) as file:
        return len(file.read())


def read_raw(path: str) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return len(os.read(descriptor, os.fstat(descriptor).st_size))
    finally:
        os.close(descriptor)


METHODS = {"open": read_by_open, "path": read_by_path, "buffer": read_by_buffer, "raw": read_raw}


def measure(read: typing.Callable[[str], int], names: "list[str]", rounds: int, roots: "list[str]") -> "list[float]":
    """Return the best microseconds per file of each root."""
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
    print(json.dumps({name: measure(read, names, int(rounds), roots) for name, read in METHODS.items()}))


if __name__ == "__main__":
    main()
