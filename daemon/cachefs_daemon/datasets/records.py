"""What the daemon remembers of its datasets between two runs: one JSON file, replaced atomically."""

import os
from pathlib import Path
from typing import Final

import msgspec

from cachefs.errors import CachefsError
from cachefs.messages import OriginOptions

FILE_NAME: Final = "datasets.json"


class SnapshotRecord(msgspec.Struct, frozen=True):
    """id: of the snapshot; replaced: unix time since when it is no longer the current one, 0 while it is."""

    id: str
    replaced: float = 0.0


class DatasetRecord(msgspec.Struct, frozen=True):
    """snapshots: newest first, the first being the current one; pins: paths relative to the dataset's root; share: of
    each tier that it may take; ttl: seconds that its blocks stay after their last read, 0 where nothing limits that."""

    name: str
    url: str
    options: OriginOptions
    snapshots: list[SnapshotRecord]
    pins: list[bytes] = []
    share: float = 1.0
    ttl: float = 0.0


class _File(msgspec.Struct, frozen=True):
    datasets: list[DatasetRecord]


def load(state_dir: Path) -> list[DatasetRecord]:
    """Raises CachefsError where the file is there but cannot be understood: guessing would drop datasets."""
    path = state_dir / FILE_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File).datasets
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as error:
        raise CachefsError(
            f"the dataset registry {path} cannot be read ({error}); repair it, or remove it and add the datasets again"
        ) from None


def save(state_dir: Path, datasets: list[DatasetRecord]) -> None:
    """Raises CachefsError where it cannot be written; the old file then stays."""
    path = state_dir / FILE_NAME
    fresh = path.with_suffix(".new")
    try:
        with fresh.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(_File(datasets)), indent=1))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        raise CachefsError(f"the dataset registry {path} cannot be written: {error.strerror}") from None
