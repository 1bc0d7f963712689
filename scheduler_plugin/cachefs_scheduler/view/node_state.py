"""What is known of one node: its reports put together, and the facts that scores are made from."""

from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from cachefs.observe_messages import MOST_SNAPSHOTS, NodeReport, SnapshotReport
from cachefs.planning.blocks.shard_bytes import SHARDS
from cachefs.planning.scheduling.facts import Copy, NodeFacts, State


@dataclass(slots=True)
class NodeState:
    """A node, by its name for schedulers."""

    name: str
    id: str
    host: str
    control_port: int
    zone: str = ""
    # As members say of it: joining, active, draining or away.
    member_state: str = ""
    # The last report; its `snapshots` are in `snapshots`. None: none came yet.
    report: NodeReport | None = None
    snapshots: dict[str, SnapshotReport] = field(default_factory=dict)
    # Monotonic seconds when it was heard last; None: never.
    heard: float | None = None
    # Why nothing comes of it; empty where something does.
    problem: str = ""
    # Monotonic seconds since when no node counts it as a member; None: one does.
    missing: float | None = None

    def take(self, report: NodeReport, now: float) -> None:
        """The node has said this. Raises ValueError where it names more snapshots, one report after the other, than a
        node has."""
        if report.full:
            self.snapshots.clear()
        if len(self.snapshots.keys() | {one.id for one in report.snapshots}) > MOST_SNAPSHOTS:
            raise ValueError(f"it names more than {MOST_SNAPSHOTS:,} snapshots")
        self.snapshots.update((one.id, one) for one in report.snapshots)
        self.report = msgspec.structs.replace(report, snapshots=[])
        self.heard, self.problem = now, ""

    @property
    def state(self) -> State:
        """As scores see it."""
        said = self.report.state if self.report is not None and self.heard is not None else self.member_state
        if said == "draining":
            # It has left where it answers nobody any more: those in a list stay members.
            return "away" if self.problem and self.member_state == "away" else "draining"
        return "away" if said == "away" or self.missing is not None or self.report is None else "up"

    def facts(self, region: str, origin_rate: float, peer_rate: float) -> NodeFacts:
        """The rates are those of its links, in bytes a second; 0: nobody knows. Raises ValueError for a report that
        makes no sense."""
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


def _copy(report: SnapshotReport) -> Copy:
    shards = np.frombuffer(report.shards, np.uint8) if len(report.shards) == SHARDS else None
    return Copy(report.memory, report.ssd, shards, pinned=report.pinned)
