"""The tree that a mount shows: maps inodes to entries of snapshots (see cachefs.inodes for the numbers)."""

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from cachefs.errors import CachefsError, NotFound
from cachefs.inodes import ENTRY_BITS, ENTRY_MASK, ROOT, inode_of, next_slot, slot_of
from cachefs.messages import DatasetView
from cachefs.mount_spec import MountSpec
from cachefs.snapshot import SUFFIX, Snapshot

log = logging.getLogger(__name__)

# Seconds without use after which a snapshot that is no longer shown is closed; longer than any read may wait. Where
# more than MAX_OLD_SNAPSHOTS of them are open, the rest is closed sooner.
IDLE_SECONDS: Final = 300.0
MAX_OLD_SNAPSHOTS: Final = 16
# Most snapshots, shown now or earlier, whose inodes stay valid.
MAX_KNOWN_SLOTS: Final = 4096


def named_datasets(spec: MountSpec, datasets: Sequence[DatasetView]) -> list[DatasetView]:
    """Return the datasets that *spec* names, in its order, each at the snapshot to be shown. Raises NotFound."""
    if spec.is_all:
        return list(datasets)
    by_name = {dataset.name: dataset for dataset in datasets}
    found = []
    for part in spec.datasets:
        dataset = by_name.get(part.name)
        if dataset is None:
            known = ", ".join(sorted(by_name)) or "none yet"
            remedy = f"add it with `cachectl dataset add {part.name} URL`"
            if part.name.startswith("/"):  # mount(8) turns a name that exists in the current directory into a path
                remedy = "in /etc/fstab write cachefs:NAME"
            raise NotFound(f"no dataset named {part.name!r} (known: {known}); {remedy}")
        found.append(at_snapshot(dataset, part.digits) if part.digits else dataset)
    return found


def shown_datasets(spec: MountSpec, first: Sequence[DatasetView], now: Sequence[DatasetView]) -> list[DatasetView]:
    """Return the datasets that a mount of *spec* shows. first: datasets of the node at mount time; now: at present.

    Raises NotFound.
    """
    if spec.is_fixed:
        return named_datasets(spec, first)
    pinned = [dataset for dataset in named_datasets(spec, first) if not spec.is_following(dataset.name)]
    return pinned + [dataset for dataset in now if spec.is_following(dataset.name)]


def at_snapshot(dataset: DatasetView, digits: str) -> DatasetView:
    """Return the dataset at the snapshot on this node whose id begins with *digits*. Raises NotFound."""
    paths = list(Path(dataset.path).parent.glob(f"{digits}*{SUFFIX}")) if digits.isalnum() else []
    if len(paths) != 1:
        known = "no" if not paths else "more than one"
        raise NotFound(f"{known} snapshot {dataset.name}@{digits} on this node; it is at {dataset.snapshot} now")
    return msgspec.structs.replace(dataset, snapshot=paths[0].stem, path=str(paths[0]))


class SnapshotSlot(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot that is or was shown, and the slot of its inodes."""

    slot: int
    # The dataset. Two datasets that share a snapshot have separate slots: a directory inode has one path.
    name: str
    # Id of the snapshot, and path of its file.
    snapshot: str
    path: str


class Namespace:
    """The tree of one mount.

    A mount of one dataset shows the dataset's root as its own root. Such a mount stays at its first snapshot, or
    (`latest`) shows the new snapshot after a refresh: names in the root then lead to other inodes, and known inodes
    keep meaning files of their own snapshot. Any other mount lists its datasets by name in its root and follows their
    refreshes. The inodes of a snapshot that was once shown stay readable while the snapshot's file exists; the daemon
    keeps the file for as long as the mount lives.

    Snapshots are opened on first use. Snapshots that are no longer shown are closed after IDLE_SECONDS without use.
    """

    def __init__(
        self,
        spec: MountSpec,
        datasets: Sequence[DatasetView],
        now_ns: Callable[[], int],
        catch_up: Callable[[], None] = lambda: None,
    ) -> None:
        """datasets: all datasets of the node; now_ns: unix time in nanoseconds; catch_up: called for an inode of an
        unknown snapshot, since another worker of the mount may have followed a refresh sooner.

        Raises NotFound, SnapshotDamaged.
        """
        self.spec = spec
        self.is_single = spec.is_single  # whether the root is that of one dataset
        self.has_changing_root = not spec.is_fixed  # whether names in the root may come to mean other inodes
        self._root_slot = 0  # of the snapshot whose root is the mount's root; 0 where there is none
        self.names: dict[bytes, int] = {}  # dataset name -> slot of the snapshot shown
        self.root_changed_ns = now_ns()  # unix time in nanoseconds at which `names` last changed
        self._now_ns = now_ns
        self._catch_up = catch_up
        self._by_slot: dict[int, Snapshot] = {}  # open snapshots that are shown
        self._old: OrderedDict[int, tuple[Snapshot, float]] = OrderedDict()  # other open ones; last use (monotonic)
        self._known: dict[int, SnapshotSlot] = {}  # all that were ever shown, the latest last
        self._slots: dict[tuple[str, str], int] = {}  # (dataset name, snapshot id) -> slot, of `_known`
        wanted = named_datasets(spec, datasets)
        # Datasets that the SPEC names with a snapshot, and which therefore do not follow refreshes.
        self._pinned = [dataset for dataset in wanted if not spec.is_following(dataset.name)]
        self._show_datasets(wanted)
        if self.is_single:
            self._snapshot_of_slot(self._root_slot)

    def update_datasets(self, datasets: Sequence[DatasetView]) -> None:
        """Follow added, refreshed and removed datasets."""
        if self.has_changing_root:
            self._show_datasets(
                self._pinned + [dataset for dataset in datasets if self.spec.is_following(dataset.name)]
            )

    @property
    def snapshot(self) -> str:
        """Id of the snapshot that a mount of one dataset shows; empty for a mount of several."""
        return self._known[self._root_slot].snapshot if self.is_single else ""

    def known_slots(self) -> list[SnapshotSlot]:
        """Return all known slots, for `adopt_slots` in a worker that starts later."""
        return list(self._known.values())

    def adopt_slots(self, slots: Sequence[SnapshotSlot], datasets: Sequence[DatasetView], changed_ns: int) -> None:
        """Adopt the slots that another worker of the mount has shown, then `update_datasets`. changed_ns: that worker's
        `root_changed_ns`."""
        self._known = {slot.slot: slot for slot in slots}
        self._slots = {(slot.name, slot.snapshot): slot.slot for slot in slots}
        self.update_datasets(datasets)
        self.root_changed_ns = changed_ns

    def catch_up(self) -> None:
        """Follow all views that any worker has heard of. To be called before a mount of several datasets lists them.

        The kernel keeps a listing while the directory's time stays the same. If one worker answered with the new time
        and another one with the old listing, the kernel would keep the old listing, and hide a dataset until the next
        change.
        """
        self._catch_up()

    def resolve(self, inode: int) -> tuple[Snapshot, int]:
        """Return snapshot and entry number. Raises NotFound, also for the root of a mount of several datasets, and the
        errors of opening the snapshot."""
        # `slot_and_entry` written out: every read passes here.
        if inode == ROOT:
            inode = self._root_slot << ENTRY_BITS
        snapshot = self._by_slot.get(inode >> ENTRY_BITS)
        if snapshot is None:
            snapshot = self._snapshot_of_slot(inode >> ENTRY_BITS)
        return snapshot, inode & ENTRY_MASK

    def path(self, inode: int) -> bytes:
        """Return the path of an inode, relative to the mount's root; after a refresh, the path in the inode's snapshot.
        Raises as `resolve` does."""
        snapshot, number = self.resolve(inode)
        name = b"" if self.is_single else self._known[inode >> ENTRY_BITS].name.encode() + b"/"
        return name + snapshot.path(number)

    def inode_beside(self, inode: int, number: int) -> int:
        """Return the inode of entry *number* in the snapshot of *inode*."""
        slot = self._root_slot if inode == ROOT else inode >> ENTRY_BITS
        return ROOT if number == 0 and slot == self._root_slot else (slot << ENTRY_BITS) | number

    def roots(self) -> list[tuple[bytes, int]]:
        """Return name and root inode of each dataset, in name order."""
        return [(name, inode_of(slot, 0)) for name, slot in sorted(self.names.items())]

    def datasets(self) -> list[tuple[bytes, int, Snapshot]]:
        """Return name, root inode and snapshot of each dataset that can be opened, in name order."""
        found = []
        for name, inode in self.roots():
            try:
                found.append((name, inode, self.resolve(inode)[0]))
            except CachefsError as error:
                log.warning("%s", error)
        return found

    def close_idle(self) -> None:
        """Close snapshots that are neither shown nor recently used, and drop those whose files have changed (see
        `Snapshot.is_replaced`). They are opened anew on use."""
        for slot in [slot for slot, one in self._by_slot.items() if one.is_replaced()]:
            del self._by_slot[slot]
        for slot in [slot for slot, (one, _) in self._old.items() if one.is_replaced()]:
            del self._old[slot]
        self._close_old(MAX_OLD_SNAPSHOTS, time.monotonic() - IDLE_SECONDS)

    def _close_old(self, max_open: int, since: float) -> None:
        """Close snapshots not shown, except the *max_open* last used ones among those used *since* that time."""
        while self._old:
            slot, (snapshot, used) = next(iter(self._old.items()))
            if used > since and len(self._old) <= max_open:
                return
            del self._old[slot]
            if not any(other is snapshot for other in self._open_snapshots()):
                snapshot.close()

    def _open_snapshots(self) -> Iterator[Snapshot]:
        yield from self._by_slot.values()
        for snapshot, _ in self._old.values():
            yield snapshot

    def _snapshot_of_slot(self, number: int) -> Snapshot:
        """Return the snapshot of a slot, opened if necessary. Raises NotFound for an unknown slot."""
        if number not in self._known:
            self._catch_up()
        slot = self._known.get(number)
        if slot is None:
            raise NotFound(f"slot {number} of inodes belongs to no dataset of this mount")
        snapshot = self._by_slot.get(number) or self._old.pop(number, (None, 0.0))[0]
        if snapshot is None:
            snapshot = next((other for other in self._open_snapshots() if other.id == slot.snapshot), None)
        if snapshot is None:
            snapshot = self._open_snapshot(slot)
        if number in self.names.values():
            self._by_slot[number] = snapshot
        else:
            self._old[number] = snapshot, time.monotonic()
        return snapshot

    def _open_snapshot(self, slot: SnapshotSlot) -> Snapshot:
        try:
            return Snapshot(Path(slot.path))
        except NotFound:
            raise
        except CachefsError:
            if not self._old:
                raise
            self._close_old(0, math.inf)  # the limit of open files may be reached
            return Snapshot(Path(slot.path))

    def _show_datasets(self, datasets: Sequence[DatasetView]) -> None:
        names = {}
        for dataset in datasets:
            # A worker that starts later begins with the views of the mount's start, and one of several datasets may be
            # gone since. A dataset whose file exists but cannot be opened now is shown all the same.
            if not self.spec.is_fixed and not (dataset.path and Path(dataset.path).exists()):
                log.warning("dataset %s is not shown: it has no snapshot file %s", dataset.name, dataset.path)
                continue
            slot = self._slot_of_dataset(dataset)
            self._known.pop(slot, None)
            self._known[slot] = SnapshotSlot(slot, dataset.name, dataset.snapshot, dataset.path)
            names[dataset.name.encode()] = slot
        if self.is_single and not names:
            return  # the last snapshot stays readable
        if names != self.names:
            self.names = names
            self._root_slot = next(iter(names.values())) if self.is_single else 0
            self.root_changed_ns = self._now_ns()
            for slot in self._by_slot.keys() - names.values():
                self._old[slot] = self._by_slot.pop(slot), time.monotonic()
        self._forget_oldest()

    def _slot_of_dataset(self, dataset: DatasetView) -> int:
        slot = self._slots.get((dataset.name, dataset.snapshot))
        if slot is None:
            slot = slot_of(dataset.snapshot)
            while slot in self._known:
                slot = next_slot(slot)
            self._slots[dataset.name, dataset.snapshot] = slot
        return slot

    def _forget_oldest(self) -> None:
        """Forget the oldest slots. All workers do so after the same views, so that they agree on later slots."""
        shown = set(self.names.values())
        for slot in [slot for slot in self._known if slot not in shown][: max(0, len(self._known) - MAX_KNOWN_SLOTS)]:
            old = self._known.pop(slot)
            del self._slots[old.name, old.snapshot]
            self._old.pop(slot, None)
