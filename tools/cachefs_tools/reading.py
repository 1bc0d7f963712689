"""Reading files as a data loader does, timed one by one."""

import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

BUFFER_SIZE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over files: p50 and p99 are microseconds from open to close of one file."""

    files: int
    bytes: int
    seconds: float
    p50: float
    p99: float

    @property
    def files_per_second(self) -> float:
        return self.files / self.seconds


def find_files(root: str) -> list[str]:
    """Every file below *root*, each with its attributes asked once, as a data loader's start does."""
    paths = []
    for directory, _, names in os.walk(root):
        paths += [os.path.join(directory, name) for name in sorted(names)]
    for path in paths:
        os.stat(path)
    return paths


def read_shuffled(paths: Sequence[str], seed: int) -> Pass:
    """Open, fstat, read to the end and close each file once, in an order drawn from *seed*."""
    order = list(paths)
    random.Random(seed).shuffle(order)
    buffer = [bytearray(BUFFER_SIZE)]
    latencies = []
    total = 0
    begin = before = time.perf_counter_ns()
    for path in order:
        total += read_file(path, buffer)
        now = time.perf_counter_ns()
        latencies.append(now - before)
        before = now
    quantiles = statistics.quantiles(latencies, n=100)
    return Pass(len(order), total, (before - begin) / 1e9, quantiles[49] / 1e3, quantiles[98] / 1e3)


def read_file(path: str, buffer: list[bytearray]) -> int:
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


def drop_page_cache(paths: Sequence[str]) -> None:
    """Drop the kernel's pages of these files, and nothing else of them."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
