"""Which inode is which entry of which snapshot.

An inode number is (slot << 40) | entry, where the slot comes from the snapshot's id: the same on every node and in
every process, and different for every snapshot, so that what the kernel caches for an inode never goes stale. Inode 1
is the root of the mount: the root of the one dataset, or a directory of datasets.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from cachefs.errors import CachefsError, NotFound
from cachefs.messages import DatasetView
from cachefs.snapshot import Snapshot

log = logging.getLogger(__name__)

ROOT: Final = 1
ENTRY_BITS: Final = 40
ENTRY_MASK: Final = (1 << ENTRY_BITS) - 1
SLOT_MASK: Final = (1 << 22) - 1
ALL_DATASETS: Final = "all"
# The extended attribute of whatever is in a dataset that names the snapshot shown.
SNAPSHOT: Final = "user.cachefs.snapshot"


def slot_of(snapshot_id: str) -> int:
    """1 .. 2**22: two snapshots hardly ever collide, and inode numbers fit a signed 64-bit integer."""
    return (int(snapshot_id[:8], 16) & SLOT_MASK) + 1


def wanted_datasets(spec: str, datasets: Sequence[DatasetView]) -> list[DatasetView]:
    """The datasets a mount SPEC names: `NAME`, `NAME@SNAPSHOT`, `NAME,NAME...`, or `all`. Raises NotFound."""
    if spec == ALL_DATASETS:
        return list(datasets)
    by_name = {dataset.name: dataset for dataset in datasets}
    found = []
    for part in spec.split(","):
        name, _, snapshot = part.partition("@")
        dataset = by_name.get(name)
        if dataset is None:
            known = ", ".join(sorted(by_name)) or "none yet"
            raise NotFound(f"no dataset named {name!r} (known: {known}); add it with `cachectl dataset add {name} URL`")
        found.append(at_snapshot(dataset, snapshot) if snapshot else dataset)
    return found


def spec_of_url(url: str, datasets: Sequence[DatasetView]) -> str:
    """The name of the dataset at *url*. Raises NotFound."""
    for dataset in datasets:
        if dataset.url == url.rstrip("/"):
            return dataset.name
    raise NotFound(f"no dataset is at {url}; give it a name with `cachectl dataset add NAME {url}`")


def at_snapshot(dataset: DatasetView, snapshot: str) -> DatasetView:
    """The dataset at an older snapshot (given by its first digits), while that is still on this node."""
    paths = list(Path(dataset.path).parent.glob(f"{snapshot}*.snapshot")) if snapshot.isalnum() else []
    if len(paths) != 1:
        known = "no" if not paths else "more than one"
        raise NotFound(f"{known} snapshot {dataset.name}@{snapshot} on this node; it is at {dataset.snapshot} now")
    return msgspec.structs.replace(dataset, snapshot=paths[0].stem, path=str(paths[0]))


class Namespace:
    """The tree a mount shows.

    single: the one dataset is the root itself and stays at the snapshot it was mounted with; otherwise the root lists
    the datasets by name and follows their refreshes. names: dataset name -> slot; root_changed_ns: when that last
    changed. A snapshot once shown stays readable by its inodes. catch_up: called where an inode is of no snapshot shown
    so far, as other workers of the mount may have followed a refresh sooner.
    """

    def __init__(
        self,
        spec: str,
        datasets: Sequence[DatasetView],
        now_ns: Callable[[], int],
        catch_up: Callable[[], None] = lambda: None,
    ) -> None:
        self.spec = spec
        self.single = self.is_single(spec)
        self.names: dict[bytes, int] = {}
        self.root_changed_ns = now_ns()
        self._now_ns = now_ns
        self._catch_up = catch_up
        self._by_slot: dict[int, Snapshot] = {}
        self._slots: dict[tuple[str, str], int] = {}
        wanted = wanted_datasets(spec, datasets)
        self._pinned = [dataset for dataset, part in zip(wanted, spec.split(","), strict=False) if "@" in part]
        self._show(wanted)
        self._root_slot = next(iter(self.names.values())) if self.single else 0

    @staticmethod
    def is_single(spec: str) -> bool:
        return spec != ALL_DATASETS and "," not in spec

    def update(self, datasets: Sequence[DatasetView]) -> None:
        """Follow datasets that were added, refreshed or removed."""
        if self.single:
            return
        wanted = None if self.spec == ALL_DATASETS else set(self.spec.split(","))
        followed = [dataset for dataset in datasets if wanted is None or dataset.name in wanted]
        self._show(self._pinned + followed)

    def resolve(self, inode: int) -> tuple[Snapshot, int]:
        """Snapshot and entry number. Raises NotFound, also for the root of a mount of several datasets."""
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
        return [(name, slot << ENTRY_BITS, self._by_slot[slot]) for name, slot in sorted(self.names.items())]

    def _show(self, datasets: Sequence[DatasetView]) -> None:
        names = {}
        for dataset in datasets:
            slot = self._slot(dataset)
            try:
                self._open(slot, dataset)
            except CachefsError as error:
                # Of several, one may be gone that was there when the mount began, which a later worker hears of again.
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
                slot = slot % (SLOT_MASK + 1) + 1
            self._slots[dataset.name, dataset.snapshot] = slot
        return slot

    def _open(self, slot: int, dataset: DatasetView) -> None:
        if slot not in self._by_slot:
            shared = (snapshot for snapshot in self._by_slot.values() if snapshot.id == dataset.snapshot)
            self._by_slot[slot] = next(shared, None) or Snapshot(Path(dataset.path))
