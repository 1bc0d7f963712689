"""The mounts of this node, as their reports tell: who is there, what they read, and whether they still live."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec
import psutil

from cachefs.messages import MountReport, MountView
from cachefs.mount_spec import MountSpec
from cachefs.mount_table import mounted_paths
from cachefs_daemon.datasets.records import DatasetRecord

# A mount that lives reports at least every 10 s, if the daemon answers.
SILENCE: Final = 30.0
# Seconds from its start within which a mount has asked for its datasets.
STARTING: Final = 5.0


class MountRecord(msgspec.Struct, frozen=True):
    """What outlives the daemon. born: when the process started (unix seconds)."""

    id: str
    mountpoint: str
    spec: str
    pid: int
    born: float


@dataclass(slots=True)
class _Mount:
    """report: the last, of whichever worker; workers: the last of each; past: counters of workers that have ended.

    seen: monotonic time of the last report; born: start time of its process, which tells it from a reused pid; 0 where
    we cannot see the process, as in a container of its own.
    """

    report: MountReport
    seen: float
    born: float
    workers: dict[int, MountReport] = field(default_factory=dict)
    past: Counter[str] = field(default_factory=Counter)

    @property
    def spec(self) -> MountSpec:
        return MountSpec.parse(self.report.spec)

    def take(self, report: MountReport) -> None:
        before = self.workers.pop(report.worker, None)
        if before is not None and before.worker_pid != report.worker_pid:
            self.past.update(before.counters)
        if report.closing:
            self.past.update(report.counters)
        else:
            self.workers[report.worker] = report
        self.report = report
        self.seen = time.monotonic()

    def counters(self) -> Counter[str]:
        total = Counter(self.past)
        for report in self.workers.values():
            total.update(report.counters)
        return total


class MountRegistry:
    """Used from the event loop only. unsaved: has `records` changed? For who saves them to reset."""

    def __init__(self) -> None:
        self.unsaved = False
        self._mounts: dict[str, _Mount] = {}
        self._past: Counter[str] = Counter()

    def records(self) -> list[MountRecord]:
        """Those whose process we see: of others nobody could tell later whether they are still there."""
        known = ((mount.report, mount.born) for mount in self._mounts.values() if mount.born)
        return [MountRecord(one.id, one.mountpoint, one.spec, one.pid, born) for one, born in known]

    def restore(self, records: Iterable[MountRecord]) -> None:
        """Those of an earlier daemon that still live count as having reported now."""
        for one in records:
            report = MountReport(id=one.id, mountpoint=one.mountpoint, spec=one.spec, pid=one.pid)
            mount = _Mount(report, time.monotonic(), one.born)
            if one.born and _lives(mount):
                self._mounts.setdefault(one.id, mount)
            else:
                self.unsaved = True

    def report(self, report: MountReport) -> None:
        for other in [other for other in self._mounts.values() if other.report.mountpoint == report.mountpoint]:
            if other.report.id != report.id and not _lives(other):
                self._forget(other)
        mount = self._mounts.get(report.id)
        if mount is None:
            mount = self._mounts[report.id] = _Mount(report, time.monotonic(), _born(report.pid))
            self.unsaved = True
        mount.take(report)
        if not mount.workers:
            self._forget(mount)

    def views(self) -> list[MountView]:
        now = time.monotonic()
        return [
            MountView(
                id=mount.report.id,
                mountpoint=mount.report.mountpoint,
                spec=mount.report.spec,
                pid=mount.report.pid,
                alive=_lives(mount),
                seconds_since_report=now - mount.seen,
                counters=dict(mount.counters()),
            )
            for mount in self._mounts.values()
        ]

    def counters(self) -> Counter[str]:
        """Sums over all mounts, those that have ended included."""
        total = Counter(self._past)
        for mount in self._mounts.values():
            total.update(mount.counters())
        return total

    def lives(self, mount: str) -> bool:
        """Is there a living mount with this id?"""
        known = self._mounts.get(mount)
        return known is not None and _lives(known)

    def using(self, dataset: str) -> MountReport | None:
        """A living mount that was made for *dataset* by name. (One of `all` follows what comes and goes.)"""
        for mount in self._mounts.values():
            if mount.spec.names(dataset) and _lives(mount):
                return mount.report
        return None

    def shows(self, mount: str, snapshot: str, datasets: Iterable[DatasetRecord]) -> bool:
        """Are files of *snapshot* among those that the mount with this id shows now? One that has not reported yet may
        show anything."""
        known = self._mounts.get(mount)
        if known is None:
            return True
        if known.spec.is_single:
            (part,) = known.spec.parts
            shown = (_generations(one, part.digits or "", known.born) for one in datasets if one.name == part.name)
            return any(snapshot in generations for generations in shown)
        wanted = (one.snapshots[:1] for one in datasets if known.spec.shows(one.name))
        return any(current.id == snapshot for newest in wanted for current in newest)

    def may_use(self, snapshot: str, replaced: float) -> bool:
        """May a living mount still read *snapshot*, which is not current since the unix time *replaced*?

        A mount stays at what it found when it started, or at what its spec names.
        """
        return any(
            mount.born <= replaced or mount.spec.pins(snapshot) for mount in self._mounts.values() if _lives(mount)
        )

    def forget_gone(self) -> None:
        """Drop mounts whose process and mount point are gone; a dead mount point stays, to be seen and recovered."""
        mounted = mounted_paths()
        for mount in [mount for mount in self._mounts.values() if not _lives(mount)]:
            if mount.report.mountpoint not in mounted:
                self._forget(mount)

    def _forget(self, mount: _Mount) -> None:
        self._past.update(mount.counters())
        del self._mounts[mount.report.id]
        self.unsaved = True


def _generations(dataset: DatasetRecord, digits: str, born: float) -> list[str]:
    """Snapshots at which a mount of one dataset may be that was started at the unix time *born* (0: unknown): those
    that begin with *digits*, or else the one that was current then, or became so while it started."""
    if digits or not born:
        return [known.id for known in dataset.snapshots if known.id.startswith(digits)]
    later = [known for known in dataset.snapshots if not known.replaced or known.replaced >= born]
    return [
        known.id
        for known, older in zip(later, [*later[1:], None], strict=True)
        if older is None or older.replaced <= born + STARTING
    ]


def _born(pid: int) -> float:
    try:
        born: float = psutil.Process(pid).create_time()
        return born
    except psutil.Error:
        return 0.0


def _lives(mount: _Mount) -> bool:
    if not mount.born:
        return time.monotonic() - mount.seen < SILENCE
    try:
        process = psutil.Process(mount.report.pid)
        return bool(process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - mount.born) < 1)
    except psutil.Error:
        return False
