"""Reads files as a data loader does, and measures how long each takes."""

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

BUFFER_SIZE: Final = 1 << 20
# How often a pass says how far it is. Saying it takes as long as reading one file does.
SAYINGS: Final = 50


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass over files measured."""

    files: int
    bytes: int
    seconds: float
    p50: float  # microseconds from open to close of one file, the median
    p99: float  # likewise, the 99th percentile

    @property
    def files_per_second(self) -> float:
        return self.files / self.seconds


def find_files(root: str) -> list[str]:
    """The paths of all files below *root*. Asks for the attributes of each once, as a data loader does at its start."""
    paths = []
    for directory, _, names in os.walk(root):
        paths += [os.path.join(directory, name) for name in sorted(names)]
    for path in paths:
        os.stat(path)
    return paths


def read_shuffled(paths: Sequence[str], seed: int, say: Callable[[int], None] | None = None) -> Pass:
    """Open, fstat, read to the end and close each file once, in an order drawn from *seed*.

    *say* is told from time to time how many files are read.
    """
    order = list(paths)
    random.Random(seed).shuffle(order)
    buffer = [bytearray(BUFFER_SIZE)]
    latencies = []
    total = 0
    begin = before = time.perf_counter_ns()
    every = -(-len(order) // SAYINGS)
    for number, path in enumerate(order, 1):
        total += read_file(path, buffer)
        now = time.perf_counter_ns()
        latencies.append(now - before)
        before = now
        if say is not None and (not number % every or number == len(order)):
            say(number)
            before = time.perf_counter_ns()
    quantiles = statistics.quantiles(latencies, n=100)
    return Pass(len(order), total, (before - begin) / 1e9, quantiles[49] / 1e3, quantiles[98] / 1e3)


def read_file(path: str, buffer: list[bytearray]) -> int:
    """Open, fstat, read to the end and close a file. Returns its bytes."""
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        done = 0
        while done < size:
            got = os.readv(fd, buffer)
            if not got:
                raise EOFError(f"{path} ends at {done} of {size} bytes")
            done += got
        return done
    finally:
        os.close(fd)
