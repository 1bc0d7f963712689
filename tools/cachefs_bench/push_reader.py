"""A job that reads one sample at a time from a mount and from a native copy, and computes between samples.

Each sample is read from both trees, which alternate in being first, since the second read finds the processor awake.
The order of an epoch is a permutation drawn by `numpy.random.RandomState(seed + epoch)`. The job starts when it
receives a line on standard input, and prints one JSON object per epoch. It stores its progress in the file --progress,
as two 64-bit numbers: the epoch, and the number of samples delivered.
"""

import argparse
import gc
import json
import mmap
import os
import struct
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy

from cachefs_bench.sample_data import is_sample, sample_name

PROGRESS: Final = struct.Struct("<QQ")


class TimedTree:
    """A tree of files of one size, which are read one at a time."""

    def __init__(self, root: str, files: int, size: int) -> None:
        self._paths = [os.fsencode(f"{root}/{sample_name(number)}") for number in range(files)]
        self._size = size
        self._buffer = memoryview(mmap.mmap(-1, size))
        self.nanoseconds = array("q")  # duration of each read: open, read to the end, close

    def read_sample(self, number: int) -> None:
        """Read a sample and record the duration."""
        path, buffers = self._paths[number], [self._buffer]
        begin = time.perf_counter_ns()
        fd = os.open(path, os.O_RDONLY)
        got = os.readv(fd, buffers)
        os.close(fd)
        self.nanoseconds.append(time.perf_counter_ns() - begin)
        if got != self._size:
            self._buffer[:8] = bytes(8)

    def has_read(self, number: int) -> bool:
        """Return whether the last read delivered sample *number*, undamaged."""
        return is_sample(self._buffer, number)

    def report(self) -> dict[str, float]:
        """Return the seconds of all reads together, and microseconds per read by quantile."""
        microseconds = numpy.array(self.nanoseconds) / 1e3
        p50, p99 = numpy.quantile(microseconds, (0.5, 0.99))
        return {"seconds": sum(self.nanoseconds) / 1e9, "p50_us": round(p50, 1), "p99_us": round(p99, 1),
                "longest_us": round(microseconds.max(), 1)}  # fmt: skip


def read_epoch(epoch: int, order: Sequence[int], options: argparse.Namespace, progress: mmap.mmap) -> dict[str, Any]:
    """Read the samples in this order. Returns the epoch's document."""
    mount, native = (TimedTree(str(root), options.files, options.size) for root in (options.mount, options.native))
    turns = ((mount, native), (native, mount))
    damaged = 0
    begin = time.perf_counter()
    for delivered, number in enumerate(order):
        for tree in turns[delivered % 2]:
            tree.read_sample(number)
        ready = time.perf_counter() + options.compute
        PROGRESS.pack_into(progress, 0, epoch, delivered + 1)
        damaged += not mount.has_read(number)
        # Check both trees, since the check changes the processor's caches.
        native.has_read(number)
        time.sleep(max(0.0, ready - time.perf_counter()))
    return {"epoch": epoch, "samples": len(order), "seconds": time.perf_counter() - begin, "damaged": damaged,
            "mount": mount.report(), "native": native.report()}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mount", type=Path)
    parser.add_argument("native", type=Path)
    parser.add_argument("--files", type=int, required=True)
    parser.add_argument("--size", type=int, required=True, help="bytes of each file")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--compute", type=float, required=True, help="seconds of computing per sample")
    parser.add_argument("--progress", type=Path, required=True, help="file of 16 bytes for the progress")
    options = parser.parse_args()
    with options.progress.open("r+b") as file:
        progress = mmap.mmap(file.fileno(), PROGRESS.size)
    gc.disable()
    sys.stdin.readline()
    for epoch in range(options.epochs):
        order = numpy.random.RandomState(options.seed + epoch).permutation(options.files).tolist()
        print(json.dumps(read_epoch(epoch, order, options, progress)), flush=True)


if __name__ == "__main__":
    main()
