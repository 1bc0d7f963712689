"""Placement policies of simulated jobs: without hints, by node labels, and with cachefs's hints."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from cachefs.planning.scheduling.assignment import assign_ranks
from cachefs.planning.scheduling.cluster_facts import ClusterFacts
from cachefs.planning.scheduling.facts import JobRequest, Links, NodeCopy, NodeFacts, SnapshotFacts
from cachefs_bench.scheduling.simulated_reads import IN, ORIGIN, OUT, SSD, SimulatedReads
from cachefs_bench.scheduling.workload import SimulatedCaches, SimulatedJob, SimulationShape

# Seconds without news after which a node reports anyway.
_SILENT: Final = 20.0
# Free ranks of each node: shape (nodes,), int64.
Slots = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PolicyInput:
    """The state that a policy may use."""

    shape: SimulationShape
    caches: SimulatedCaches
    reading: SimulatedReads
    # Of each node: shape (nodes,), int64.
    zones: npt.NDArray[np.int64]
    regions: npt.NDArray[np.int64]


class NodeSelectionPolicy(Protocol):
    """Chooses nodes for jobs for which there are slots enough."""

    def choose_nodes(self, job: SimulatedJob, free: Slots, now: float) -> tuple[int, ...]:
        """Return a node for each rank."""


class RandomPolicy:
    """Chooses random free slots."""

    def __init__(self, world: PolicyInput, seed: int) -> None:
        self._chance = np.random.default_rng(seed)

    def choose_nodes(self, job: SimulatedJob, free: Slots, now: float) -> tuple[int, ...]:
        free_slots = np.repeat(np.arange(len(free)), free)
        return tuple(self._chance.choice(free_slots, job.ranks, replace=False).tolist())


class LeastLoadedPolicy:
    """Chooses the node with most free slots for each rank, like kube-scheduler's default (NodeResourcesFit with
    LeastAllocated); random among equal ones."""

    def __init__(self, world: PolicyInput, seed: int) -> None:
        self._chance = np.random.default_rng(seed)
        self._slots = world.shape.slots

    def choose_nodes(self, job: SimulatedJob, free: Slots, now: float) -> tuple[int, ...]:
        left, chosen = free.copy(), []
        for _ in range(job.ranks):
            scores = self.node_scores(job, left) + 1e-6 * self._chance.random(len(left))
            chosen.append(int(np.where(left > 0, scores, -np.inf).argmax()))
            left[chosen[-1]] -= 1
        return tuple(chosen)

    def node_scores(self, job: SimulatedJob, free: Slots) -> npt.NDArray[np.float64]:
        """Return scores from 0 to 100: shape (nodes,)."""
        return 100.0 * free / self._slots


class LabelPolicy(LeastLoadedPolicy):
    """Prefers nodes (weight 100), zones (50) and regions (10) that are labelled with the dataset.

    The sum is scaled to 0 to 100 and counts twice as much as LeastAllocated, kube-scheduler's default weights
    (NodeAffinity 2, NodeResourcesFit 1).
    """

    def __init__(self, world: PolicyInput, seed: int, *, least: float) -> None:
        """least: part of a dataset from which a node is labelled with it."""
        super().__init__(world, seed)
        self._world, self._least = world, least

    def node_scores(self, job: SimulatedJob, free: Slots) -> npt.NDArray[np.float64]:
        world = self._world
        there = world.caches.held[:, job.dataset] >= self._least
        in_zone = np.isin(world.zones, world.zones[there])
        in_region = np.isin(world.regions, world.regions[there])
        labels = 100.0 * there + 50.0 * in_zone + 10.0 * in_region
        most = float(labels.max())
        return super().node_scores(job, free) + (2 * 100 * labels / most if most else 0.0)


class HintPolicy:
    """Chooses by cachefs's estimates: nodes that together hold the data, among equal ones those with most free
    slots."""

    def __init__(self, world: PolicyInput, seed: int) -> None:
        self._world = world
        shape = world.shape
        self.cluster = ClusterFacts(Links(shape.origin, shape.zone_link, shape.region_link))
        # Last report of each node, its time, and the node's copies.
        self._seen = np.full((shape.nodes, 2 * shape.datasets + 4), -1, np.int64)
        self._reported_at = np.full(shape.nodes, -np.inf)
        self._names: dict[tuple[int, str], list[str]] = {}
        self._copies: list[dict[str, NodeCopy]] = [{} for _ in range(shape.nodes)]
        for dataset, size in enumerate(world.caches.sizes.tolist()):
            self.cluster.add_snapshot(SnapshotFacts(str(dataset), size, max(1, size >> 22)))

    def choose_nodes(self, job: SimulatedJob, free: Slots, now: float) -> tuple[int, ...]:
        self.update_reports(now)
        order = np.argsort(-free, kind="stable")
        free_slots = {str(node): int(free[node]) for node in order[free[order] > 0].tolist()}
        return tuple(
            int(name) for name in assign_ranks(job_request(job), list(free_slots), self.cluster, free_slots=free_slots)
        )

    def update_reports(self, now: float) -> None:
        """Update the view from reports of the nodes."""
        self.cluster.advance_clock(now)
        caches, taken = self._world.caches, self._world.reading.used_rates
        kept = np.where(caches.held > 1e-6, caches.held * caches.sizes, 0.0).astype(np.int64)
        seen = np.concatenate([kept, caches.readers, taken.T.astype(np.int64)], axis=1)
        # A node without news reports only every _SILENT seconds, before its last report would count less.
        changed = (seen != self._seen).any(axis=1) | (now - self._reported_at > _SILENT)
        self._seen = seen
        self._reported_at[changed] = now
        self._names = self._running()
        for node in np.flatnonzero(changed).tolist():
            self.cluster.update_node(self._facts(node, kept[node]), now)

    def _running(self) -> dict[tuple[int, str], list[str]]:
        """Return the names of readers by node and dataset."""
        found: dict[tuple[int, str], list[str]] = {}
        for run in self._world.reading.runs:
            name = f"copy to {run.nodes[0]}" if run.is_copy else str(run.job.number)
            for node in set(run.nodes):
                found.setdefault((node, str(run.job.dataset)), []).append(name)
        return found

    def _facts(self, node: int, kept: npt.NDArray[np.int64]) -> NodeFacts:
        world, shape = self._world, self._world.shape
        caches, taken = world.caches, world.reading.used_rates[:, node]
        before = self._copies[node]
        # The cluster treats an identical object as an unchanged copy.
        copies = self._copies[node] = {
            name: copy if (copy := before.get(name)) is not None and copy.ssd == size else NodeCopy(0, size)
            for name, size in ((str(dataset), int(kept[dataset])) for dataset in np.flatnonzero(kept).tolist())
        }
        jobs = {str(dataset): int(caches.readers[node, dataset]) for dataset in np.flatnonzero(caches.readers[node])}
        return NodeFacts(
            str(node),
            zone=str(world.zones[node]),
            region=str(world.regions[node]),
            capacity=shape.capacity,
            used=sum(copy.bytes for copy in copies.values()),
            origin_rate=shape.origin_rate,
            peer_rate=shape.peer_rate,
            tier_rate=shape.tier_rate,
            demand=float(taken[SSD]),
            received=float(taken[IN]),
            fetched=float(taken[ORIGIN]),
            given=float(taken[OUT]),
            copies=copies,
            jobs=jobs,
            names={dataset: self._names[node, dataset] for dataset in jobs},
        )


def job_request(job: SimulatedJob) -> JobRequest:
    return JobRequest(str(job.number), str(job.dataset), job.ranks, job.rate, job.epochs)


def node_numbers(names: Sequence[str]) -> tuple[int, ...]:
    """Return the node numbers of names."""
    return tuple(int(name) for name in names)
