"""Maps the files of a snapshot to their inodes and paths in this mount.

The mapping is read from the mount itself, since it may show another snapshot than the daemon's current one. Bytes
therefore never get into the pages of another file.
"""

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachefs.errors import CachefsError
from cachefs.inodes import inode_of, read_mounted_snapshot
from cachefs.messages import DatasetView
from cachefs.mount_spec import MountSpec
from cachefs.snapshot import SUFFIX, Snapshot

log = logging.getLogger(__name__)

# Most snapshots that stay open, the last ones that had orders. A mount of several datasets meets new ones for ever.
MAX_OPEN_SNAPSHOTS: Final = 64


@dataclass(frozen=True, slots=True)
class MountedSnapshot:
    """A snapshot as the mount shows it."""

    snapshot: Snapshot
    # Slot of the snapshot's inodes (cachefs.inodes).
    slot: int
    # Path of its root directory in the mount, with a slash at the end.
    root: bytes

    def inode(self, entry: int) -> int:
        return inode_of(self.slot, entry)

    def path(self, entry: int) -> bytes:
        """Return the path of an entry in the mount. Raises NotFound, SnapshotDamaged."""
        return self.root + self.snapshot.path(entry)


class MountedSnapshots:
    """The snapshots that the mount shows, found on demand. For use by one thread."""

    def __init__(self, spec: MountSpec, directory: Path, datasets: Callable[[], Sequence[DatasetView]]) -> None:
        """datasets: returns the daemon's datasets; may raise CachefsError."""
        self._spec = spec
        self._directory = directory
        self._datasets = datasets
        self._found: OrderedDict[str, MountedSnapshot] = OrderedDict()

    def find_snapshot(self, snapshot_id: str) -> MountedSnapshot | None:
        """Return the snapshot's place; None where the mount does not show it.

        Where two datasets have this snapshot, returns the place of the first one by name.
        """
        mounted = self._found.pop(snapshot_id, None)
        if mounted is None or mounted.snapshot.is_replaced():
            mounted = self._search_snapshot(snapshot_id)
        if mounted is not None:
            self._found[snapshot_id] = mounted
            if len(self._found) > MAX_OPEN_SNAPSHOTS:
                # Not closed here, since an order may still use it. It closes with its last reference.
                self._found.popitem(last=False)
        return mounted

    def _search_snapshot(self, snapshot_id: str) -> MountedSnapshot | None:
        try:
            datasets = self._datasets()
        except CachefsError as error:
            log.debug("cannot ask for datasets: %s", error)
            return None
        for path, root in self._candidates(snapshot_id, datasets):
            try:
                snapshot = Snapshot(path)
            except CachefsError as error:
                log.warning("%s", error)
                continue
            slot = _shown_slot(snapshot, root)
            if slot is not None:
                return MountedSnapshot(snapshot, slot, root)
            snapshot.close()
        return None

    def _candidates(self, snapshot_id: str, datasets: Sequence[DatasetView]) -> list[tuple[Path, bytes]]:
        """Return (snapshot file, directory in the mount) of the datasets that may have the snapshot, in name order."""
        root = os.fsencode(self._directory) + b"/"
        if self._spec.is_single:
            # The mount may show another snapshot than the current one; the daemon then keeps both files.
            (part,) = self._spec.datasets
            if part.digits and part.digits != snapshot_id:
                return []
            named = [Path(dataset.path) for dataset in datasets if dataset.name == part.name]
            files = [path.with_name(snapshot_id + SUFFIX) for path in named]
            return [(file, root) for file in files if file.exists()]
        shown = sorted((dataset for dataset in datasets if dataset.snapshot == snapshot_id), key=lambda one: one.name)
        return [(Path(dataset.path), root + dataset.name.encode() + b"/") for dataset in shown]


def _shown_slot(snapshot: Snapshot, root: bytes) -> int | None:
    """Return the slot of the inodes in the directory *root*, or None where it does not show *snapshot*."""
    try:
        slot, shown = read_mounted_snapshot(root)
    except OSError as error:
        log.debug("%s does not show snapshot %s: %s", os.fsdecode(root), snapshot.id, error)
        return None
    return slot if shown == snapshot.id else None
