"""Prefetches snapshots to the nodes of a job, and evicts them from nodes that the job has left."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.observe_messages import CommandKind, NodeCommand
from cachefs.planning.blocks.presence import SHARDS, WHOLE
from cachefs.planning.scheduling.copies import CleaningRule, evictions_for_room
from cachefs_scheduler.duties.job_table import JobTable, KnownJob
from cachefs_scheduler.duties.node_warmups import NodeWarmup, NodeWarmups, divide_shards, warmup_id
from cachefs_scheduler.duties.policies import Policies
from cachefs_scheduler.duties.snapshot_reads import SnapshotReads
from cachefs_scheduler.view.reported_cluster import ReportedCluster, dataset_name

log = logging.getLogger(__name__)

ShardMask = npt.NDArray[np.bool_]
# A shard counts as present from this level (of WHOLE): the missing rest is not worth a command.
_PRESENT_LEVEL: Final = 250


@dataclass(frozen=True, slots=True)
class PrefetchRequest:
    """A request that nodes hold a snapshot."""

    # Dataset as the job named it, and id of the snapshot.
    spec: str
    snapshot: str
    nodes: Sequence[str]
    # The purpose (preload, clone or move), and the job that needs the snapshot.
    purpose: str
    job: str
    # Number of the placement: prevents a second warm-up for the same placement.
    number: int = 0


@dataclass(frozen=True, slots=True)
class _EvictableSnapshots:
    """By snapshot id: clean-up rules of snapshots that no node uses, and dataset names."""

    rules: Mapping[str, CleaningRule]
    names: Mapping[str, str]


class DataPlacement:
    """Sends prefetch and evict commands to nodes. Used on the event loop."""

    def __init__(self, view: ReportedCluster, warmups: NodeWarmups, policies: Policies, reads: SnapshotReads) -> None:
        self._view = view
        self._warmups = warmups
        self._policies = policies
        self._reads = reads

    def prefetch(self, request: PrefetchRequest) -> list[str]:
        """Make nodes hold a snapshot together. Returns the nodes where warm-ups have begun."""
        snapshot, nodes = request.snapshot, request.nodes
        known = [node for node in dict.fromkeys(nodes) if node in self._view.cluster]
        size = self._view.cluster.snapshot_facts(snapshot)
        if not known or size is None:
            return []
        lacking = self.missing_shards(snapshot, known)
        current = self._view.datasets.current_snapshots()
        rules = self._policies.cleanup_rules(current)
        used = self._reads.snapshots_in_use(rules, self._view.advance_clock())
        evictable = _EvictableSnapshots(
            {one: rule for one, rule in rules.items() if one not in used},
            {found: name for name, found in current.items()},
        )
        begun = []
        for node, mask in zip(known, divide_shards(lacking, len(known)), strict=True):
            if not mask.any():  # of 5,000 nodes, all but SHARDS
                continue
            mask = self._make_room(node, snapshot, mask, size.bytes / SHARDS, evictable)
            if not mask.any():
                continue
            name = warmup_id(request.purpose, request.job, node, snapshot, request.number)
            shards = None if mask.all() else mask
            dataset = dataset_name(request.spec)
            if self._warmups.begin_warmup(
                NodeWarmup(name, node, dataset, snapshot, request.purpose, request.job, shards)
            ):
                begun.append(node)
        return begun

    def missing_shards(self, snapshot: str, nodes: Sequence[str]) -> ShardMask:
        """Return a mask of shape (SHARDS,): the shards that none of these nodes has."""
        there = np.zeros(SHARDS, np.int64)
        for node in nodes:
            facts = self._view.cluster.reported_facts(node)
            copy = facts.copies.get(snapshot) if facts is not None else None
            if copy is not None and copy.shards is not None:
                there = np.maximum(there, copy.shards)
        found: ShardMask = there < _PRESENT_LEVEL
        return found

    @property
    def can_send(self) -> bool:
        """Return whether commands can be sent to nodes now."""
        return self._warmups.can_send

    def is_cached_elsewhere(self, snapshot: str, missing: ShardMask, of: str) -> bool:
        """Return whether other nodes have everything that node *of* has. missing: shards that the other nodes do not
        have."""
        facts = self._view.cluster.current_facts(of)
        copy = facts.copies.get(snapshot) if facts is not None else None
        if copy is None:
            return True
        mine = copy.shards if copy.shards is not None else np.full(SHARDS, WHOLE, np.uint8)
        return not bool((missing & (mine > WHOLE - _PRESENT_LEVEL)).any())

    def is_read_on(self, node: str, snapshot: str) -> bool:
        """Return whether a published job or a mount of this node reads the snapshot."""
        return self._reads.is_read_on(node, snapshot, self._view.advance_clock())

    def evict_copy(self, spec: str, snapshot: str, node: str) -> bool:
        """Evict a node's copy unless it is pinned or read on that node. Returns whether the command was sent."""
        facts = self._view.cluster.current_facts(node)
        copy = facts.copies.get(snapshot) if facts is not None else None
        if copy is None or copy.pinned or self.is_read_on(node, snapshot):
            return False
        if self._reads.is_placed(node, snapshot):
            return False
        if not self._warmups.send_command(node, NodeCommand(kind=CommandKind.EVICT, dataset=dataset_name(spec))):
            return False
        log.info("%s: evicting the copy of %s (%d bytes)", node, spec, copy.bytes)
        return True

    def _make_room(
        self, node: str, snapshot: str, mask: ShardMask, shard: float, evictable: "_EvictableSnapshots"
    ) -> ShardMask:
        """Return the shards of *mask* that the node has room for, after evicting what its datasets' rules allow."""
        facts = self._view.cluster.current_facts(node)
        if facts is None:
            return np.zeros(SHARDS, np.bool_)
        needed = int(mask.sum() * shard)
        now = self._view.advance_clock()
        copies = {
            one: replace(copy, idle=max(0.0, now - self._reads.last_use(node, one, now)))
            for one, copy in facts.copies.items()
        }
        facts = replace(facts, copies=copies)
        for eviction in evictions_for_room(facts, needed, evictable.rules, keep=snapshot):
            name = evictable.names[eviction.snapshot]
            log.info("%s: evicting %s: %s", node, name, eviction.reason)
            self._warmups.send_command(node, NodeCommand(kind=CommandKind.EVICT, dataset=name))
        room = max(0, facts.capacity - facts.needed) if facts.capacity else needed
        most = int(room / shard) if shard else SHARDS
        fitting = np.zeros(SHARDS, np.bool_)
        fitting[np.flatnonzero(mask)[:most]] = True
        return fitting


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
                if lacking is not None and self._placement.is_cached_elsewhere(move.snapshot, lacking, node):
                    self._placement.evict_copy(move.dataset, move.snapshot, node)
                    move.left_nodes.discard(node)
            if not move.left_nodes:
                del self._moves[name]
