"""Measures an origin: latency of small reads, and throughput with several concurrent requests.

The reads use the daemon's client, on objects that a snapshot lists. Their number and bytes are bounded beforehand.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy

from cachefs.errors import CachefsError
from cachefs.messages import OriginOptions
from cachefs.snapshot import Entry, Snapshot
from cachefs_daemon.origin.base import ObjectRange, Origin, OriginSettings
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.origin.kinds import open_origin

# Bytes of a read that measures latency: little compared with the cost of a response.
SMALL_READ: Final = 16 << 10


class MeasurementBounds(msgspec.Struct, frozen=True):
    """The bounds of a measurement."""

    # Sequential reads of SMALL_READ bytes.
    small: int
    # For each number of concurrent requests in `widths`: `large` reads of `large_bytes`.
    widths: Sequence[int]
    large: int
    large_bytes: int
    # Seconds for everything.
    seconds: float

    @property
    def max_requests(self) -> int:
        return self.small + len(self.widths) * self.large

    @property
    def max_bytes(self) -> int:
        """Most bytes read."""
        return self.small * SMALL_READ + len(self.widths) * self.large * self.large_bytes


class ConcurrentThroughput(msgspec.Struct, frozen=True):
    """Throughput with `width` concurrent requests."""

    width: int
    # Bytes and responses per second.
    bytes: float
    answers: float


class OriginSpeed(msgspec.Struct, frozen=True):
    """The result of a measurement."""

    # Seconds, of small reads.
    p50: float = 0.0
    p99: float = 0.0
    throughput: Sequence[ConcurrentThroughput] = ()
    requests: int = 0
    bytes: int = 0
    # Class name and text of the error if a read has failed; earlier results count.
    error: str = ""
    message: str = ""


def sampled_files(snapshot: Snapshot, count: int, seed: int = 0) -> list[Entry]:
    """Return random non-empty files of a snapshot; fewer than *count* if there are no more."""
    total = 1 + snapshot.files + snapshot.directories
    numbers = random.Random(seed)
    tried = range(total) if total <= 4 * count else (numbers.randrange(total) for _ in range(16 * count))
    found: dict[int, Entry] = {}
    for number in tried:
        entry = snapshot.entry(number)
        if not entry.is_dir and entry.size:
            found[number] = entry
        if len(found) == count:
            break
    return list(found.values())


def plan_reads(snapshot: Snapshot, files: Sequence[Entry], count: int, most: int) -> list[ObjectRange]:
    """Return *count* reads of at most *most* bytes, over files in turn; over parts of large files in turn."""
    reads = []
    for number in range(count if files else 0):
        entry = files[number % len(files)]
        length = min(most, entry.size)
        offset = (number // len(files)) * length % max(1, entry.size - length + 1)
        reads.append(ObjectRange(snapshot.path_of(entry), entry.version, entry.size, offset, length))
    return reads


def measure_origin(
    path: Path, options: OriginOptions, settings: OriginSettings, bounds: MeasurementBounds
) -> OriginSpeed:
    """Measure the origin of the snapshot at *path*. A failure is part of the result. Raises CachefsError for an
    unreadable snapshot, or an invalid URL."""
    snapshot = Snapshot(path)
    try:
        files = sampled_files(snapshot, max(bounds.small, bounds.large))
        small = plan_reads(snapshot, files, bounds.small, SMALL_READ)
        large = plan_reads(snapshot, files, bounds.large, bounds.large_bytes)
        return asyncio.run(_run_reads(open_origin(snapshot.url, options, settings), small, large, bounds))
    finally:
        snapshot.close()


async def _run_reads(
    origin: Origin, small: Sequence[ObjectRange], large: Sequence[ObjectRange], look: MeasurementBounds
) -> OriginSpeed:
    took: list[float] = []
    throughput: list[ConcurrentThroughput] = []
    error, message = "", ""
    until = asyncio.get_running_loop().time() + look.seconds
    try:
        for read in small:
            began = time.perf_counter()
            await origin.read(read, Deadline(until))
            took.append(time.perf_counter() - began)
        for width in look.widths if large else ():
            throughput.append(await _measure_concurrent(origin, large, width, until))
    except CachefsError as failure:
        error, message = type(failure).__name__, str(failure)
    finally:
        await origin.close()
    # The first read opens the connection, which later ones share.
    p50, p99 = numpy.quantile(took[1:] or took, (0.5, 0.99)) if took else (0.0, 0.0)
    count = sum(read.length for read in small[: len(took)]) + len(throughput) * sum(read.length for read in large)
    return OriginSpeed(float(p50), float(p99), throughput, origin.requests, count, error, message)


async def _measure_concurrent(
    origin: Origin, reads: Sequence[ObjectRange], width: int, until: float
) -> ConcurrentThroughput:
    """Measure concurrent reads. until: loop time. Raises as Origin.read does."""
    remaining = iter(reads)

    async def worker() -> None:
        for read in remaining:
            await origin.read(read, Deadline(until))

    began = time.perf_counter()
    tasks = [asyncio.create_task(worker()) for _ in range(min(width, len(reads)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    seconds = time.perf_counter() - began
    return ConcurrentThroughput(width, sum(read.length for read in reads) / seconds, len(reads) / seconds)
