"""One large file, read through once and in random pieces, cold, out of each tier; gigabytes per second beside native.

Whose processor time it takes says what to do about it: Python's own is user time of the mount's processes, the
copying and the FUSE requests are system time.
"""

import mmap
import os
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy

from cachefs.errors import CachefsError
from cachefs.job_messages import JobPublish, SampleMap
from cachefs.planning.sequences.sampler import SamplerSpec
from cachefs_tools.bench.processor_time import accounted
from cachefs_tools.bench.push_node import (
    DATASET,
    TIERS,
    PushNode,
    cold_mount,
    published,
    push_node,
    pushed,
    room_for,
)
from cachefs_tools.bench.reads import forget_pages

NAME: Final = "large.bin"
RECORD: Final = 256 << 10
SEQUENTIAL_READ: Final = 1 << 20
SEED: Final = 1
STAMP: Final = 8
WAYS: Final = {"pushing": (), "not pushing": ("no_push",)}


@dataclass(frozen=True, slots=True)
class Large:
    """size: bytes, a multiple of 1 MiB; head_start: seconds from publishing to the first read."""

    size: int
    head_start: float
    budget: str = ""


def measure(work: Path, load: Large) -> list[dict[str, Any]]:
    """Raises CachefsError for a size that is no multiple of a read's."""
    if not load.size or load.size % SEQUENTIAL_READ:
        raise CachefsError(f"--size {load.size} is not a multiple of {SEQUENTIAL_READ} bytes")
    source = work / "native"
    write_large(source / NAME, load.size)
    room = room_for(1, load.size)
    runs = []
    for tier in TIERS:
        place = work / tier
        place.mkdir()
        with push_node(place, source, tier, room) as node:
            runs += [
                _run(node, source, load, tier, pattern, way) for pattern in ("sequential", "random") for way in WAYS
            ]
    return runs


def write_large(path: Path, size: int) -> None:
    """Each RECORD starts with its offset, so that a read of the wrong place is seen."""
    path.parent.mkdir()
    pool = random.Random(0).randbytes(2 * RECORD)
    with path.open("wb") as file:
        for offset in range(0, size, RECORD):
            start = offset // RECORD * 4099 % RECORD
            file.write(offset.to_bytes(STAMP, "little") + pool[start : start + RECORD - STAMP])


def _run(node: PushNode, source: Path, load: Large, tier: str, pattern: str, way: str) -> dict[str, Any]:
    length = SEQUENTIAL_READ if pattern == "sequential" else RECORD
    offsets = range(0, load.size, length) if pattern == "sequential" else _random_offsets(load.size)
    native = source / NAME
    os.sync()
    forget_pages(source, [NAME])
    cold, _ = read_pieces(native, offsets, length)
    cached, _ = read_pieces(native, offsets, length)
    options = [f"page_cache_budget={load.budget}"] if load.budget and way == "pushing" else WAYS[way]
    with ExitStack() as stack:
        mount = stack.enter_context(cold_mount(node, options))
        before = mount.counters()
        with accounted(*mount.pids()) as processor:
            stack.enter_context(published(node, _publication(load, pattern)))
            time.sleep(load.head_start)
            speed, damaged = read_pieces(mount.path / NAME, offsets, length)
        after = mount.counters()
        stack.close()
    return {
        "run": f"{pattern}, {tier}, {way}", "gb_per_s": speed, "native_cached_gb_per_s": cached,
        "native_cold_gb_per_s": cold, "ratio": round(speed / cached, 3), "damaged": damaged,
        "fuse_requests": after["requests"] - before["requests"], "push": pushed(before, after),
        "processor_seconds": processor,
    }  # fmt: skip


def read_pieces(path: Path, offsets: Sequence[int], length: int) -> tuple[float, int]:
    """(GB per second, pieces that did not come whole from where they should)."""
    buffer = mmap.mmap(-1, length)
    buffers = [buffer]
    damaged = 0
    fd = os.open(path, os.O_RDONLY)
    try:
        begin = time.perf_counter()
        for offset in offsets:
            got = os.preadv(fd, buffers, offset)
            damaged += got != length or buffer[:STAMP] != offset.to_bytes(STAMP, "little")
        seconds = time.perf_counter() - begin
    finally:
        os.close(fd)
    return round(length * len(offsets) / seconds / 1e9, 3), damaged


def _random_offsets(size: int) -> list[int]:
    order: list[int] = numpy.random.RandomState(SEED).permutation(size // RECORD).tolist()
    return [number * RECORD for number in order]


def _publication(load: Large, pattern: str) -> JobPublish:
    if pattern == "sequential":
        spec, sample_map = SamplerSpec(kind="sequential", size=1), SampleMap(kind="tree")
    else:
        spec = SamplerSpec(kind="numpy", size=load.size // RECORD, seed=SEED)
        sample_map = SampleMap(kind="records", indexer=f"fixed:{RECORD}", paths=[NAME.encode()])
    return JobPublish(job="large", dataset=DATASET, spec=spec, map=sample_map, pid=os.getpid(), source="cachefs-bench")
