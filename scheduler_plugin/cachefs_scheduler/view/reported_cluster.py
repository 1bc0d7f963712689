"""All nodes as they report themselves: the data behind the service's answers.

`ReportedNode` is the state of one node, and `SnapshotResolver` resolves names of datasets to snapshots, by what the
nodes report. Reports of silent nodes count less as they age.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import numpy as np

from cachefs.observe_messages import MAX_SNAPSHOTS, ClusterMember, NodeReport, SnapshotReport
from cachefs.planning.blocks.presence import SHARDS
from cachefs.planning.scheduling.cluster_facts import ClusterFacts
from cachefs.planning.scheduling.facts import Links, NodeCondition, NodeCopy, NodeFacts, SnapshotFacts
from cachefs_scheduler.config import SchedulerConfig

LATEST: Final = "latest"
log = logging.getLogger(__name__)

# Seconds after which a node is forgotten that no node counts as a member.
MISSING_SECONDS: Final = 600.0
MAX_NODES: Final = 16384
# Bytes per second. Lower rates say nothing of a link or a job, and would give infinite times.
MIN_RATE: Final = 1.0
# New snapshots until the next search for vanished ones.
_SEARCH_AFTER: Final = 64


@dataclass(slots=True)
class ReportedNode:
    """A node, by its scheduler name."""

    name: str
    id: str
    host: str
    control_port: int
    zone: str = ""
    # The state according to other members: joining, active, draining or away.
    member_state: str = ""
    # The last report, without its snapshots, which are in `snapshots`; None: none yet.
    report: NodeReport | None = None
    snapshots: dict[str, SnapshotReport] = field(default_factory=dict)
    # Monotonic seconds of the last report; None: never.
    reported_at: float | None = None
    # Why there are no reports; empty if there are.
    problem: str = ""
    # Monotonic seconds since when no node counts it as a member; None: it is a member.
    missing_since: float | None = None

    def merge_report(self, report: NodeReport, now: float) -> None:
        """Merge a report. Raises ValueError if it names more snapshots, over successive reports, than a node can
        have."""
        if report.full:
            self.snapshots.clear()
        if len(self.snapshots.keys() | {snapshot.id for snapshot in report.snapshots}) > MAX_SNAPSHOTS:
            raise ValueError(f"it names more than {MAX_SNAPSHOTS:,} snapshots")
        self.snapshots.update((snapshot.id, snapshot) for snapshot in report.snapshots)
        self.report = msgspec.structs.replace(report, snapshots=[])
        self.reported_at, self.problem = now, ""

    @property
    def state(self) -> NodeCondition:
        """The state for scoring."""
        state = self.report.state if self.report is not None and self.reported_at is not None else self.member_state
        if state == "draining":
            # A draining node has left once it is silent as well: nodes of a static list stay members.
            return "away" if self.problem and self.member_state == "away" else "draining"
        return "away" if state == "away" or self.missing_since is not None or self.report is None else "up"

    def facts(self, region: str, origin_rate: float, peer_rate: float) -> NodeFacts:
        """Return the facts for scoring. Rates: of the node's links in bytes per second; 0: unknown. Raises ValueError
        for an invalid report."""
        report = self.report
        if report is None:
            return NodeFacts(self.name, self.zone, region, "away")
        copies = {one.id: _copy(one) for one in self.snapshots.values() if one.memory or one.ssd}
        names: dict[str, list[str]] = {}
        for job in report.jobs:
            names.setdefault(job.snapshot, []).append(job.name)
        facts = NodeFacts(
            self.name,
            self.zone,
            region,
            self.state,
            capacity=report.capacity,
            used=report.used,
            needed=sum(copy.bytes for name, copy in copies.items() if copy.pinned or name in names),
            origin_rate=origin_rate,
            peer_rate=peer_rate,
            copies=copies,
            jobs={snapshot: len(its) for snapshot, its in names.items()},
            names=names,
        )
        load = report.load
        return replace(
            facts, demand=load.demand, received=load.received + load.fetched, fetched=load.fetched, given=load.given
        )


def _copy(report: SnapshotReport) -> NodeCopy:
    shards = np.frombuffer(report.shards, np.uint8) if len(report.shards) == SHARDS else None
    return NodeCopy(report.memory, report.ssd, shards, pinned=report.pinned)


class SnapshotResolver:
    """Counts nodes per dataset and snapshot, so that look-ups do not depend on the number of nodes."""

    def __init__(self) -> None:
        # By dataset: for how many nodes each snapshot is the current one.
        self._current: dict[str, Counter[str]] = {}
        self._of_node: dict[str, dict[str, str]] = {}

    def replace_node(self, node: str, snapshots: Iterable[SnapshotReport]) -> None:
        """Replace the snapshots of a node."""
        current = {name: snapshot.id for snapshot in snapshots for name in snapshot.datasets}
        before = self._of_node.get(node, {})
        if current == before:
            return
        self._change_counts(before, -1)
        self._change_counts(current, 1)
        self._of_node[node] = current

    def remove_node(self, node: str) -> None:
        """Remove a node."""
        self._change_counts(self._of_node.pop(node, {}), -1)

    def _change_counts(self, current: Mapping[str, str], change: int) -> None:
        for name, snapshot in current.items():
            counted = self._current.setdefault(name, Counter())
            counted[snapshot] += change
            if not counted[snapshot]:
                del counted[snapshot]
            if not counted:
                del self._current[name]

    def resolve(self, spec: str) -> str | None:
        """Resolve NAME, NAME@latest or NAME@SNAPSHOT (its first digits). While nodes differ, the snapshot that is
        current on most nodes wins; None if no node knows it."""
        name, _, wanted = spec.partition("@")
        counted = self._current.get(name, Counter())
        found = [one for one in counted if wanted in ("", LATEST) or one.startswith(wanted)]
        return max(found, key=lambda one: (counted[one], one), default=None)

    def dataset_names(self) -> list[str]:
        """Return all dataset names, sorted."""
        return sorted(self._current)

    def current_snapshots(self) -> Mapping[str, str]:
        """Return the snapshot of each dataset."""
        return {name: found for name in self._current if (found := self.resolve(name)) is not None}


def dataset_name(spec: str) -> str:
    """Return the name in NAME@SNAPSHOT."""
    return spec.partition("@")[0]


class ReportedCluster:
    """The state of all nodes, by scheduler name. Used on the event loop."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._names = {ours: theirs for theirs, ours in config.names.items()}  # cachefs name -> scheduler name
        self.nodes: dict[str, ReportedNode] = {}
        links = config.links
        self.cluster = ClusterFacts(
            Links(origin=float(links.origin), zone=float(links.zone), region=float(links.region))
        )
        self.datasets = SnapshotResolver()
        # Called with the name of a node that has reported, or is gone.
        self.listeners: list[Callable[[str], None]] = []
        self._peaks: dict[str, tuple[float, float]] = {}  # by zone: highest rates of a node
        self._has_warned_full = False
        self._known_snapshots: set[str] = set()  # ids of snapshots that the cluster knows
        self._next_search_size = 0  # number of snapshots at which to search for vanished ones

    def __iter__(self) -> Iterator[ReportedNode]:
        return iter(list(self.nodes.values()))

    # --- members -------------------------------------------------------------------------------------------

    def update_members(self, members: Mapping[str, ClusterMember], *, complete: bool = True) -> None:
        """Record these members, by id. complete: there are no others."""
        now = time.monotonic()
        present = set()
        for member in members.values():
            name = self._names.get(member.name, member.name)
            node = self.nodes.get(name)
            if node is None:
                if len(self.nodes) >= MAX_NODES:
                    self._warn_full()
                    continue
                node = self.nodes[name] = ReportedNode(name, member.id, member.host, member.control_port)
                log.info("node %s at %s:%d", name, member.host, member.control_port)
            node.id, node.host, node.control_port = member.id, member.host, member.control_port
            node.member_state, node.missing_since, node.zone = member.state, None, member.zone
            present.add(name)
        for name, node in list(self.nodes.items()) if complete else ():
            if name in present:
                continue
            node.missing_since = node.missing_since if node.missing_since is not None else now
            if now - node.missing_since > MISSING_SECONDS:
                self._forget(name)

    def _warn_full(self) -> None:
        if not self._has_warned_full:
            log.warning("there are more than %d nodes; the others are left out", MAX_NODES)
        self._has_warned_full = True

    def _forget(self, name: str) -> None:
        log.info("node %s is gone", name)
        del self.nodes[name]
        self.datasets.remove_node(name)
        if name in self.cluster:
            self.cluster.remove_node(name)
        self._notify_listeners(name)

    # --- reports -------------------------------------------------------------------------------------------

    def merge_report(self, node: ReportedNode, report: NodeReport) -> None:
        """Record a node's report. Raises ValueError for an invalid report."""
        now = time.monotonic()
        node.merge_report(report, now)
        if report.zone:
            node.zone = report.zone
        if report.snapshots or report.full:
            self.datasets.replace_node(node.name, node.snapshots.values())
            for snapshot in report.snapshots:
                self._record_size(snapshot.id, snapshot.total, snapshot.blocks, counted=bool(snapshot.shards))
        links = self._config.links
        origin, peer = (rate if rate >= MIN_RATE else 0.0 for rate in self._peak_rates(node.zone, report))
        region = self._config.regions.get(node.zone, "")
        self.cluster.update_node(node.facts(region, links.node_origin or origin, links.node or peer), now)
        self._notify_listeners(node.name)

    def note_failure(self, node: ReportedNode, why: str) -> None:
        """Record that a node did not answer."""
        if node.problem != why:
            log.warning("node %s at %s:%d: %s", node.name, node.host, node.control_port, why)
        node.problem = why

    def _record_size(self, snapshot: str, total: int, blocks: int, *, counted: bool) -> None:
        """Record a snapshot's size. A node that holds nothing of a snapshot has not counted its blocks."""
        if counted or self.cluster.snapshot_facts(snapshot) is None:
            self.cluster.add_snapshot(SnapshotFacts(snapshot, total, blocks))
            self._known_snapshots.add(snapshot)

    def forget_unknown(self, wanted: Collection[str]) -> None:
        """Forget snapshots that no node has, as after each refresh of a dataset, except *wanted*. Call periodically;
        the search runs only after _SEARCH_AFTER snapshots have arrived."""
        if len(self._known_snapshots) < self._next_search_size:
            return
        there = {one for node in self.nodes.values() for one in node.snapshots}
        for snapshot in self._known_snapshots - there - set(wanted):
            self.cluster.forget_snapshot(snapshot)
            self._known_snapshots.discard(snapshot)
        self._next_search_size = len(self._known_snapshots) + _SEARCH_AFTER

    def _peak_rates(self, zone: str, report: NodeReport) -> tuple[float, float]:
        """Return the known link rates of nodes in this zone. They are shared, since an idle node's rate says nothing of
        its link."""
        origin, peer = self._peaks.get(zone, (0.0, 0.0))
        load = report.load
        self._peaks[zone] = max(0.999 * origin, load.origin_rate), max(0.999 * peer, load.peer_rate)
        return self._peaks[zone]

    def _notify_listeners(self, name: str) -> None:
        for listener in self.listeners:
            listener(name)

    # --- queries -------------------------------------------------------------------------------------------

    def advance_clock(self) -> float:
        """Return the time, and age the reports of silent nodes."""
        now = time.monotonic()
        self.cluster.advance_clock(now)
        return now

    @property
    def has_all_reports(self) -> bool:
        """Return whether every node has reported, or is known not to respond."""
        return all(
            node.reported_at is not None or node.problem or node.member_state == "away" for node in self.nodes.values()
        )

    def report_age(self, name: str) -> float:
        """Return the seconds since the node's last report, or since the clock's epoch if there was none."""
        node = self.nodes.get(name)
        return time.monotonic() - (node.reported_at or 0.0) if node is not None else time.monotonic()

    def cachefs_name(self, name: str) -> str:
        """Return the daemons' name of the node that schedulers call *name*."""
        return self._config.names.get(name, name)

    def average_rank_rate(self, snapshot: str) -> float:
        """Return the average rate of one rank of running jobs on the snapshot, in bytes per second; 0: unknown."""
        ranks, rate = 0, 0.0
        for node in self.nodes.values():
            for job in node.report.jobs if node.report is not None else ():
                if job.snapshot == snapshot and job.rate > 0:
                    ranks, rate = ranks + job.ranks, rate + job.rate
        found = rate / ranks if ranks else 0.0
        return found if found >= MIN_RATE else 0.0
