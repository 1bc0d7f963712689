"""A view of nodes that say what tests want, and the service's duties with orders that go nowhere."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from cachefs.observe_messages import (
    ClusterMember,
    CommandKind,
    NodeCommand,
    NodeCommandResult,
    NodeReport,
    RunningJob,
    SnapshotReport,
)
from cachefs_scheduler.config import DatasetSection, ObservedClusterSection, SchedulerConfig
from cachefs_scheduler.duties.advisor import Advisor
from cachefs_scheduler.duties.job_table import JobTable
from cachefs_scheduler.duties.node_warmups import NodeWarmups
from cachefs_scheduler.duties.policies import CopyCleaner, Policies
from cachefs_scheduler.view.observer_client import ObserverClient
from cachefs_scheduler.view.reported_cluster import ReportedCluster

SIZE = 1 << 30


@dataclass
class Daemons(ObserverClient):
    """They do what they are told."""

    orders: list[tuple[str, NodeCommand]] = field(default_factory=list)
    # Orders of this kind are carried out when it is set.
    slow: CommandKind | None = None
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def send_command(self, host: str, port: int, order: NodeCommand) -> NodeCommandResult:
        if order.kind == self.slow:
            await self.go.wait()
        self.orders.append((host, order))
        return NodeCommandResult()

    def of(self, kind: CommandKind) -> list[tuple[str, str]]:
        """Nodes and datasets of orders of a kind."""
        return [(host, order.dataset) for host, order in self.orders if order.kind == kind]


class Duties:
    """All of them, on one view."""

    def __init__(self, **datasets: DatasetSection) -> None:
        config = SchedulerConfig(cluster=ObservedClusterSection(nodes=("127.0.0.1:7380",)), datasets=datasets)
        self.daemons = Daemons()
        self.view = ReportedCluster(config)
        self.book = JobTable(10_000, 900.0)
        self.policies = Policies(config)
        self.warmings = NodeWarmups(self.view, self.daemons, str)
        self.advisor = Advisor(self.view, self.book, self.policies, self.warmings, 0.9)
        self.cleaning = CopyCleaner(self.view, self.policies, self.warmings, self.advisor.reads)

    def say(
        self, node: str, held: Mapping[str, float], *, state: str = "active", jobs: tuple[str, ...] = (), room: int = 8,
        named: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """A node has these parts of datasets, whose snapshots are called as they are; and room for so many."""
        members = {
            name: ClusterMember(id=name, name=name, host=name, control_port=1) for name in (*self.view.nodes, node)
        }
        self.view.update_members(members)
        running = {**{one: one for one in jobs}, **(named or {})}  # name of a job -> what it reads
        snapshots = [
            SnapshotReport(
                id=f"s-{name}", total=SIZE, blocks=256, datasets=[name], ssd=int(SIZE * part),
                shards=bytes([255] * round(256 * part) + [0] * (256 - round(256 * part))) if part else b"",
            )
            for name, part in held.items()
        ]  # fmt: skip
        self.view.merge_report(
            self.view.nodes[node],
            NodeReport(
                node, node, "1", 1, full=True, state=state, capacity=room * SIZE, snapshots=snapshots,
                used=sum(one.ssd for one in snapshots),
                jobs=[RunningJob(name, f"s-{one}", 1, 0.0) for name, one in running.items()],
            ),
        )  # fmt: skip
