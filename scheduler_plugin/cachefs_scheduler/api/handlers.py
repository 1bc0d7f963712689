"""Implements each API call: takes and returns message records."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

import msgspec

from cachefs import __version__
from cachefs.errors import Busy, ConfigError, NotFound
from cachefs.observe_messages import CommandKind, NodeCommand
from cachefs.scheduling_messages import (
    CopyStatus,
    DatasetPart,
    DatasetPolicy,
    NodeStatus,
    PolicyList,
    PolicyStatus,
    QueueEntry,
    QueueStatus,
    ScaleRequest,
    ScaleResult,
    SchedulerStatus,
    WarmupStatus,
)
from cachefs_scheduler.api.metrics import cluster_capacity
from cachefs_scheduler.duties.advisor import Advisor
from cachefs_scheduler.duties.data_placement import PrefetchRequest
from cachefs_scheduler.duties.job_table import AdmissionState, KnownJob
from cachefs_scheduler.duties.node_warmups import NodeWarmups
from cachefs_scheduler.view.reported_cluster import ReportedCluster, ReportedNode

# Seconds of work between pauses: kube-scheduler's requests must be answered within 50 ms.
WORK_SECONDS: Final = 0.01
# A node is fresh if its last report is at most this many seconds old.
FRESH_SECONDS: Final = 60.0
MAX_SHOWN: Final = 1000


class YieldPoints:
    """Pauses of one piece of work, which calls `yield_if_due` between its steps. Used on the event loop."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    async def yield_if_due(self) -> None:
        """Pause if WORK_SECONDS have passed. The data that the work reads may change meanwhile."""
        if time.monotonic() - self._since >= WORK_SECONDS:
            await asyncio.sleep(0)
            self._since = time.monotonic()


class ApiHandlers:
    """Implements the API calls. Used on the event loop."""

    def __init__(
        self, view: ReportedCluster, advisor: Advisor, warmups: NodeWarmups, reason_not_leading: Callable[[], str] = str
    ) -> None:
        """reason_not_leading: returns why this replica must not change state (another one leads), or "" if this one
        leads."""
        self._view = view
        self._advisor = advisor
        self._warmups = warmups
        self._reason_not_leading = reason_not_leading
        self._started = time.monotonic()

    def status(self) -> SchedulerStatus:
        ages = {node.name: self._view.report_age(node.name) for node in self._view if node.reported_at is not None}
        found = cluster_capacity(self._view, self._advisor.jobs)
        jobs: dict[str, int] = {}
        for job in self._advisor.jobs:
            jobs[job.state.value] = jobs.get(job.state.value, 0) + 1
        silent = sorted((node.name, node.problem) for node in self._view if node.problem)
        return SchedulerStatus(
            version=__version__,
            uptime=time.monotonic() - self._started,
            nodes=len(self._view.nodes),
            fresh=sum(age <= FRESH_SECONDS for age in ages.values()),
            oldest=max(ages.values(), default=0.0),
            datasets=len(self._view.datasets.dataset_names()),
            jobs=jobs,
            capacity=found.capacity,
            used=found.used,
            needed=found.needed,
            nodes_needed=found.nodes_needed,
            warmups=[
                WarmupStatus(
                    node=one.node, dataset=one.dataset, purpose=one.purpose, job=one.job, state=one.state,
                    blocks=one.blocks, total=one.total, message=one.message,
                )
                for one in list(self._warmups)[-100:]
            ],
            problems=[f"{name}: {problem}" for name, problem in silent[:20]],
        )  # fmt: skip

    def queue(self) -> QueueStatus:
        now = time.monotonic()

        def order(one: KnownJob) -> tuple[bool, str, int, float]:
            return one.state != AdmissionState.WAITING, one.request.dataset, one.queue_position, one.requested_at

        return QueueStatus(
            jobs=[
                QueueEntry(
                    job=job.request.job,
                    dataset=job.request.dataset,
                    user=job.request.user,
                    state=job.state,
                    priority=job.request.priority,
                    seconds=now - job.requested_at,
                    place=job.queue_position,
                    policy=job.request.policy,
                    nodes=list(job.nodes),
                    why=job.why,
                )
                for job in sorted(self._advisor.jobs, key=order)[:MAX_SHOWN]
            ]
        )

    async def nodes(self, dataset: str) -> bytes:
        """Return a NodesStatus as JSON, for one dataset or, if *dataset* is empty, for all. Raises NotFound.

        5,000 nodes with 200 datasets are 37 MB, and take 1.4 s of processor time.
        """
        current = {snapshot: name for name, snapshot in self._view.datasets.current_snapshots().items()}
        if dataset:
            snapshot = self._view.datasets.resolve(dataset)
            if snapshot is None:
                raise NotFound(f"no node knows a dataset {dataset!r}; known: {self._known_datasets()}")
            current = {snapshot: dataset.partition("@")[0]}
        found: list[bytes] = []
        pauses = YieldPoints()
        for name in sorted(self._view.nodes):
            if (node := self._view.nodes.get(name)) is not None:
                found.append(msgspec.json.encode(self._node_status(node, current)))
                await pauses.yield_if_due()
        # The same bytes as encoding one NodesStatus, but with pauses between nodes.
        return b'{"nodes":[' + b",".join(found) + b"]}"

    def _known_datasets(self) -> str:
        names = self._view.datasets.dataset_names()
        return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "") or "none"

    def _node_status(self, node: ReportedNode, current: dict[str, str]) -> NodeStatus:
        report = node.report
        datasets = [
            DatasetPart(name, snapshot.memory + snapshot.ssd, snapshot.total)
            for snapshot in node.snapshots.values()
            if (name := current.get(snapshot.id, "")) and snapshot.memory + snapshot.ssd
        ]
        return NodeStatus(
            name=node.name,
            state=node.state,
            age=self._view.report_age(node.name) if node.reported_at is not None else -1.0,
            capacity=report.capacity if report is not None else 0,
            used=report.used if report is not None else 0,
            zone=node.zone,
            datasets=datasets,
            jobs=len(report.jobs) if report is not None else 0,
            problem=node.problem,
        )

    async def policies(self, dataset: str) -> PolicyList:
        """Return the policy of one dataset or, if *dataset* is empty, of all. Raises NotFound.

        With 5,000 nodes, half of which hold a part of each dataset, one dataset takes 30 ms of processor time.
        """
        names = self._view.datasets.dataset_names()
        if dataset and dataset not in names:
            raise NotFound(f"no node knows a dataset {dataset!r}; known: {self._known_datasets()}")
        found: list[PolicyStatus] = []
        pauses = YieldPoints()
        for name in ([dataset] if dataset else names)[:MAX_SHOWN]:
            found.append(self._policy_status(name))
            await pauses.yield_if_due()
        return PolicyList(datasets=found)

    def _policy_status(self, name: str) -> PolicyStatus:
        snapshot = self._view.datasets.resolve(name) or ""
        size = self._view.cluster.snapshot_facts(snapshot)
        jobs = self._advisor.jobs.readers_of(snapshot)
        return PolicyStatus(
            policy=self._advisor.policies.policy_message(name),
            copies=[
                CopyStatus(nodes=list(one.nodes), held=one.held, jobs=one.jobs)
                for one in self._advisor.queue.copies(snapshot)
            ],
            bytes=size.bytes if size is not None else 0,
            running=sum(job.has_slot for job in jobs),
            waiting=sum(job.state == AdmissionState.WAITING for job in jobs),
        )

    def change_policy(self, request: DatasetPolicy) -> PolicyStatus:
        """Change a dataset's policy. Raises ConfigError, StoreFull, and Busy on a replica that does not lead, since the
        leader would not learn of the change."""
        self._require_leader()
        before = self._advisor.policies.effective_policy(request.dataset).cleanup
        self._advisor.policies.apply_change(request)
        self._advisor.mark_unsaved()
        if before == "pin" and self._advisor.policies.effective_policy(request.dataset).cleanup != "pin":
            snapshot = self._view.datasets.resolve(request.dataset)
            for name, copy in self._view.cluster.holders(snapshot or "").items():
                if copy.pinned:
                    self._warmups.send_command(name, NodeCommand(kind=CommandKind.UNPIN, dataset=request.dataset))
        self._advisor.evaluate_queue()
        return self._policy_status(request.dataset)

    async def scale(self, request: ScaleRequest) -> ScaleResult:
        """Move a job's data, change a dataset's number of copies, or drain a node. Raises NotFound, ConfigError, and
        Busy on a replica that does not lead."""
        self._require_leader()
        wanted = [bool(request.job), bool(request.dataset), bool(request.drain)]
        if sum(wanted) != 1:
            raise ConfigError("name one of: a job with its nodes, a dataset with its number of copies, a node to drain")
        if request.drain:
            return self._drain(request.drain)
        if request.job:
            if self._advisor.jobs.get(request.job) is None:
                raise NotFound(f"no scheduler has reported a job {request.job!r}; see `cachectl sched queue`")
            if not request.nodes:
                raise ConfigError("a job has at least one node; name the job's present nodes")
            unknown = [name for name in request.nodes if name not in self._view.nodes]
            if unknown:
                raise NotFound(f"no node is called {unknown[0]!r}; `cachectl sched status` lists those that are known")
            self._advisor.note_resized(request.job, request.nodes)
            return ScaleResult(text=[f"the data of {request.job} follow it to {', '.join(request.nodes)}"])
        return await self._change_copies(request.dataset, request.copies)

    def _require_leader(self) -> None:
        if why := self._reason_not_leading():
            raise Busy(f"{why}: send the request to the leader (kubectl exec POD -- cachectl sched ...)")

    def _drain(self, node: str) -> ScaleResult:
        if node not in self._view.nodes:
            raise NotFound(f"no node is called {node!r}; `cachectl sched status` lists those that are known")
        if refusal := self._warmups.reason_to_send_nothing():
            raise ConfigError(f"{refusal}; run `cachectl drain` on the node")
        if not self._warmups.send_command(node, NodeCommand(kind=CommandKind.DRAIN)):
            raise Busy(
                f"{node} did not receive the command to drain: too many commands are in progress; try again later"
            )
        return ScaleResult(text=[f"{node} drains; `cachectl drain {node}` shows the progress"])

    async def _change_copies(self, dataset: str, copies: int) -> ScaleResult:
        """Create or release copies until the dataset has *copies* of them. With 5,000 nodes each copy takes 9 ms of
        processor time, so 1,000 copies take 9 s."""
        snapshot = self._view.datasets.resolve(dataset)
        if snapshot is None:
            raise NotFound(f"no node knows a dataset {dataset!r}; known: {self._known_datasets()}")
        if copies < 1:
            raise ConfigError("a dataset has at least one copy; `cachectl evict` removes cached blocks")
        there = self._advisor.queue.copies(snapshot)
        lines = [f"{dataset} has {len(there)} {'copy' if len(there) == 1 else 'copies'} now"]
        taken = {node for copy in there for node in copy.nodes}
        pauses = YieldPoints()
        for number in range(len(there), copies):
            nodes = self._advisor.nodes_for_another_copy(dataset, snapshot, taken)
            if not nodes:
                lines.append("no other nodes have room for another copy")
                break
            begun = self._advisor.placement.prefetch(
                PrefetchRequest(dataset, snapshot, nodes, "clone", f"scale:{dataset}:{number + 1}", int(time.time()))
            )
            taken |= set(nodes)
            if not begun:
                lines.append(f"no prefetch has started on {', '.join(nodes)}; see the log of cachefs-scheduler")
                break
            lines.append(f"another copy is made on {', '.join(begun)}")
            await pauses.yield_if_due()
        for copy in sorted(there, key=lambda one: one.jobs)[: max(0, len(there) - copies)]:
            gone = [node for node in copy.nodes if self._advisor.placement.evict_copy(dataset, snapshot, node)]
            what = "is evicted" if gone else "stays: a job or a mount reads the copy, or the copy is pinned"
            lines.append(f"the copy on {', '.join(copy.nodes)} {what}")
        return ScaleResult(text=lines)
