"""Moves data when a job changes its nodes: the new nodes fetch it, and the old nodes are emptied afterwards."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from cachefs_scheduler.duties.data_placement import DataPlacement, PrefetchRequest
from cachefs_scheduler.duties.job_table import JobTable, KnownJob
from cachefs_scheduler.duties.policies import Policies
from cachefs_scheduler.view.reported_cluster import ReportedCluster
from cachefs_scheduler.view.snapshot_resolver import dataset_name

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Move:
    """Nodes that a job has left and that still hold its data."""

    dataset: str
    snapshot: str
    left_nodes: set[str] = field(default_factory=set)


class DataMoves:
    """Tracks the nodes that moved jobs have left. Used on the event loop."""

    def __init__(self, view: ReportedCluster, jobs: JobTable, placement: DataPlacement, policies: Policies) -> None:
        self._view = view
        self._jobs = jobs
        self._placement = placement
        self._policies = policies
        self._moves: dict[str, _Move] = {}  # by job

    def begin_move(self, job: KnownJob, left: Sequence[str]) -> None:
        """Start to move the job's data from the nodes *left* to its present nodes."""
        if not job.snapshot:
            return
        self._placement.prefetch(
            PrefetchRequest(job.request.dataset, job.snapshot, job.nodes, "move", job.request.job, job.placement)
        )
        if not self._policies.effective_policy(dataset_name(job.request.dataset)).release:
            return
        move = self._moves.setdefault(job.request.job, _Move(job.request.dataset, job.snapshot))
        move.left_nodes |= set(left)
        move.left_nodes -= set(job.nodes)

    def forget_job(self, job: str) -> None:
        """Forget a job that has ended. Data on nodes that it left stays there."""
        self._moves.pop(job, None)

    def evict_left_nodes(self) -> None:
        """Evict data from nodes whose blocks other nodes hold by now. Call as nodes report."""
        for name, move in list(self._moves.items()):
            job = self._jobs.get(name)
            if job is None:
                del self._moves[name]
                continue
            # If another job reads on a node, the copy there belongs to that job now.
            move.left_nodes -= {node for one in self._jobs.readers_of(move.snapshot) for node in one.nodes}
            lacking = self._placement.missing_shards(move.snapshot, job.nodes) if move.left_nodes else None
            for node in sorted(move.left_nodes):
                if not self._placement.can_send:
                    return  # later
                if self._placement.is_read_on(node, move.snapshot):
                    continue  # released when those reads end
                if lacking is not None and self._placement.is_held_elsewhere(move.snapshot, lacking, node):
                    self._placement.evict_copy(move.dataset, move.snapshot, node)
                    move.left_nodes.discard(node)
            if not move.left_nodes:
                del self._moves[name]
