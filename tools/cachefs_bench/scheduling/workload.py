"""The simulated cluster, its caches and its jobs: equal for every policy with one seed.

A node keeps what it reads, and evicts least recently read datasets for it, but nothing that a job reads there. If it
has no room, another node keeps the data, of its zone if one there has room.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

GB: Final = 10**9
# Ranks of a job, and their frequency. Most jobs of a shared cluster are small.
_RANKS: Final = ((1, 0.5), (2, 0.2), (4, 0.2), (8, 0.1))
_USERS: Final = 8
_WEEK: Final = 604_800.0


@dataclass(frozen=True, slots=True)
class SimulationShape:
    """Parameters of a simulation. Rates are in bytes/s."""

    nodes: int = 64
    jobs: int = 500
    datasets: int = 20
    # Jobs that one node can run: accelerators, one per rank.
    slots: int = 4
    zones: int = 8
    regions: int = 2
    # The n-th dataset has 1 / n ** zipf as many jobs as the first.
    zipf: float = 1.1
    # Bytes of the smallest and the largest dataset; sizes are uniform on a logarithmic scale.
    smallest: int = 50 * GB
    largest: int = 1000 * GB
    # Whether each dataset is in the cluster once at the start.
    warm: bool = True
    # Of each node.
    capacity: int = 250 * GB
    peer_rate: float = 1.25e9
    tier_rate: float = 3e9
    origin_rate: float = 1.25e9
    # Shared by all nodes: the origin; the incoming links of a zone and of a region.
    origin: float = 5e8
    zone_link: float = 2.5e9
    region_link: float = 2.5e9
    # Range of a rank's read rate if it never waits.
    slowest: float = 3e8
    fastest: float = 1.6e9
    # Mean computing time of a job in seconds, before rounding to whole epochs; median of a lognormal distribution (0:
    # gamma with the shape 1.5, whose tail is short); and the share of all accelerators that computing alone would keep
    # busy.
    seconds: float = 1200.0
    median: float = 0.0
    load: float = 0.9


# Jobs like in published traces, in order of magnitude: see decision 0049. Chosen before any run, and not changed since:
# heavy-tailed lengths, image models on one accelerator each, an origin of 10 MB/s per accelerator.
TRACES: Final = SimulationShape(
    load=0.8, slowest=5e7, fastest=5e8, seconds=6600.0, median=780.0, origin=2.5e9, capacity=250 * GB, zipf=1.1
)
SHAPES: Final = {"narrow": SimulationShape(), "traces": TRACES}


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """A job of the simulation."""

    number: int
    # Seconds since the start.
    arrival: float
    dataset: int
    ranks: int
    # Bytes/s of each rank.
    rate: float
    epochs: int
    user: str


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Datasets and jobs."""

    # Bytes: shape (datasets,), int64.
    sizes: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    jobs: tuple[SimulatedJob, ...]


def make_workload(shape: SimulationShape, seed: int) -> Workload:
    """Return datasets, and jobs in order of arrival."""
    chance = np.random.default_rng(seed)
    span = np.log(shape.largest / shape.smallest)
    sizes = (shape.smallest * np.exp(span * chance.random(shape.datasets))).astype(np.int64)
    popular = 1.0 / np.arange(1, shape.datasets + 1) ** shape.zipf
    datasets = chance.choice(shape.datasets, shape.jobs, p=popular / popular.sum())
    counts, parts = zip(*_RANKS, strict=True)
    ranks = np.minimum(chance.choice(counts, shape.jobs, p=parts), shape.nodes * shape.slots)
    rates = shape.slowest * np.exp(np.log(shape.fastest / shape.slowest) * chance.random(shape.jobs))
    lengths = _lengths(shape, chance)
    if shape.median:
        epoch_seconds = sizes[datasets] / (ranks * rates)
        lengths = np.maximum(1, np.round(lengths / epoch_seconds)) * epoch_seconds
    busy = float((ranks * lengths).sum()) / (shape.nodes * shape.slots * shape.load)
    arrivals = np.cumsum(chance.exponential(busy / shape.jobs, shape.jobs))
    jobs = []
    for number in range(shape.jobs):
        epoch = sizes[datasets[number]] / (ranks[number] * rates[number])
        jobs.append(
            SimulatedJob(
                number,
                float(arrivals[number]),
                int(datasets[number]),
                int(ranks[number]),
                float(rates[number]),
                max(1, round(float(lengths[number] / epoch))),
                f"user{chance.integers(_USERS)}",
            )
        )
    return Workload(sizes, tuple(jobs))


def _lengths(shape: SimulationShape, chance: np.random.Generator) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Return the computing seconds of each job: shape (jobs,)."""
    if not shape.median:
        return chance.gamma(1.5, shape.seconds / 1.5, shape.jobs)
    # The mean of a lognormal is its median times exp(sigma ** 2 / 2). A week is the longest job.
    sigma = np.sqrt(2 * np.log(shape.seconds / shape.median))
    lengths: np.ndarray[tuple[int], np.dtype[np.float64]] = shape.median * np.exp(
        sigma * chance.standard_normal(shape.jobs)
    )
    return lengths.clip(max=_WEEK)


class SimulatedCaches:
    """Parts of datasets held by nodes."""

    def __init__(self, shape: SimulationShape, sizes: npt.NDArray[np.int64], zones: npt.NDArray[np.int64]) -> None:
        # Part of each dataset on each node: 0 to 1, shape (nodes, datasets).
        self.held = np.zeros((shape.nodes, shape.datasets))
        # Number of jobs that read the dataset on the node, and time of the last read.
        self.readers = np.zeros((shape.nodes, shape.datasets), np.int64)
        self.last_read = np.full((shape.nodes, shape.datasets), -np.inf)
        self.sizes = sizes
        self._capacity = float(shape.capacity)
        self._zones = zones

    def load_datasets(self, seed: int) -> None:
        """Load each dataset into the cluster once, like an administrator who warms caches up: onto as few nodes of one
        zone as have room for it in half of their caches, starting at a random node."""
        chance = np.random.default_rng(seed)
        for dataset, size in enumerate(self.sizes.tolist()):
            lacking, first = 1.0, int(chance.integers(len(self.held)))
            zone = np.flatnonzero(self._zones == self._zones[first])
            others = np.flatnonzero(self._zones != self._zones[first])
            for node in [first, *zone[zone != first].tolist(), *others.tolist()]:
                part = min(lacking, max(0.0, self._capacity / 2 - self.used_bytes(node)) / size)
                self.held[node, dataset] += part
                lacking -= part

    def store_part(self, node: int, dataset: int, part: float) -> tuple[int, float]:
        """Store a part of a dataset that the node has read and did not have. Returns the node that keeps it, and how
        much."""
        part = min(part, 1.0 - float(self.held[node, dataset]))
        if part <= 0:
            return node, 0.0
        keeper = node
        if self._available_bytes(node) < part * self.sizes[dataset] * 0.5:
            keeper = self._other_node(node, dataset)
        part = min(part, 1.0 - float(self.held[keeper, dataset]), self._available_bytes(keeper) / self.sizes[dataset])
        if part <= 0:
            return keeper, 0.0
        self._evict(keeper, part * self.sizes[dataset])
        self.held[keeper, dataset] += part
        if keeper != node:
            self.last_read[keeper, dataset] = max(self.last_read[keeper, dataset], self.last_read[node, dataset])
        return keeper, part

    def used_bytes(self, node: int) -> float:
        """Return the bytes held."""
        return float(self.held[node] @ self.sizes)

    def _available_bytes(self, node: int) -> float:
        """Return the bytes that are free, or can be freed."""
        return self._capacity - float((self.held[node] * (self.readers[node] > 0)) @ self.sizes)

    def _other_node(self, node: int, dataset: int) -> int:
        """Return the node with most room, of this one's zone if one there has some."""
        room = self._capacity - (self.held * (self.readers > 0)) @ self.sizes
        room -= self.held[:, dataset] * self.sizes[dataset]
        of_zone = np.where(self._zones == self._zones[node], room, -np.inf)
        best = int(of_zone.argmax())
        return best if of_zone[best] > 0.01 * self._capacity else int(room.argmax())

    def _evict(self, node: int, size: float) -> None:
        lacking = size - (self._capacity - self.used_bytes(node))
        order = np.argsort(self.last_read[node], kind="stable")
        for dataset in order[(self.held[node, order] > 0) & (self.readers[node, order] == 0)].tolist():
            if lacking <= 0:
                return
            gone = min(float(self.held[node, dataset]), lacking / float(self.sizes[dataset]))
            self.held[node, dataset] -= gone
            lacking -= gone * float(self.sizes[dataset])
