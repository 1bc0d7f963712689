"""The tree a mount shows: which inode is which entry of which snapshot (see cachefs.inodes for the numbers)."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from cachefs.errors import CachefsError, NotFound
from cachefs.inodes import ENTRY_BITS, ENTRY_MASK, ROOT, inode_of, next_slot, slot_of
from cachefs.messages import DatasetView
from cachefs.mount_spec import MountSpec
from cachefs.snapshot import SUFFIX, Snapshot

log = logging.getLogger(__name__)

# The extended attribute, of everything in a dataset, that names the snapshot shown.
SNAPSHOT: Final = "user.cachefs.snapshot"


def wanted_datasets(spec: MountSpec, datasets: Sequence[DatasetView]) -> list[DatasetView]:
    """The datasets that *spec* names, in its order, each at the snapshot to be shown. Raises NotFound."""
    if spec.is_all:
        return list(datasets)
    by_name = {dataset.name: dataset for dataset in datasets}
    found = []
    for part in spec.parts:
        dataset = by_name.get(part.name)
        if dataset is None:
            known = ", ".join(sorted(by_name)) or "none yet"
            raise NotFound(
                f"no dataset named {part.name!r} (known: {known}); add it with `cachectl dataset add {part.name} URL`"
            )
        found.append(at_snapshot(dataset, part.digits) if part.digits else dataset)
    return found


def shown_datasets(spec: MountSpec, first: Sequence[DatasetView], now: Sequence[DatasetView]) -> list[DatasetView]:
    """What a mount of *spec* shows, where the node had the datasets *first* when it was mounted and has *now* others.

    Raises NotFound.
    """
    if spec.is_single:
        return wanted_datasets(spec, first)
    pinned = [dataset for dataset in wanted_datasets(spec, first) if not spec.follows(dataset.name)]
    return pinned + [dataset for dataset in now if spec.follows(dataset.name)]


def at_snapshot(dataset: DatasetView, digits: str) -> DatasetView:
    """The dataset at the snapshot whose id begins with *digits*, while that is still on this node. Raises NotFound."""
    paths = list(Path(dataset.path).parent.glob(f"{digits}*{SUFFIX}")) if digits.isalnum() else []
    if len(paths) != 1:
        known = "no" if not paths else "more than one"
        raise NotFound(f"{known} snapshot {dataset.name}@{digits} on this node; it is at {dataset.snapshot} now")
    return msgspec.structs.replace(dataset, snapshot=paths[0].stem, path=str(paths[0]))


class Namespace:
    """The tree of one mount.

    A mount of one dataset shows the dataset's root as its own root, and stays at the snapshot it was mounted with.
    Any other mount lists its datasets by name in its root and follows their refreshes. A snapshot that was shown once
    stays readable by its inodes.
    """

    def __init__(
        self,
        spec: MountSpec,
        datasets: Sequence[DatasetView],
        now_ns: Callable[[], int],
        catch_up: Callable[[], None] = lambda: None,
    ) -> None:
        """datasets: all datasets of the node; now_ns: unix time in nanoseconds; catch_up: called where an inode is of
        no snapshot shown so far, since another worker of the mount may have followed a refresh sooner.

        Raises NotFound, SnapshotDamaged.
        """
        self.spec = spec
        self.single = spec.is_single  # is one dataset the root itself?
        self.names: dict[bytes, int] = {}  # dataset name -> slot of the snapshot shown
        self.root_changed_ns = now_ns()  # unix time in nanoseconds at which `names` last changed
        self._now_ns = now_ns
        self._catch_up = catch_up
        self._by_slot: dict[int, Snapshot] = {}  # all snapshots ever shown
        self._slots: dict[tuple[str, str], int] = {}  # (dataset name, snapshot id) -> slot
        wanted = wanted_datasets(spec, datasets)
        # Datasets that the SPEC names at one of their snapshots, and which so do not follow refreshes.
        self._pinned = [dataset for dataset in wanted if not spec.follows(dataset.name)]
        self._show(wanted)
        self._root_slot = next(iter(self.names.values())) if self.single else 0

    def update(self, datasets: Sequence[DatasetView]) -> None:
        """Follow datasets that were added, refreshed or removed."""
        if not self.single:
            self._show(self._pinned + [dataset for dataset in datasets if self.spec.follows(dataset.name)])

    def catch_up(self) -> None:
        """Show what any worker of the mount has heard of. To be called before a mount of several datasets lists them.

        The kernel keeps a listing for as long as the directory's time stays the same. If one worker answered with the
        new time and another one with the old listing, the kernel would keep that, and hide a dataset until the next
        change.
        """
        self._catch_up()

    def resolve(self, inode: int) -> tuple[Snapshot, int]:
        """Snapshot and entry number. Raises NotFound, also for the root of a mount of several datasets."""
        # `slot_and_entry` written out: every read passes here.
        if inode == ROOT:
            inode = self._root_slot << ENTRY_BITS
        snapshot = self._by_slot.get(inode >> ENTRY_BITS)
        if snapshot is None:
            self._catch_up()
            snapshot = self._by_slot.get(inode >> ENTRY_BITS)
        if snapshot is None:
            raise NotFound(f"inode {inode} belongs to no dataset of this mount")
        return snapshot, inode & ENTRY_MASK

    def sibling(self, inode: int, number: int) -> int:
        """The inode of entry *number* of the snapshot that *inode* belongs to."""
        slot = self._root_slot if inode == ROOT else inode >> ENTRY_BITS
        return ROOT if number == 0 and slot == self._root_slot else (slot << ENTRY_BITS) | number

    def datasets(self) -> list[tuple[bytes, int, Snapshot]]:
        """Name, root inode and snapshot of each dataset, in name order."""
        return [(name, inode_of(slot, 0), self._by_slot[slot]) for name, slot in sorted(self.names.items())]

    def _show(self, datasets: Sequence[DatasetView]) -> None:
        names = {}
        for dataset in datasets:
            slot = self._slot(dataset)
            try:
                self._open(slot, dataset)
            except CachefsError as error:
                # One of several datasets may be gone that was there when the mount began: a worker that starts later
                # takes up again what the mount was told then.
                if self.single:
                    raise
                log.warning("dataset %s is not shown: %s", dataset.name, error)
            else:
                names[dataset.name.encode()] = slot
        if names != self.names:
            self.names = names
            self.root_changed_ns = self._now_ns()

    def _slot(self, dataset: DatasetView) -> int:
        """Each name has its own slot, even where two datasets share a snapshot: a directory inode has one place."""
        slot = self._slots.get((dataset.name, dataset.snapshot))
        if slot is None:
            slot = slot_of(dataset.snapshot)
            while slot in self._slots.values():
                slot = next_slot(slot)
            self._slots[dataset.name, dataset.snapshot] = slot
        return slot

    def _open(self, slot: int, dataset: DatasetView) -> None:
        if slot not in self._by_slot:
            shared = (snapshot for snapshot in self._by_slot.values() if snapshot.id == dataset.snapshot)
            self._by_slot[slot] = next(shared, None) or Snapshot(Path(dataset.path))
