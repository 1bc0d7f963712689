"""The registry of datasets on disk: one JSON file, replaced atomically."""

import os
from pathlib import Path
from typing import Final

import msgspec

from cachefs.errors import CachefsError
from cachefs.messages import OriginOptions
from cachefs_daemon.datasets.stamps import NO_STAMP, ChangeStamp
from cachefs_daemon.runtime.boot_clock import BootMoment

FILE_NAME: Final = "datasets.json"


class SnapshotRecord(msgspec.Struct, frozen=True):
    """A snapshot of a dataset."""

    # Id of the snapshot.
    id: str
    # When another snapshot became the current one, in seconds since the start of the machine that `boot` names; 0 while
    # this is the current one.
    replaced: float = 0.0
    # "": `replaced` is unix time, from an older version of the daemon.
    boot: str = ""

    def replaced_before(self, moment: BootMoment, unknown: bool) -> bool:
        """Return whether another snapshot was current before *moment*, which is not of an earlier start of the machine.
        unknown: the result where that cannot be determined."""
        if not self.replaced:
            return False
        if not self.boot:
            return unknown
        return self.boot != moment.boot or self.replaced < moment.seconds


class DatasetRecord(msgspec.Struct, frozen=True):
    """A dataset: its name, its origin, and its settings."""

    name: str
    url: str
    options: OriginOptions
    # The snapshots of the dataset, newest first; the first is the current one.
    snapshots: list[SnapshotRecord]
    # Paths that are pinned, relative to the dataset's root.
    pins: list[bytes] = []
    # The share of each tier that its blocks may take.
    share: float = 1.0
    # Seconds that its blocks stay after their last read; 0: no limit.
    ttl: float = 0.0
    # Bytes of each tier that its blocks may take; 0: no limit.
    most: int = 0
    # In a cluster: when it was added (several stamps where several nodes have added the same), in order; when its
    # current snapshot was made; when its limits were set. Else empty.
    added: list[ChangeStamp] = []
    listed: ChangeStamp = NO_STAMP
    limited: ChangeStamp = NO_STAMP
    # The prefix of its objects' names, where the options would give another one now: see
    # cachefs_daemon.datasets.origin_access.
    named: bytes = b""
    # When the options were last changed, in a cluster.
    reached: ChangeStamp = NO_STAMP


class RemovedRecord(msgspec.Struct, frozen=True):
    """Datasets that have been removed in a cluster under one name: a node that was away still has them."""

    name: str
    # When they were added: see cachefs_daemon.datasets.stamps.compact.
    added: list[ChangeStamp]


class Registry(msgspec.Struct, frozen=True):
    """The content of the file."""

    datasets: list[DatasetRecord] = []
    removed: list[RemovedRecord] = []
    # See cachefs_daemon.datasets.stamps.Removals.
    forgotten: list[ChangeStamp] = []
    spared: list[ChangeStamp] = []
    # Datasets that were removed, with those of their snapshots that other nodes still read.
    departed: list[DatasetRecord] = []


def load(state_dir: Path) -> Registry:
    """Return the registry of an earlier run. Raises CachefsError where the file cannot be understood: guessing would
    lose datasets."""
    path = state_dir / FILE_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=Registry)
    except FileNotFoundError:
        return Registry()
    except (OSError, msgspec.MsgspecError) as error:
        raise CachefsError(
            f"the dataset registry {path} cannot be read ({error}); repair it, or remove it and add the datasets again"
        ) from None


def save(state_dir: Path, registry: Registry) -> None:
    """Replace the file. Raises CachefsError where it cannot be written; the old file then stays."""
    path = state_dir / FILE_NAME
    fresh = path.with_suffix(".new")
    try:
        with fresh.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(registry), indent=1))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        raise CachefsError(f"the dataset registry {path} cannot be written: {error.strerror}") from None
