"""Chooses files of a dataset for a trial: at random, preferring files that are not on the node."""

from pathlib import Path
from typing import Final

from cachefs.errors import CachefsError, ConfigError
from cachefs.messages import DatasetDetail, Selection
from cachefs.rpc import CACHED, DaemonClient
from cachefs.snapshot import Snapshot
from cachefs_tools.origin_speed import sampled_files
from cachefs_tools.trial.extent import FileChoice, TrialJob, TrialSample, select_samples

# Files examined for each file read, and most files examined.
_CANDIDATES: Final = 3
_MAX_FILES: Final = 20_000


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
            f"looked at has {least:,}); allow more with --bytes"
        )
    return choice


def _sizes(path: Path, paths: list[bytes]) -> dict[bytes, int]:
    snapshot = Snapshot(path)
    try:
        entries = {each: snapshot.find_path(each) for each in paths}
        return {each: entry.size for each, entry in entries.items() if entry is not None}
    finally:
        snapshot.close()
