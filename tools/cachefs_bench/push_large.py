"""Reads one large file from each tier, in order and in random pieces, and compares the speed with a native copy.

No page of the file is in the kernel when the reads begin. The processor time tells the cause of a slow read: Python's
own work is user time of the mount's processes, while copying and FUSE requests are system time.
"""

import mmap
import os
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import numpy

from cachefs.errors import CachefsError
from cachefs.job_messages import JobPublication, SampleMap
from cachefs.planning.sequences.sampler import SamplerSpec
from cachefs_bench.lab.scratch_node import DATASET, ScratchNode
from cachefs_bench.push_node import (
    TIERS,
    PushMode,
    measure_processor_time,
    mount_cold,
    mount_options,
    publish_job,
    push_figures,
    run_push_node,
    tier_budget,
)
from cachefs_tools.kernel_pages import drop_pages

NAME: Final = "large.bin"
# Bytes of a random read, and of a sequential one.
RECORD_BYTES: Final = 256 << 10
SEQUENTIAL_READ: Final = 1 << 20
SEED: Final = 1
# Bytes of the offset at the start of each record.
OFFSET_BYTES: Final = 8


class ReadPattern(StrEnum):
    """Orders of the reads."""

    SEQUENTIAL = "sequential"  # from begin to end
    RANDOM = "random"  # each record once, in random order


@dataclass(frozen=True, slots=True)
class LargeFileLoad:
    """The file, and how it is read."""

    size: int  # bytes, a multiple of 1 MiB
    head_start: float  # seconds from publishing to the first read
    budget: str = ""  # of the page cache, as the mount option takes it; empty: the mount's default


def measure(work: Path, load: LargeFileLoad) -> list[dict[str, Any]]:
    """Run each combination of tier, pattern and way. Raises CachefsError for a size that is no multiple of
    SEQUENTIAL_READ."""
    if not load.size or load.size % SEQUENTIAL_READ:
        raise CachefsError(f"--size {load.size} is not a multiple of {SEQUENTIAL_READ} bytes")
    source = work / "native"
    write_large(source / NAME, load.size)
    room = tier_budget(1, load.size)
    runs = []
    for tier in TIERS:
        directory = work / tier
        directory.mkdir()
        with run_push_node(directory, source, tier, room) as node:
            runs += [_run(node, source, load, tier, pattern, mode) for pattern in ReadPattern for mode in PushMode]
    return runs


def write_large(path: Path, size: int) -> None:
    """Write a file of *size* bytes. Each record starts with its offset, so a read of the wrong position is noticed."""
    path.parent.mkdir()
    pool = random.Random(0).randbytes(2 * RECORD_BYTES)
    with path.open("wb") as file:
        for offset in range(0, size, RECORD_BYTES):
            start = offset // RECORD_BYTES * 4099 % RECORD_BYTES
            file.write(offset.to_bytes(OFFSET_BYTES, "little") + pool[start : start + RECORD_BYTES - OFFSET_BYTES])


def _run(
    node: ScratchNode, source: Path, load: LargeFileLoad, tier: str, pattern: ReadPattern, mode: PushMode
) -> dict[str, Any]:
    length = SEQUENTIAL_READ if pattern == ReadPattern.SEQUENTIAL else RECORD_BYTES
    offsets = range(0, load.size, length) if pattern == ReadPattern.SEQUENTIAL else _random_offsets(load.size)
    native = source / NAME
    os.sync()
    drop_pages([native])
    cold, _ = read_pieces(native, offsets, length)
    cached, _ = read_pieces(native, offsets, length)
    with ExitStack() as stack:
        mount = stack.enter_context(mount_cold(node, mount_options(mode, load.budget)))
        before = mount.settled_counters()
        with measure_processor_time(*mount.process_ids()) as processor:
            stack.enter_context(publish_job(node, _publication(load, pattern)))
            time.sleep(load.head_start)
            speed, damaged = read_pieces(mount.path / NAME, offsets, length)
        after = mount.settled_counters()
        stack.close()
    return {
        "run": f"{pattern}, {tier}, {mode}", "gb_per_s": speed, "native_cached_gb_per_s": cached,
        "native_cold_gb_per_s": cold, "ratio": round(speed / cached, 3), "damaged": damaged,
        "fuse_requests": after["requests"] - before["requests"], "push": push_figures(before, after),
        "processor_seconds": processor,
    }  # fmt: skip


def read_pieces(path: Path, offsets: Sequence[int], length: int) -> tuple[float, int]:
    """Read *length* bytes at each offset. Returns (GB per second, number of short or misplaced pieces)."""
    buffer = mmap.mmap(-1, length)
    buffers = [buffer]
    damaged = 0
    fd = os.open(path, os.O_RDONLY)
    try:
        begin = time.perf_counter()
        for offset in offsets:
            got = os.preadv(fd, buffers, offset)
            damaged += got != length or buffer[:OFFSET_BYTES] != offset.to_bytes(OFFSET_BYTES, "little")
        seconds = time.perf_counter() - begin
    finally:
        os.close(fd)
    return round(length * len(offsets) / seconds / 1e9, 3), damaged


def _random_offsets(size: int) -> list[int]:
    order: list[int] = numpy.random.RandomState(SEED).permutation(size // RECORD_BYTES).tolist()
    return [number * RECORD_BYTES for number in order]


def _publication(load: LargeFileLoad, pattern: ReadPattern) -> JobPublication:
    if pattern == ReadPattern.SEQUENTIAL:
        spec, sample_map = SamplerSpec(kind="sequential", size=1), SampleMap(kind="tree")
    else:
        spec = SamplerSpec(kind="numpy", size=load.size // RECORD_BYTES, seed=SEED)
        sample_map = SampleMap(kind="records", indexer=f"fixed:{RECORD_BYTES}", paths=[NAME.encode()])
    return JobPublication(
        job="large", dataset=DATASET, spec=spec, map=sample_map, pid=os.getpid(), source="cachefs-bench"
    )
