"""Moves data when a job changes its nodes: the new nodes fetch it, and the old nodes are emptied afterwards."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from cachefs_scheduler.duties.book import Book, KnownJob
from cachefs_scheduler.duties.placement import Placement, Wanted
from cachefs_scheduler.duties.policies import Policies
from cachefs_scheduler.view.cluster_view import ClusterView
from cachefs_scheduler.view.dataset_names import dataset_of

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Move:
    """Nodes that a job has left and that still hold its data."""

    dataset: str
    snapshot: str
    left: set[str] = field(default_factory=set)


class Moves:
    """Tracks the nodes that moved jobs have left. Used on the event loop."""

    def __init__(self, view: ClusterView, book: Book, placement: Placement, policies: Policies) -> None:
        self._view = view
        self._book = book
        self._placement = placement
        self._policies = policies
        self._moves: dict[str, _Move] = {}  # by job

    def begin(self, job: KnownJob, left: Sequence[str]) -> None:
        """Start to move the job's data from the nodes *left* to its present nodes."""
        if not job.snapshot:
            return
        self._placement.bring(Wanted(job.ask.dataset, job.snapshot, job.nodes, "move", job.ask.job, job.placement))
        if not self._policies.of(dataset_of(job.ask.dataset)).release:
            return
        move = self._moves.setdefault(job.ask.job, _Move(job.ask.dataset, job.snapshot))
        move.left |= set(left)
        move.left -= set(job.nodes)

    def forget(self, job: str) -> None:
        """Forget a job that has ended. Data on nodes that it left stays there."""
        self._moves.pop(job, None)

    def settle(self) -> None:
        """Evict data from nodes whose blocks other nodes hold by now. Call as nodes report."""
        for name, move in list(self._moves.items()):
            job = self._book.get(name)
            if job is None:
                del self._moves[name]
                continue
            # If another job reads on a node, the copy there belongs to that job now.
            move.left -= {node for one in self._book.of(move.snapshot) for node in one.nodes}
            lacking = self._placement.lacking(move.snapshot, job.nodes) if move.left else None
            for node in sorted(move.left):
                if not self._placement.may_order:
                    return  # later
                if self._placement.is_read_on(node, move.snapshot):
                    continue  # released when those reads end
                if lacking is not None and self._placement.is_elsewhere(move.snapshot, lacking, node):
                    self._placement.release(move.dataset, move.snapshot, node)
                    move.left.discard(node)
            if not move.left:
                del self._moves[name]
