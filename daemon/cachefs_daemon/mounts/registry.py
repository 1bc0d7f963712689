"""The mounts of this node, from their reports: liveness, contents and reads."""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from cachefs.messages import MountReport, MountView
from cachefs.mount_spec import MountSpec
from cachefs.mount_table import mount_points, mount_points_of
from cachefs_daemon.datasets.records import DatasetRecord, SnapshotRecord
from cachefs_daemon.runtime.boot_clock import BootMoment, birth_of

# A living mount reports at least every 10 s, if the daemon answers.
SILENT_SECONDS: Final = 30.0
# Seconds from its start within which a mount has requested its datasets.
START_SECONDS: Final = 5.0
# The kernel has an entry here for each file system without a disk, as long as anything holds that file system.
_DEVICES: Final = Path("/sys/class/bdi")


class MountRecord(msgspec.Struct, frozen=True):
    """The part of a mount's state that is kept on disk."""

    id: str
    mountpoint: str
    spec: str
    pid: int
    born: BootMoment  # when its process started
    connection: int = 0  # the kernel's number of the FUSE connection; 0 where the mount has not reported it


@dataclass(slots=True, eq=False)
class _Mount:
    report: MountReport  # the last one of any worker
    reported_at: float  # monotonic seconds of that report
    # When its process started, which distinguishes it from another process with the same pid; None where the daemon
    # cannot see the process, as in a container of its own.
    process_started: BootMoment | None
    detached_at: float = math.inf  # monotonic seconds at which it was first seen to be mounted nowhere
    workers: dict[int, MountReport] = field(default_factory=dict)  # the last report of each living worker
    # Counters of workers that have ended.
    ended_counters: Counter[str] = field(default_factory=Counter)
    # The counters of its workers before their first report to this daemon.
    counters_before_start: Counter[str] = field(default_factory=Counter)
    # By id of a snapshot: the number of reports with reads of it; None for a mount of an earlier release.
    snapshots: Counter[str] | None = None

    @property
    def spec(self) -> MountSpec:
        return MountSpec.parse(self.report.spec)

    def add_report(self, report: MountReport, instance: str) -> None:
        """Process a report of a worker. instance: of this daemon."""
        before = self.workers.pop(report.worker, None)
        if (before is None or before.worker_pid != report.worker_pid) and report.heard_from not in ("", instance):
            self.counters_before_start.update(report.counters)
        if before is not None and before.worker_pid != report.worker_pid:
            self.ended_counters.update(before.counters)
        if report.closing:
            self.ended_counters.update(report.counters)
        else:
            self.workers[report.worker] = report
        if report.snapshots_read is not None:
            self.snapshots = Counter() if self.snapshots is None else self.snapshots
            self.snapshots.update(report.snapshots_read)
        self.report = report
        self.reported_at = time.monotonic()

    def counters(self) -> Counter[str]:
        """Return the sums over all workers, including those that have ended."""
        total = Counter(self.ended_counters)
        for report in self.workers.values():
            total.update(report.counters)
        return total

    def counters_since_start(self) -> Counter[str]:
        """Return the sums of `counters`, since this daemon started."""
        total = self.counters()
        total.subtract(self.counters_before_start)
        return total


@dataclass(frozen=True, slots=True)
class MountReadCounts:
    """The spec of a mount, and the reads that reached it: not those that the kernel answers from its page cache."""

    spec: MountSpec
    count: int
    # By id of a snapshot: the number of reports with reads of it; None for a mount of an earlier release.
    snapshots: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class ShownDataset:
    """A dataset that a living mount names."""

    name: str
    mountpoint: str
    # True where the mount shows the same snapshot after a refresh, although its spec names none.
    stays: bool
    # Ids of the snapshots that it shows.
    snapshots: Sequence[str]


class MountRegistry:
    """All mounts of the node. Used from the event loop only."""

    def __init__(self, instance: str = "", on_change: Callable[[], None] = lambda: None) -> None:
        """instance: of this daemon. on_change: called when a mount appears, ends, or shows another snapshot."""
        self._instance = instance
        self._on_change = on_change
        self._has_unsaved = False  # `records` has changed since the last save
        self._mounts: dict[str, _Mount] = {}  # by id
        self._ended_counters: Counter[str] = Counter()  # counters of mounts that have ended

    def records(self) -> list[MountRecord]:
        """Return the records of mounts whose process the daemon sees. For others, a later daemon could not tell whether
        they live."""
        known = ((mount.report, mount.process_started) for mount in self._mounts.values())
        return [
            MountRecord(one.id, one.mountpoint, one.spec, one.pid, born, one.connection)
            for one, born in known
            if born is not None
        ]

    def restore(self, records: Iterable[MountRecord]) -> None:
        """Restore the mounts of the previous daemon that still live, as if they had reported now."""
        for one in records:
            report = MountReport(
                id=one.id, mountpoint=one.mountpoint, spec=one.spec, pid=one.pid, connection=one.connection
            )
            mount = _Mount(report, time.monotonic(), one.born)
            if _is_alive(mount):
                self._mounts.setdefault(one.id, mount)
            else:
                self._has_unsaved = True

    def add_report(self, report: MountReport) -> bool:
        """Process a report of a mount. Return whether this daemon learns of the mount for the first time."""
        for other in [other for other in self._mounts.values() if other.report.mountpoint == report.mountpoint]:
            if other.report.id != report.id and not _is_alive(other):
                self._forget_mount(other)
        mount = self._mounts.get(report.id)
        if mount is None:
            mount = self._mounts[report.id] = _Mount(report, time.monotonic(), birth_of(report.pid))
            self._has_unsaved = True
        self._has_unsaved |= mount.report.connection != report.connection
        is_new = not mount.workers
        if is_new or mount.report.snapshot != report.snapshot:
            self._on_change()
        mount.add_report(report, self._instance)
        if not mount.workers:
            self._forget_mount(mount)
        return is_new

    def views(self) -> list[MountView]:
        """Return all mounts, as users see them. A mount without a process is shown while its mount point is still
        there: a failed attempt, and a mount that has just ended, are no dead mounts."""
        now = time.monotonic()
        gone = self._ended_mounts()
        return [
            MountView(
                id=mount.report.id,
                mountpoint=mount.report.mountpoint,
                spec=mount.report.spec,
                pid=mount.report.pid,
                alive=_is_alive(mount),
                seconds_since_report=now - mount.reported_at,
                counters=dict(mount.counters()),
                detached=_is_detached(mount),
                snapshot=mount.report.snapshot,
                version=mount.report.version,
                ending=mount.report.ending,
            )
            for mount in self._mounts.values()
            if mount not in gone
        ]

    def counters(self) -> Counter[str]:
        """Return the sums over all mounts since this daemon started, including those that have ended."""
        total = Counter(self._ended_counters)
        for mount in self._mounts.values():
            total.update(mount.counters_since_start())
        return total

    def mark_unsaved(self) -> None:
        """Have the state saved again."""
        self._has_unsaved = True

    def take_unsaved(self) -> bool:
        """Return whether the state has changed since the last call: it is then to be saved."""
        unsaved, self._has_unsaved = self._has_unsaved, False
        return unsaved

    def read_counts(self) -> dict[str, MountReadCounts]:
        """Return the spec and the reads of each mount, by id."""
        return {
            name: MountReadCounts(
                mount.spec, mount.counters()["read"], None if mount.snapshots is None else dict(mount.snapshots)
            )
            for name, mount in self._mounts.items()
        }

    @property
    def ids(self) -> Collection[str]:
        """Ids of all mounts, including dead ones."""
        return self._mounts.keys()

    def is_alive(self, mount: str) -> bool:
        """Return whether there is a living mount with this id."""
        known = self._mounts.get(mount)
        return known is not None and _is_alive(known)

    def is_mounted(self, mount: str) -> bool:
        """Return whether the mount with this id is at its mount point now: it may be starting, or ending."""
        known = self._mounts.get(mount)
        return known is not None and _is_mounted(known)

    def seconds_detached(self, mount: str) -> float:
        """Return for how many seconds the mount with this id has lived on, for its open files, without a mount point.

        Return 0 for a mount that has a mount point, and for one that ends since nothing has it any more.
        """
        known = self._mounts.get(mount)
        if known is None or not _is_detached(known) or not _is_kernel_holding(known):
            return 0.0
        return max(0.0, time.monotonic() - known.detached_at)

    def mount_of(self, dataset: str) -> MountReport | None:
        """Return a living mount whose spec names *dataset*. (A mount of `all` follows datasets as they come and go.)"""
        for mount in self._mounts.values():
            if mount.spec.has_named(dataset) and _is_alive(mount):
                return mount.report
        return None

    def shown_datasets(self, find: Callable[[str], DatasetRecord | None]) -> Iterator[ShownDataset]:
        """Yield what living mounts show of the datasets that they name. (A mount of `all` names none, and shows current
        snapshots only.) find: returns the dataset of a name."""
        for mount in self._mounts.values():
            if not _is_alive(mount):
                continue
            for name in dict.fromkeys(part.name for part in mount.spec.datasets):
                if (dataset := find(name)) is not None:
                    stays = mount.spec.is_fixed and mount.spec.datasets[0].digits is None
                    yield ShownDataset(name, mount.report.mountpoint, stays, _shown_snapshots(mount, dataset))

    def shows(self, mount: str, snapshot: str, datasets: Iterable[DatasetRecord]) -> bool:
        """Return whether the mount with this id shows files of *snapshot* now. A mount that has not reported yet may
        show any."""
        known = self._mounts.get(mount)
        if known is None:
            return True
        spec = known.spec  # parsed once: this is called for every reader in every step of every pusher
        if spec.is_fixed:
            (part,) = spec.datasets
            shown = (
                _generations(one, part.digits or "", known.process_started) for one in datasets if one.name == part.name
            )
            return any(snapshot in generations for generations in shown)
        newest_snapshots = (dataset.snapshots[:1] for dataset in datasets if spec.is_showing(dataset.name))
        return any(current.id == snapshot for newest in newest_snapshots for current in newest)

    def may_read(self, snapshot: SnapshotRecord) -> bool:
        """Return whether a living mount may still read *snapshot*, which is no longer current.

        A mount stays at the snapshots that it found when it started, or that its spec names.
        """
        return any(
            mount.process_started is None
            or not snapshot.replaced_before(mount.process_started, unknown=False)
            or mount.spec.has_pinned(snapshot.id)
            for mount in self._mounts.values()
            if _is_alive(mount)
        )

    def forget_ended(self) -> None:
        """Forget mounts whose process and mount point are gone; a dead mount point stays, to be seen and recovered."""
        for mount in self._ended_mounts():
            self._forget_mount(mount)

    def _ended_mounts(self) -> list[_Mount]:
        dead = [mount for mount in self._mounts.values() if not _is_alive(mount)]
        if not dead:
            return []
        # A mount point that another mount has replaced belongs to that one.
        left = {str(point.path) for point in mount_points()}
        left -= {mount.report.mountpoint for mount in self._mounts.values() if mount not in dead}
        return [mount for mount in dead if mount.report.mountpoint not in left]

    def _forget_mount(self, mount: _Mount) -> None:
        self._ended_counters.update(mount.counters_since_start())
        del self._mounts[mount.report.id]
        self._has_unsaved = True
        self._on_change()


def _shown_snapshots(mount: _Mount, dataset: DatasetRecord) -> list[str]:
    """Return the ids of the snapshots of *dataset* that a mount naming it shows."""
    spec = mount.spec
    if spec.is_single and mount.report.snapshot:
        return [mount.report.snapshot]
    found: list[str] = []
    for part in spec.datasets:
        if part.name == dataset.name and (part.digits or spec.is_fixed):
            found += _generations(dataset, part.digits or "", mount.process_started)
        elif part.name == dataset.name:
            found += [known.id for known in dataset.snapshots[:1]]
    return found


def _generations(dataset: DatasetRecord, digits: str, born: BootMoment | None) -> list[str]:
    """Return the ids of the snapshots that a mount of one dataset may show. They begin with *digits*; without digits it
    is the one that was current when the mount was *born* (None: unknown), or became current while it started."""
    if digits or born is None:
        return [known.id for known in dataset.snapshots if known.id.startswith(digits)]
    later = [known for known in dataset.snapshots if not known.replaced_before(born, unknown=True)]
    return [
        known.id
        for known, older in zip(later, [*later[1:], None], strict=True)
        if older is None or older.replaced_before(born.after(START_SECONDS), unknown=True)
    ]


def _is_detached(mount: _Mount) -> bool:
    """Return whether the mount still serves, but is mounted nowhere.

    A mount that starts is not mounted yet; its workers report when it is.
    """
    if not (mount.report.worker_pid or mount.report.connection) or _is_mounted(mount) or not _is_alive(mount):
        return False
    mount.detached_at = min(mount.detached_at, time.monotonic())
    return True


def _is_kernel_holding(mount: _Mount) -> bool:
    """Return whether the kernel still has the mount, for open files or another mount namespace; True where unknown."""
    connection = mount.report.connection
    return not connection or (_DEVICES / f"0:{connection}").exists()


def _is_mounted(mount: _Mount) -> bool:
    """Return whether the process of the mount sees it at its mount point, and not another mount there; True where the
    daemon cannot see the process."""
    if mount.process_started is None:
        return True
    try:
        seen = mount_points_of(mount.report.pid)
    except OSError:  # it has ended
        return False
    connection = mount.report.connection
    return any(str(point.path) == mount.report.mountpoint and connection in (0, point.connection) for point in seen)


def _is_alive(mount: _Mount) -> bool:
    if mount.process_started is None:
        return time.monotonic() - mount.reported_at < SILENT_SECONDS
    return birth_of(mount.report.pid) == mount.process_started
