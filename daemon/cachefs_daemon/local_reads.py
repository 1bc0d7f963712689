"""Finds the snapshots that the mounts, jobs and warm-ups of this node read."""

from collections.abc import Iterator

from cachefs_daemon.content.warmup import Warmups
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.datasets.records import SnapshotRecord
from cachefs_daemon.jobs.registry import JobRegistry
from cachefs_daemon.mounts.registry import MountRegistry
from cachefs_daemon.ports import Directory, LocalRead


class LocalReads:
    """The reads of this node. Used on the event loop."""

    def __init__(
        self, mounts: MountRegistry, jobs: JobRegistry, warmups: Warmups, catalog: Catalog, directory: Directory
    ) -> None:
        """directory: the readers on other nodes."""
        self._mounts = mounts
        self._jobs = jobs
        self._warmups = warmups
        self._catalog = catalog
        self._directory = directory

    def mount_point_of(self, dataset: str) -> str:
        """Return the mount point of a dataset on this node; "" where it is not mounted."""
        mount = self._mounts.mount_of(dataset)
        return mount.mountpoint if mount is not None else ""

    def current_reads(self) -> Iterator[LocalRead]:
        """Yield what the mounts, jobs and warm-ups of this node read."""
        for one in self._mounts.shown_datasets(
            lambda name: found.record if (found := self._catalog.find(name)) else None
        ):
            yield LocalRead(one.name, one.snapshots, one.mountpoint, one.stays)
        for dataset, snapshot in self._read_without_mounts():
            yield LocalRead(dataset, [snapshot])

    def may_be_read(self, snapshot: SnapshotRecord) -> bool:
        """Return whether a mount, job or warm-up of any node may still read *snapshot*, which is not current."""
        if self._directory.is_used(snapshot.id):
            return True
        return any(read == snapshot.id for _, read in self._read_without_mounts()) or self._mounts.may_read(snapshot)

    def _read_without_mounts(self) -> set[tuple[str, str]]:
        """Return the datasets and snapshots that jobs and warm-ups read."""
        return {
            *((one.request.dataset, one.snapshot.id) for one in self._jobs.consumers),
            *self._warmups.read_snapshots(),
        }
