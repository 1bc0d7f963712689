"""The state of one node: its merged reports, and the facts from which scores are computed."""

from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from cachefs.observe_messages import MAX_SNAPSHOTS, NodeReport, SnapshotReport
from cachefs.planning.blocks.shard_bytes import SHARDS
from cachefs.planning.scheduling.facts import NodeCondition, NodeCopy, NodeFacts


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
        if len(self.snapshots.keys() | {one.id for one in report.snapshots}) > MAX_SNAPSHOTS:
            raise ValueError(f"it names more than {MAX_SNAPSHOTS:,} snapshots")
        self.snapshots.update((one.id, one) for one in report.snapshots)
        self.report = msgspec.structs.replace(report, snapshots=[])
        self.reported_at, self.problem = now, ""

    @property
    def state(self) -> NodeCondition:
        """The state for scoring."""
        said = self.report.state if self.report is not None and self.reported_at is not None else self.member_state
        if said == "draining":
            # A draining node has left once it is silent as well: nodes of a static list stay members.
            return "away" if self.problem and self.member_state == "away" else "draining"
        return "away" if said == "away" or self.missing_since is not None or self.report is None else "up"

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
