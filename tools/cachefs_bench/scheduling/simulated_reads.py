"""Running jobs of the simulation: the sources of their bytes, their rates, and what they leave in caches.

`fair_rates` divides links and disks among their readers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.cluster.scale import local_share
from cachefs_bench.scheduling.workload import SimulatedCaches, SimulatedJob, SimulationShape

# Shape (n,), float64.
FloatVector = npt.NDArray[np.float64]


# Tolerance, as a part of a capacity or a rate.
TOLERANCE: Final = 0.02
# Resources of a node: its SSD, its link in both directions, its path to the origin.
SSD, IN, OUT, ORIGIN = range(4)
# Below this part of its reads, a rank counts as missing nothing.
_NOTHING: Final = 1e-3
# Shortest step in seconds, so that short epochs do not cost a step each.
_SHORTEST: Final = 20.0

_Matrix = npt.NDArray[np.float64]


def fair_rates(usage: npt.NDArray[np.float64], capacities: FloatVector, most: FloatVector) -> FloatVector:
    """Return the rate of each reader: shape (readers,). All rates rise together until a resource is full or a reader
    has its maximum; the others go on (max-min fairness by progressive filling: Bertsekas and Gallager, "Data Networks",
    section 6.5.2). Values within TOLERANCE count as full or reached, which takes a third of the rounds.

    usage: a reader's use of each resource per unit of its rate: shape (readers, resources); most: each reader's
    maximum.
    """
    rates = np.zeros(len(most))
    going_on = np.flatnonzero(most > 0)
    # No matrix products: a BLAS would divide each of these small ones among threads, which costs more than it saves.
    used = np.flatnonzero(usage.any(axis=0))
    usage, capacities = usage[:, used], capacities[used].astype(np.float64)
    left = capacities.copy()
    while len(going_on):
        of_these = usage[going_on]
        per_unit = of_these.sum(axis=0)
        room = left / np.maximum(per_unit, 1e-30)
        step = min(float(room[per_unit > 0].min(initial=np.inf)), float((most - rates)[going_on].min()))
        rates[going_on] += step
        left = np.maximum(left - step * per_unit, 0.0)
        full = (left <= TOLERANCE * capacities) & (per_unit > 0)
        done = (rates >= (1 - TOLERANCE) * most)[going_on] | (of_these[:, full] > 0).any(axis=1)
        going_on = going_on[~done]
    return rates


@dataclass(slots=True, eq=False)
class SimulatedRun:
    """A running job, or a copy being made (a job of one epoch without slots)."""

    job: SimulatedJob
    # By rank.
    nodes: tuple[int, ...]
    started: float
    is_copy: bool = False
    # Finished epochs, including the part of the current one.
    done_epochs: float = 0.0
    # Parts of the dataset that have arrived in this epoch, and are not fetched again in it: at each node; in each zone
    # from outside; in each region; from the origin.
    arrived: FloatVector = field(default_factory=lambda: np.zeros(0))
    arrived_in_zone: FloatVector = field(default_factory=lambda: np.zeros(0))
    arrived_in_region: FloatVector = field(default_factory=lambda: np.zeros(0))
    arrived_from_origin: float = 0.0
    # Present bytes/s of each rank; and the shares of its reads that are local, in the zone, in the region, elsewhere
    # and at the origin: shape (ranks, 5).
    rate: float = 0.0
    parts: _Matrix = field(default_factory=lambda: np.zeros((0, 5)))
    is_missing_data: bool = True


class SimulatedReads:
    """All running jobs of the simulated cluster."""

    def __init__(
        self,
        shape: SimulationShape,
        caches: SimulatedCaches,
        zones: npt.NDArray[np.int64],
        regions: npt.NDArray[np.int64],
    ) -> None:
        """zones, regions: of each node: shape (nodes,)."""
        self._shape, self._caches, self._zones, self._regions = shape, caches, zones, regions
        self.runs: list[SimulatedRun] = []
        self._taken = np.zeros((4, shape.nodes))
        # Whether a job has begun or ended since rates were computed.
        self._changed = False
        self.origin_bytes = 0.0
        nodes = np.ones(shape.nodes)
        self._capacities = np.concatenate(
            [
                nodes * shape.tier_rate,
                nodes * shape.peer_rate,
                nodes * shape.peer_rate,
                nodes * shape.origin_rate,
                [shape.origin],
                np.full(shape.zones, shape.zone_link),
                np.full(shape.regions, shape.region_link),
            ]
        )
        # Nodes in the same zone, in the same region but another zone, and elsewhere: shape (3, nodes, nodes); no node
        # is near itself.
        same_zone = zones[:, None] == zones[None, :]
        same_region = regions[:, None] == regions[None, :]
        self._neighbours = np.stack(
            [same_zone & ~np.eye(shape.nodes, dtype=np.bool_), same_region & ~same_zone, ~same_region]
        )

    @property
    def used_rates(self) -> _Matrix:
        """Present use of each node in bytes/s: shape (4, nodes), by SSD, IN, OUT and ORIGIN."""
        if self._changed:
            self.compute_rates()
        return self._taken

    def start_run(self, run: SimulatedRun) -> None:
        self._changed = True
        run.arrived = np.zeros(self._shape.nodes)
        run.arrived_in_zone, run.arrived_in_region = np.zeros(self._shape.zones), np.zeros(self._shape.regions)
        self.runs.append(run)
        for node in set(run.nodes):
            self._caches.readers[node, run.job.dataset] += 1

    def end_run(self, run: SimulatedRun) -> None:
        self._changed = True
        self.runs.remove(run)
        for node in set(run.nodes):
            self._caches.readers[node, run.job.dataset] -= 1

    def compute_rates(self) -> None:
        """Compute the rate of each run."""
        self._changed = False
        if not self.runs:
            self._taken = np.zeros((4, self._shape.nodes))
            return
        usage = self._usage()
        rates = fair_rates(usage, self._capacities, np.array([run.job.rate for run in self.runs]))
        for run, rate in zip(self.runs, rates.tolist(), strict=True):
            run.rate = rate
        self._taken = (rates[:, None] * usage[:, : 4 * self._shape.nodes]).sum(axis=0).reshape(4, self._shape.nodes)

    def next_step(self) -> float:
        """Return the seconds for which the present rates hold: until a run ends, or one that misses data begins another
        epoch."""
        return max(min((self._seconds(run) for run in self.runs), default=np.inf), _SHORTEST)

    def advance_time(self, seconds: float, now: float) -> list[tuple[SimulatedRun, float]]:
        """Advance the time to *now*, by *seconds*. Returns finished runs, and when each ended."""
        finished = []
        for run in self.runs:
            size = float(self._caches.sizes[run.job.dataset])
            speed = run.rate * run.job.ranks / size
            part = min(speed * seconds, run.job.epochs - run.done_epochs)
            self._store_reads(run, part / run.job.ranks, now)
            before, run.done_epochs = int(run.done_epochs + 1e-7), run.done_epochs + part
            if run.done_epochs >= run.job.epochs - 1e-7:
                finished.append((run, now - seconds + part / speed))
            elif int(run.done_epochs + 1e-7) > before:
                run.arrived[:], run.arrived_in_zone[:], run.arrived_in_region[:], run.arrived_from_origin = 0, 0, 0, 0.0
        return finished

    def _seconds(self, run: SimulatedRun) -> float:
        ends = int(run.done_epochs + 1e-7) + 1 if run.is_missing_data else run.job.epochs
        left = (ends - run.done_epochs) * float(self._caches.sizes[run.job.dataset])
        return left / (run.job.ranks * run.rate) if run.rate > 0 else np.inf

    def _store_reads(self, run: SimulatedRun, part: float, now: float) -> None:
        """Store what each rank has read and its node did not have."""
        dataset, size = run.job.dataset, float(self._caches.sizes[run.job.dataset])
        self._caches.last_read[list(run.nodes), dataset] = now
        if not run.is_missing_data:
            return
        for node, (_, zone, region, elsewhere, origin) in zip(run.nodes, run.parts.tolist(), strict=True):
            self.origin_bytes += part * origin * size
            came = part * (zone + region + elsewhere + origin)
            if came <= 0:
                continue
            keeper, kept = self._caches.store_part(node, dataset, came)
            if kept > 0:
                scale = part * kept / came
                run.arrived[keeper] += kept
                run.arrived_in_zone[self._zones[keeper]] += scale * (region + elsewhere + origin)
                run.arrived_in_region[self._regions[keeper]] += scale * (elsewhere + origin)
                run.arrived_from_origin += scale * origin

    def _usage(self) -> _Matrix:
        """Return each run's use of each resource per unit of its rate: shape (runs, resources)."""
        shape, cached = self._shape, self._caches.held
        ranks = np.array([len(run.nodes) for run in self.runs])
        starts = np.concatenate([[0], np.cumsum(ranks)[:-1]])
        run_of = np.repeat(np.arange(len(self.runs)), ranks)
        nodes = np.array([node for run in self.runs for node in run.nodes])
        zones, regions = self._zones[nodes], self._regions[nodes]
        datasets = np.array([run.job.dataset for run in self.runs])[run_of]

        parts = self._parts(run_of, nodes, datasets)
        for number, run in enumerate(self.runs):
            run.parts = parts[starts[number] : starts[number] + ranks[number]]
            run.is_missing_data = bool((run.parts[:, 0] < 1 - _NOTHING).any())
        usage = np.zeros((len(self.runs), len(self._capacities)))
        np.add.at(usage, (run_of, SSD * shape.nodes + nodes), parts[:, 0])
        np.add.at(usage, (run_of, IN * shape.nodes + nodes), 1 - parts[:, 0])
        np.add.at(usage, (run_of, ORIGIN * shape.nodes + nodes), parts[:, 4])
        shared = 4 * shape.nodes
        usage[:, shared] = np.bincount(run_of, parts[:, 4], len(self.runs))
        np.add.at(usage, (run_of, shared + 1 + zones), parts[:, 2] + parts[:, 3])
        np.add.at(usage, (run_of, shared + 1 + shape.zones + regions), parts[:, 3])
        lacking = np.flatnonzero(parts[:, 1:4].sum(axis=1) > 0)
        having = cached[:, datasets[lacking]].T
        out = np.zeros((len(lacking), shape.nodes))
        for where in range(3):
            weights = having * self._neighbours[where, nodes[lacking]]
            out += weights * (parts[lacking, 1 + where] / np.maximum(weights.sum(axis=1), 1e-12))[:, None]
        np.add.at(usage[:, OUT * shape.nodes : ORIGIN * shape.nodes], run_of[lacking], out)
        return usage

    def _parts(
        self, run_of: npt.NDArray[np.int64], nodes: npt.NDArray[np.int64], datasets: npt.NDArray[np.int64]
    ) -> _Matrix:
        shape, cached = self._shape, self._caches.held
        zones, regions = self._zones[nodes], self._regions[nodes]
        of_zone, of_region = np.zeros((shape.zones, shape.datasets)), np.zeros((shape.regions, shape.datasets))
        np.add.at(of_zone, self._zones, cached)
        np.add.at(of_region, self._regions, cached)
        came, came_zone, came_region = (
            np.stack(arrays)
            for arrays in zip(
                *((run.arrived, run.arrived_in_zone, run.arrived_in_region) for run in self.runs), strict=True
            )
        )
        came_origin = np.array([run.arrived_from_origin for run in self.runs])
        moving = np.array([self._moving_share(run) for run in self.runs])
        local = np.maximum(cached[nodes, datasets] - came[run_of, nodes], np.maximum(moving[run_of], 0.0))
        in_zone = np.clip(of_zone[zones, datasets] - came_zone[run_of, zones], local, np.maximum(local, 1.0))
        in_region = np.clip(of_region[regions, datasets] - came_region[run_of, regions], in_zone, 1.0)
        anywhere = np.clip(cached.sum(axis=0)[datasets] - came_origin[run_of], in_region, 1.0)
        return np.stack([local, in_zone - local, in_region - in_zone, anywhere - in_region, 1 - anywhere], axis=1)

    def _moving_share(self, run: SimulatedRun) -> float:
        """Return the share of local reads that results from copies moving to their next readers among the nodes of a
        job."""
        if run.job.ranks == 1:
            return 0.0
        mine = np.array(sorted(set(run.nodes)))
        of_job = float(np.maximum(self._caches.held[mine, run.job.dataset] - run.arrived[mine], 0).sum())
        return local_share(len(mine)) * min(1.0, of_job) if len(mine) > 1 else 0.0


def nodes_of_readers(runs: Sequence[SimulatedRun], dataset: int) -> list[set[str]]:
    """Return the node names of each job that reads a dataset."""
    return [{str(node) for node in run.nodes} for run in runs if run.job.dataset == dataset and not run.is_copy]
