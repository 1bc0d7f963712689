"""The simulated cluster and its jobs: equal for every policy with one seed."""

from dataclasses import dataclass
from typing import Final

import numpy as np

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
        whole = sizes[datasets] / (ranks * rates)
        lengths = np.maximum(1, np.round(lengths / whole)) * whole
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
