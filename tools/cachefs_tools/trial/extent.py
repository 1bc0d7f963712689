"""The extent of a trial: its job, its files, and their cost.

`choose_files` chooses the files at random, preferring files that are not on the node.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from cachefs.block import block_count
from cachefs.errors import CachefsError, ConfigError
from cachefs.messages import DatasetDetail, Selection
from cachefs.rpc import CACHED, DaemonClient
from cachefs.snapshot import Snapshot
from cachefs_tools.origin_speed import MeasurementBounds, sampled_files

# Share of a trial's bytes for measuring the origin alone.
_FOR_ORIGIN: Final = 0.2
WIDTHS: Final = (1, 4, 16)
_LARGEST_READ: Final = 1 << 20
_LOOK_SECONDS: Final = 60.0
# Files examined for each file read, and most files examined.
_CANDIDATES: Final = 3
_MAX_FILES: Final = 20_000


class TrialJob(msgspec.Struct, frozen=True):
    """The simulated job."""

    # Samples per second that its accelerators take.
    rate: float
    batch: int
    workers: int
    # Most seconds of an epoch without waits.
    seconds: float
    epochs: int
    # Most bytes that the whole trial may take from the origin.
    bytes: int


class TrialSample(msgspec.Struct, frozen=True):
    """A file, which is one sample."""

    # Relative to the dataset.
    path: bytes
    size: int
    # Whether all of it is on this node already.
    is_cached: bool


class FileChoice(msgspec.Struct, frozen=True):
    """The files that are read."""

    samples: Sequence[TrialSample]
    block_size: int

    @property
    def bytes(self) -> int:
        return sum(sample.size for sample in self.samples)

    @property
    def mean_size(self) -> float:
        """Mean bytes of a sample."""
        return self.bytes / max(1, len(self.samples))

    @property
    def cold_samples(self) -> Sequence[TrialSample]:
        """The samples that come from the origin."""
        return [sample for sample in self.samples if not sample.is_cached]

    @property
    def max_requests(self) -> int:
        """Most GETs for the cold files."""
        return sum(block_count(sample.size, self.block_size) for sample in self.cold_samples)


def origin_bounds(job: TrialJob, mean: float) -> MeasurementBounds:
    """Return the bounds for measuring the origin alone, within its share of bytes. mean: bytes of a file."""
    size = max(1, min(_LARGEST_READ, int(mean) or 1))
    each = job.bytes * _FOR_ORIGIN / len(WIDTHS) / size
    return MeasurementBounds(
        small=16, widths=WIDTHS, large=int(min(64, max(1, each))), large_bytes=size, seconds=_LOOK_SECONDS
    )


def select_samples(job: TrialJob, candidates: Sequence[TrialSample], block_size: int) -> FileChoice:
    """Return as many candidates as the job reads in an epoch, within its bytes, preferring files that are not
    cached."""
    most = max(job.batch, int(job.rate * job.seconds))
    room = job.bytes * (1 - _FOR_ORIGIN)
    taken: list[TrialSample] = []
    for sample in sorted(candidates, key=lambda each: each.is_cached):
        if len(taken) == most or sample.size > room:
            continue
        taken.append(sample)
        room -= sample.size
    return FileChoice(taken, block_size)


def choose_files(client: DaemonClient, detail: DatasetDetail, job: TrialJob, seed: int) -> FileChoice:
    """Choose the files of a trial. Raises CachefsError if the dataset has nothing that a trial can read."""
    snapshot = Snapshot(Path(detail.dataset.path))
    try:
        mean = max(1.0, snapshot.bytes / max(1, snapshot.files))
        wanted = min(job.rate * job.seconds, job.bytes / mean)
        count = int(min(_MAX_FILES, max(64, _CANDIDATES * wanted)))
        paths = [snapshot.path_of(entry) for entry in sampled_files(snapshot, count, seed)]
    finally:
        snapshot.close()
    if not paths:
        raise CachefsError(f"dataset {detail.dataset.name} has no file with bytes in it; there is nothing to try")
    stream = client.stream_responses(CACHED, Selection(dataset=detail.dataset.name, paths=paths), 120.0)
    cached = {file.path: sum(file.cached) for page in stream for file in page.files}
    # A partly cached file can neither be read cold nor be restored to its state afterwards.
    found = {path: cached.get(path, 0) for path in paths}
    sizes = _sizes(Path(detail.dataset.path), paths)
    candidates = [
        TrialSample(path, sizes[path], is_cached=here >= sizes[path])
        for path, here in found.items()
        if here == 0 or here >= sizes[path]
    ]
    choice = select_samples(job, candidates, detail.block_size)
    if len(choice.samples) < 2:
        least = min((sample.size for sample in candidates), default=0)
        raise ConfigError(
            f"files of {detail.dataset.name} are too large for a trial of {job.bytes:,} bytes (the smallest of those "
            f"checked has {least:,}); allow more with --bytes"
        )
    return choice


def _sizes(path: Path, paths: list[bytes]) -> dict[bytes, int]:
    snapshot = Snapshot(path)
    try:
        entries = {each: snapshot.find_path(each) for each in paths}
        return {each: entry.size for each, entry in entries.items() if entry is not None}
    finally:
        snapshot.close()
