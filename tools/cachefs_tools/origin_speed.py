"""How quickly an origin answers: latency of small reads, and throughput at several requests at once.

The reads are the daemon's own, with its client, of objects that a snapshot lists. Their number and their bytes are
bounded before anything is sent.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy
from cachefs_daemon.origin.base import ObjectRange, Origin, OriginSettings, open_origin
from cachefs_daemon.origin.patience import Patience

from cachefs.errors import CachefsError
from cachefs.messages import OriginOptions
from cachefs.snapshot import Entry, Snapshot

# Bytes of a read that measures latency: little beside what it takes to answer.
SMALL: Final = 16 << 10


class Look(msgspec.Struct, frozen=True):
    """What is read of an origin, at most."""

    # Reads of SMALL bytes, one after the other.
    small: int
    # At so many requests at once, so many reads of so many bytes each.
    widths: Sequence[int]
    large: int
    large_bytes: int
    # Seconds for all of it.
    seconds: float

    @property
    def requests(self) -> int:
        return self.small + len(self.widths) * self.large

    @property
    def bytes(self) -> int:
        """At most."""
        return self.small * SMALL + len(self.widths) * self.large * self.large_bytes


class Throughput(msgspec.Struct, frozen=True):
    """What came at so many requests at once."""

    width: int
    # Bytes and answers per second.
    bytes: float
    answers: float


class OriginSpeed(msgspec.Struct, frozen=True):
    """What was found."""

    # Seconds, of small reads.
    p50: float = 0.0
    p99: float = 0.0
    throughput: Sequence[Throughput] = ()
    requests: int = 0
    bytes: int = 0
    # Name of the error's class and its text, where a read has failed; what came before it counts.
    error: str = ""
    message: str = ""


def sampled_files(snapshot: Snapshot, count: int, seed: int = 0) -> list[Entry]:
    """Files of a snapshot, drawn at random, empty ones left out; fewer than *count* where there are no more."""
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


def reads_of(snapshot: Snapshot, files: Sequence[Entry], count: int, most: int) -> list[ObjectRange]:
    """So many reads of at most so many bytes, of files in turns; of large files, parts in turns."""
    reads = []
    for number in range(count if files else 0):
        entry = files[number % len(files)]
        length = min(most, entry.size)
        offset = (number // len(files)) * length % max(1, entry.size - length + 1)
        reads.append(ObjectRange(snapshot.path_of(entry), entry.version, entry.size, offset, length))
    return reads


def measure(path: Path, options: OriginOptions, settings: OriginSettings, look: Look) -> OriginSpeed:
    """Ask the origin of the snapshot at *path*. A failure is part of the result.

    Raises CachefsError for a snapshot that cannot be read, or a URL that makes no sense.
    """
    snapshot = Snapshot(path)
    try:
        files = sampled_files(snapshot, max(look.small, look.large))
        small = reads_of(snapshot, files, look.small, SMALL)
        large = reads_of(snapshot, files, look.large, look.large_bytes)
        return asyncio.run(_measured(open_origin(snapshot.url, options, settings), small, large, look))
    finally:
        snapshot.close()


async def _measured(
    origin: Origin, small: Sequence[ObjectRange], large: Sequence[ObjectRange], look: Look
) -> OriginSpeed:
    took: list[float] = []
    throughput: list[Throughput] = []
    error, message = "", ""
    until = asyncio.get_running_loop().time() + look.seconds
    try:
        for read in small:
            began = time.perf_counter()
            await origin.read(read, Patience(until))
            took.append(time.perf_counter() - began)
        for width in look.widths if large else ():
            throughput.append(await _at_once(origin, large, width, until))
    except CachefsError as failure:
        error, message = type(failure).__name__, str(failure)
    finally:
        await origin.close()
    # The first read opens the connection, which later ones share.
    p50, p99 = numpy.quantile(took[1:] or took, (0.5, 0.99)) if took else (0.0, 0.0)
    count = sum(read.length for read in small[: len(took)]) + len(throughput) * sum(read.length for read in large)
    return OriginSpeed(float(p50), float(p99), throughput, origin.requests, count, error, message)


async def _at_once(origin: Origin, reads: Sequence[ObjectRange], width: int, until: float) -> Throughput:
    """until: loop time. Raises as Origin.read does."""
    rest = iter(reads)

    async def worker() -> None:
        for read in rest:
            await origin.read(read, Patience(until))

    began = time.perf_counter()
    tasks = [asyncio.create_task(worker()) for _ in range(min(width, len(reads)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    seconds = time.perf_counter() - began
    return Throughput(width, sum(read.length for read in reads) / seconds, len(reads) / seconds)
