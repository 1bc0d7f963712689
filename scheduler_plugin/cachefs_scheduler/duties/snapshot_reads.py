"""Records when each snapshot was last read, and which snapshots are in use and must stay.

Nodes of a cluster are homes of blocks that other nodes read, so a read on any node counts for the copies of all nodes.
Reads come from published jobs, from jobs that a scheduler has placed, and from mounts; daemons count reads of mounts
(`SnapshotReport.reads`). Each replica of the service records reads, so that a new leader knows them.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

from cachefs_scheduler.duties.job_table import JobTable
from cachefs_scheduler.view.reported_cluster import ReportedCluster

# Seconds for which a snapshot counts as in use after a daemon has counted reads, or after this service has learnt that
# a daemon did at an unknown time. Daemons count every 15 s.
IN_USE_SECONDS: Final = 60.0

# Arrivals (node, snapshot) whose times are recorded.
MAX_ARRIVALS: int = 200_000


@dataclass(frozen=True, slots=True)
class _ReportedReads:
    """The last report of a node about a snapshot."""

    reads: int
    # Monotonic time when `reads` changed, or was learnt; -IN_USE without reads.
    changed_at: float
    # Whether a part of the snapshot is in the node's tiers.
    is_cached: bool


class SnapshotReads:
    """Tracks last reads and arrivals of snapshots. Used on the event loop. Times are monotonic seconds."""

    def __init__(self, view: ReportedCluster, jobs: JobTable) -> None:
        self._view = view
        self._jobs = jobs
        # By snapshot: last read on any node, or first sight on one.
        self._last_reads: dict[str, float] = {}
        # By node and snapshot: when the snapshot arrived there, if this service observed it.
        self._arrivals: dict[str, dict[str, float]] = {}
        self._arrival_count = 0  # number of arrivals
        self._reported: dict[str, dict[str, _ReportedReads]] = {}  # by node and snapshot
        self._last_changes: dict[str, float] = {}  # by snapshot: the latest `_ReportedReads.changed_at` of all nodes
        self._started_at = view.advance_clock()
        view.listeners.append(self._record_report)

    def note_read(self, snapshot: str, when: float) -> None:
        """Record that any node has read the snapshot."""
        self._last_reads[snapshot] = max(when, self._last_reads.get(snapshot, when))

    def note_arrival(self, node: str, snapshot: str, when: float) -> None:
        """Record the arrival of a copy, which the node may keep as if the copy had been read then."""
        came = self._arrivals.setdefault(node, {})
        if snapshot not in came:
            if self._arrival_count >= MAX_ARRIVALS:
                return
            self._arrival_count += 1
        came[snapshot] = when

    def note_job_reads(self, snapshots: Collection[str], now: float) -> None:
        """Record the jobs' present reads, and forget all but these snapshots. Call every few seconds."""
        self._last_reads = {one: when for one, when in self._last_reads.items() if one in snapshots}
        self._last_changes = {one: when for one, when in self._last_changes.items() if one in snapshots}
        for one in self._read_by_jobs(snapshots):
            self.note_read(one, now)

    def last_use(self, node: str, snapshot: str, now: float) -> float:
        """Return the later of the last read on any node and the copy's arrival on this node; *now* if both are
        unknown."""
        known = (self._last_reads.get(snapshot), self._arrivals.get(node, {}).get(snapshot))
        return max((when for when in known if when is not None), default=now)

    def snapshots_in_use(self, snapshots: Collection[str], now: float) -> set[str]:
        """Return the snapshots that a job or a mount of any node reads, or is about to read.

        Scans all jobs, up to 10,000. A service that has just begun returns all snapshots until it has heard all nodes.
        """
        if now - self._started_at < IN_USE_SECONDS and not self._view.has_all_reports:
            return set(snapshots)
        mounted = {one for one in snapshots if now - self._last_changes.get(one, -IN_USE_SECONDS) < IN_USE_SECONDS}
        return mounted | self._read_by_jobs(snapshots)

    def is_read_on(self, node: str, snapshot: str, now: float) -> bool:
        """Return whether a published job or a mount of this node reads the snapshot."""
        facts, counted = self._view.cluster.reported_facts(node), self._reported.get(node, {}).get(snapshot)
        is_mounted = counted is not None and now - counted.changed_at < IN_USE_SECONDS
        return is_mounted or (facts is not None and bool(facts.jobs.get(snapshot)))

    def is_placed(self, node: str, snapshot: str) -> bool:
        """Return whether a job that reads the snapshot was placed on the node, even if the job has not begun."""
        return any(node in one.nodes for one in self._jobs.readers_of(snapshot))

    def all_records(self) -> Iterator[tuple[str, str, float]]:
        """Yield (node, snapshot, time) of each arrival, and of each last read with "" as the node."""
        yield from [("", *one) for one in self._last_reads.items()]
        yield from [(node, *one) for node, came in self._arrivals.items() for one in came.items()]

    def restore(self, node: str, snapshot: str, when: float) -> None:
        """Restore one record that `all_records` yielded before a restart."""
        if node:
            self.note_arrival(node, snapshot, when)
        else:
            self.note_read(snapshot, when)

    def _read_by_jobs(self, snapshots: Collection[str]) -> set[str]:
        placed = {job.snapshot for job in self._jobs if job.nodes}
        return {snapshot for snapshot in snapshots if snapshot in placed or self._view.cluster.is_read(snapshot)}

    def _record_report(self, name: str) -> None:
        """Record a node's report of reads and copies, or the node's removal."""
        node = self._view.nodes.get(name)
        if node is None:
            self._reported.pop(name, None)
            self._arrival_count -= len(self._arrivals.pop(name, {}))
            return
        now = self._view.advance_clock()
        before, after = self._reported.get(name), {}
        for snapshot in node.snapshots.values():
            is_cached = bool(snapshot.memory or snapshot.ssd)
            known = before.get(snapshot.id) if before is not None else None
            changed = (
                known.changed_at
                if known is not None and known.reads == snapshot.reads
                else now
                if snapshot.reads
                else -IN_USE_SECONDS
            )
            after[snapshot.id] = _ReportedReads(snapshot.reads, changed, is_cached)
            self._last_changes[snapshot.id] = max(changed, self._last_changes.get(snapshot.id, changed))
            if known is not None and known.reads < snapshot.reads:
                self.note_read(snapshot.id, now)
            if is_cached:
                self._last_reads.setdefault(snapshot.id, now)
                if before is not None and (known is None or not known.is_cached):
                    self.note_arrival(name, snapshot.id, now)
        self._reported[name] = after
        came = self._arrivals.get(name, {})
        for gone in [one for one in came if one not in after or not after[one].is_cached]:
            del came[gone]
            self._arrival_count -= 1
