"""The node's reports to observers: made once a second at most, while an observer asks."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from cachefs.errors import CachefsError
from cachefs.observe_messages import (
    MAX_RATE,
    MAX_SNAPSHOTS,
    MIN_PAUSE_SECONDS,
    NodeLoad,
    NodeReport,
    RunningJob,
    SnapshotReport,
)
from cachefs.planning.blocks.presence import ShardBytes
from cachefs.planning.sequences.plan import Plan
from cachefs.snapshot import Snapshot
from cachefs_cluster.membership.membership import Membership
from cachefs_cluster.reporting.shard_warmups import ShardWarmups
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.jobs.registry import JobRegistry
from cachefs_daemon.jobs.states import JobState
from cachefs_daemon.mounts.registry import MountReadCounts
from cachefs_daemon.reporting.residency import Residency
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.storage import TierUsage

# Seconds in which a peak decays to half: a link that got slower shows within a quarter of an hour. Seconds with less
# than _IN_USE_SHARE of the peak do not count: an unused link is as fast as it was.
HALF_LIFE: Final = 600.0
_IN_USE_SHARE: Final = 0.01
# Seconds over which the present rate is averaged, about.
_AVERAGE_SECONDS: Final = 5.0
log = logging.getLogger(__name__)

# The observers' name in Residency.
OBSERVERS: Final = "observers"
# Seconds without an observer after which this node drops what it has counted for them.
FORGET_SECONDS: Final = 120.0
# Relative changes of rates and of used bytes that are too small to report at once; else a response would be sent every
# second.
_SAME_RATE: Final = 0.2
_SAME_USED: Final = 0.002
# Seconds after which small changes are reported too.
_SMALL_CHANGE_SECONDS: Final = 15.0
_MAX_JOBS: Final = 1024
# Consumers whose rates may be in one sum.
_MAX_READERS: Final = 1 << 16


class RateMeter:
    """One flow of bytes."""

    def __init__(self) -> None:
        self.rate = 0.0  # bytes per second, recently
        self.peak = 0.0  # the most bytes in one second
        self._total = 0
        self._counted_at: float | None = None  # monotonic seconds

    def add_total(self, total: int, now: float) -> None:
        """Record that *total* bytes have come since the start; now: monotonic seconds."""
        if self._counted_at is not None and now > self._counted_at:
            seconds = now - self._counted_at
            rate = max(0, total - self._total) / seconds
            if rate >= _IN_USE_SHARE * self.peak:
                self.peak = max(rate, self.peak * math.exp2(-seconds / HALF_LIFE))
            self.rate += (1 - math.exp(-seconds / _AVERAGE_SECONDS)) * (rate - self.rate)
        self._total, self._counted_at = total, now


class LoadMeter:
    """The flows of a node."""

    def __init__(self) -> None:
        self._fetched, self._received, self._sent = RateMeter(), RateMeter(), RateMeter()

    def add_totals(self, fetched: int, received: int, sent: int, now: float) -> None:
        """Record bytes since the start: from origins, from other nodes, to other nodes."""
        self._fetched.add_total(fetched, now)
        self._received.add_total(received, now)
        self._sent.add_total(sent, now)

    def load(self, demand: float) -> NodeLoad:
        """Return the load. demand: bytes per second that jobs read."""
        return NodeLoad(
            origin_rate=self._fetched.peak,
            peer_rate=self._received.peak,
            fetched=self._fetched.rate,
            received=self._received.rate,
            given=self._sent.rate,
            demand=demand,
        )


@dataclass(frozen=True, slots=True)
class ReportSources:
    """The parts of the node from which reports are made."""

    instance: str
    membership: Membership
    catalog: Catalog
    jobs: JobRegistry
    plan: Plan
    residency: Residency
    warmups: ShardWarmups
    threads: Threads
    usage: Callable[[], list[TierUsage]]
    # Bytes since the start: from origins, from other nodes, to other nodes.
    traffic: Callable[[], tuple[int, int, int]]
    # By id of each mount: its spec and its reads.
    reads: Callable[[], Mapping[str, MountReadCounts]]


class DatasetReadCounts:
    """Counts looks that found new reads of a dataset, at most one in `_SMALL_CHANGE_SECONDS` seconds for each dataset:
    a changed number is reported to observers, and while a mount reads it would change each second."""

    def __init__(self) -> None:
        self._mounts: Mapping[str, MountReadCounts] = {}  # at the last look
        self._counted: dict[str, tuple[int, float]] = {}  # by dataset: looks, and the time of the last one

    def count_new_reads(
        self, reads: Mapping[str, MountReadCounts], datasets: Mapping[str, Collection[str]], now: float
    ) -> None:
        """Count new reads. reads: as ReportSources.reads returns them. datasets: all datasets, with ids of their
        snapshots. now: monotonic seconds."""
        found = [
            (one, _newly_read_snapshots(one, self._mounts.get(mount)))
            for mount, one in reads.items()
            if mount not in self._mounts or one.count > self._mounts[mount].count
        ]
        self._counted = {name: one for name, one in self._counted.items() if name in datasets}
        for name, snapshots in datasets.items() if found else ():
            looks, last = self._counted.get(name, (0, -_SMALL_CHANGE_SECONDS))
            if now - last >= _SMALL_CHANGE_SECONDS and any(_has_read(one, new, name, snapshots) for one, new in found):
                self._counted[name] = looks + 1, now
        self._mounts = reads

    def count_of(self, dataset: str) -> int:
        """Return the number of looks so far that found reads of it."""
        return self._counted.get(dataset, (0, 0.0))[0]


def _newly_read_snapshots(one: MountReadCounts, before: MountReadCounts | None) -> set[str]:
    """Return the ids of the snapshots of which the mount has read files since *before*."""
    known = (before.snapshots if before is not None else None) or {}
    return {snapshot for snapshot, count in (one.snapshots or {}).items() if count > known.get(snapshot, 0)}


def _has_read(one: MountReadCounts, new: set[str], dataset: str, snapshots: Collection[str]) -> bool:
    """Return whether the mount's latest reads, of the snapshots *new*, may be of the dataset that has *snapshots*."""
    if one.spec.is_single or one.snapshots is None:
        return bool(one.count) and one.spec.is_showing(dataset)
    return not new.isdisjoint(snapshots)


class NodeReports:
    """Makes reports while observers ask, and returns changes since a version. Used on the event loop."""

    def __init__(self, sources: ReportSources) -> None:
        self._sources = sources
        self._load = LoadMeter()
        self._reads = DatasetReadCounts()
        self._snapshots: dict[str, SnapshotReport] = {}
        self._changed_at: dict[str, int] = {}  # by snapshot: the version of its last change
        self._gone_at = 0  # the last version in which a snapshot was removed
        self._version = 0
        self._node_report = NodeReport("", "", "", 0, full=True)  # the report without the snapshots
        self._published_at = 0.0  # monotonic seconds of the last version
        self._has_new_version = asyncio.Condition()
        self._requested_at = -FORGET_SECONDS
        self._wake = asyncio.Event()

    @property
    def instance(self) -> str:
        """The daemon's instance: versions of two instances are unrelated."""
        return self._sources.instance

    def note_request(self) -> None:
        """Record that an observer asks."""
        self._requested_at = time.monotonic()
        self._wake.set()

    async def changes_since(self, version: int, seconds: float) -> NodeReport:
        """Return the changes since *version* (0: everything), within *seconds*; an empty report without changes."""
        self.note_request()
        try:
            async with asyncio.timeout(seconds), self._has_new_version:
                await self._has_new_version.wait_for(lambda: self._version > 0 and self._version != version)
        except TimeoutError:
            pass
        self.note_request()
        full = not self._gone_at <= version <= self._version or version == 0
        changed = [one for name, one in self._snapshots.items() if full or self._changed_at[name] > version]
        return msgspec.structs.replace(self._node_report, version=self._version, full=full, snapshots=changed)

    async def run(self) -> None:
        """Make reports as long as the daemon runs."""
        while True:
            if time.monotonic() - self._requested_at > FORGET_SECONDS:
                await self._sources.threads.planning(self._sources.residency.forget, OBSERVERS)
                self._snapshots, self._changed_at, self._gone_at = {}, {}, self._version
                self._wake.clear()
                await self._wake.wait()
            began = time.monotonic()
            try:
                await self._make_report()
            except CachefsError as error:
                log.warning("no new report for observers: %s", error)
            except Exception:
                log.exception("no new report for observers")
            await asyncio.sleep(max(MIN_PAUSE_SECONDS, 4 * (time.monotonic() - began)))

    async def _make_report(self) -> None:
        sources = self._sources
        jobs = self._running_jobs()
        snapshots, names = self._snapshots_to_report(jobs)
        reported = {name for several in names.values() for name in several}
        records = [one.record for one in sources.catalog if one.record.name in reported]
        datasets = {record.name: [snapshot.id for snapshot in record.snapshots] for record in records}
        self._reads.count_new_reads(sources.reads(), datasets, time.monotonic())
        different = await sources.threads.planning(sources.residency.count_changes, OBSERVERS, snapshots)
        usage = await sources.threads.run(sources.usage)
        version = self._version + 1
        changed = self._update_snapshots(snapshots, names, different, version)
        self._load.add_totals(*sources.traffic(), time.monotonic())
        load = self._load.load(sum(job.rate for job in jobs))
        if changed or self._is_worth_reporting(node_report := self._make_node_report(usage, jobs, load)):
            self._node_report = node_report if not changed else self._make_node_report(usage, jobs, load)
            self._published_at = time.monotonic()
            async with self._has_new_version:
                self._version = version
                self._has_new_version.notify_all()

    def _update_snapshots(
        self, snapshots: Mapping[str, Snapshot], names: Mapping[str, list[str]], different: set[str], version: int
    ) -> bool:
        """Update `_snapshots`. Return whether anything is different."""
        changed = False
        for gone in self._snapshots.keys() - snapshots.keys():
            del self._snapshots[gone], self._changed_at[gone]
            self._gone_at, changed = version, True
        for name, snapshot in snapshots.items():
            known = self._snapshots.get(name)
            pinned = self._is_pinned(names[name])
            reads = sum(map(self._reads.count_of, names[name]))
            same = known is not None and (known.datasets, known.pinned, known.reads) == (names[name], pinned, reads)
            if same and name not in different:
                continue
            counted = self._sources.residency.counts_of(name)
            facts = {"datasets": names[name], "pinned": pinned, "reads": reads}
            report = msgspec.structs.replace(_snapshot_report(snapshot, counted), **facts)
            if report != known:
                self._snapshots[name], self._changed_at[name], changed = report, version, True
        return changed

    def _is_pinned(self, datasets: list[str]) -> bool:
        return any(b"" in self._sources.catalog.get(name).record.pins for name in datasets)

    def _snapshots_to_report(self, jobs: list[RunningJob]) -> tuple[dict[str, Snapshot], dict[str, list[str]]]:
        """Return the snapshots to report, those of running jobs first, and the datasets of each."""
        read = {job.snapshot for job in jobs}
        names: dict[str, list[str]] = {}
        found: dict[str, Snapshot] = {}
        datasets = [(one.record.name, one.current) for one in self._sources.catalog if one.current is not None]
        for name, snapshot in sorted(datasets, key=lambda one: (one[1].id not in read, one[0])):
            if snapshot.id in found or len(found) < MAX_SNAPSHOTS:
                found[snapshot.id] = snapshot
                names.setdefault(snapshot.id, []).append(name)
        return found, names

    def _running_jobs(self) -> list[RunningJob]:
        found: dict[tuple[str, str], tuple[int, float]] = {}
        running = {job.name for job in self._sources.jobs if job.state == JobState.RUNNING}
        for consumer in self._sources.jobs.consumers:
            key = consumer.request.job, consumer.snapshot.id
            if consumer.request.job in running:
                ranks, rate = found.get(key, (0, 0.0))
                found[key] = ranks + 1, rate + self._read_rate(consumer.key, consumer.snapshot.id)
        return [RunningJob(name, snapshot, *figures) for (name, snapshot), figures in found.items()][:_MAX_JOBS]

    def _read_rate(self, consumer: str, snapshot: str) -> float:
        """Return the bytes per second that the consumer reads, according to its plan."""
        plan = self._sources.plan
        space = plan.spaces.get(snapshot)
        window = plan.window(consumer, 0, 1) if plan.has_consumer(consumer) else None
        if window is None or space is None or not space.count or not window.period > 0:
            return 0.0
        # A job reports its own rate, which may be nonsense.
        return min(space.bytes / space.count / window.period, MAX_RATE / _MAX_READERS)

    def _make_node_report(self, usage: list[TierUsage], jobs: list[RunningJob], load: NodeLoad) -> NodeReport:
        mine = self._sources.membership.view.own_record
        return NodeReport(
            id=mine.id if mine is not None else "",
            name=mine.name if mine is not None else "",
            instance=self._sources.instance,
            version=0,
            full=False,
            zone=mine.zone if mine is not None else "",
            state=mine.state if mine is not None else "",
            capacity=sum(tier.limit for tier in usage),
            used=sum(tier.used for tier in usage),
            jobs=jobs,
            warmups=self._sources.warmups.reports(),
            load=load,
        )

    def _is_worth_reporting(self, report: NodeReport) -> bool:
        known = self._node_report
        facts, known_facts = ((one.state, one.capacity, one.zone) for one in (report, known))
        if known.instance == "" or facts != known_facts:
            return True
        if [job[:3] for job in map(msgspec.structs.astuple, report.jobs)] != [
            job[:3] for job in map(msgspec.structs.astuple, known.jobs)
        ]:
            return True
        if [(warmup.id, warmup.state) for warmup in report.warmups] != [(one.id, one.state) for one in known.warmups]:
            return True
        small = report.warmups != known.warmups or abs(report.used - known.used) > _SAME_USED * max(report.capacity, 1)
        small = small or any(
            abs(new - old) > _SAME_RATE * max(new, old)
            for new, old in zip(msgspec.structs.astuple(report.load), msgspec.structs.astuple(known.load), strict=True)
        )
        return small and time.monotonic() - self._published_at > _SMALL_CHANGE_SECONDS


def _snapshot_report(snapshot: Snapshot, counted: ShardBytes | None) -> SnapshotReport:
    if counted is None:
        return SnapshotReport(snapshot.id, snapshot.bytes, snapshot.files)
    _, memory, ssd = counted.bytes.sum(axis=1).tolist()
    space = counted.space
    return SnapshotReport(snapshot.id, space.bytes, space.count, [], memory, ssd, counted.shard_parts().tobytes())
