"""One run of the simulation: jobs arrive, wait, run and end; rates are constant between two events."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np

from cachefs.planning.scheduling.copies import Clone, SlotRequest, cached_copies, choose_next, job_slots, plan_clone
from cachefs_bench.scheduling.placement_policies import (
    HintPolicy,
    LabelPolicy,
    LeastLoadedPolicy,
    NodeSelectionPolicy,
    PolicyInput,
    RandomPolicy,
    job_request,
    node_numbers,
)
from cachefs_bench.scheduling.simulated_reads import SimulatedReads, SimulatedRun, nodes_of_readers
from cachefs_bench.scheduling.workload import SimulatedCaches, SimulatedJob, SimulationShape, Workload, make_workload

# Longest step in seconds, since caches fill meanwhile.
MAX_STEP_SECONDS: Final = 120.0
# Simulated seconds after which the run is aborted.
_MAX_SECONDS: Final = 3e7
SimulatedPolicyName = Literal[
    "all local", "random", "least loaded", "labels", "labels (any part)", "hints", "hints+suspend", "hints+clone"
]
POLICIES: Final[tuple[SimulatedPolicyName, ...]] = (
    "all local",
    "random",
    "least loaded",
    "labels",
    "labels (any part)",
    "hints",
    "hints+suspend",
    "hints+clone",
)


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The result of one job, in seconds."""

    job: SimulatedJob
    # From its arrival to its start, and to its end.
    waited: float
    completion: float
    # Its duration if it never waits.
    ideal: float


@dataclass(slots=True)
class SimulationResult:
    """The results of a run."""

    outcomes: list[JobOutcome] = field(default_factory=list)
    # By dataset: the most concurrent jobs on one copy.
    most_per_copy: Counter[int] = field(default_factory=Counter)
    clones: int = 0
    origin_bytes: float = 0.0


def simulate(shape: SimulationShape, seed: int, policy: SimulatedPolicyName, jobs_per_copy: int) -> SimulationResult:
    """Run all jobs of this seed. jobs_per_copy: the limit of "hints+suspend" and "hints+clone"."""
    return _Simulation(shape, make_workload(shape, seed), seed, policy, jobs_per_copy).run()


class _Simulation:
    def __init__(
        self, shape: SimulationShape, load: Workload, seed: int, policy: SimulatedPolicyName, limit: int
    ) -> None:
        if policy == "all local":
            shape = replace(shape, tier_rate=1e15)
        zones = np.arange(shape.nodes) * shape.zones // shape.nodes
        regions = zones * shape.regions // shape.zones
        self._caches = SimulatedCaches(shape, load.sizes, zones)
        if policy == "all local":
            # Not a real choice, but the reference for all: computing, and waiting for accelerators.
            self._caches.held[:] = 1.0
        elif shape.warm:
            self._caches.load_datasets(seed)
        self._reading = SimulatedReads(shape, self._caches, zones, regions)
        self._world = PolicyInput(shape, self._caches, self._reading, zones, regions)
        self._policy = _policy(policy, self._world, seed)
        self._limit = limit if policy in ("hints+suspend", "hints+clone") else 0
        self._clones = policy == "hints+clone"
        self._arriving = list(load.jobs)
        self._queue: list[SimulatedJob] = []
        self._free = np.full(shape.nodes, shape.slots, np.int64)
        self._now = 0.0
        self._history = SimulationResult()
        # Counts jobs per copy, for every policy.
        self._observer = self._policy if isinstance(self._policy, HintPolicy) else HintPolicy(self._world, seed)

    def run(self) -> SimulationResult:
        while self._arriving or self._queue or self._reading.runs:
            if self._now > _MAX_SECONDS:
                raise RuntimeError(f"{len(self._queue)} jobs still wait after {self._now:,.0f} s")
            if not self._reading.runs and not self._queue:
                self._now = self._arriving[0].arrival
            self._reading.compute_rates()
            step = min(MAX_STEP_SECONDS, self._reading.next_step())
            self._now += step
            finished = self._reading.advance_time(step, self._now)
            for run, when in finished:
                self._end(run, when)
            came = [job for job in self._arriving if job.arrival <= self._now]
            self._queue += came
            del self._arriving[: len(came)]
            if came or finished:
                self._start_jobs()
        self._history.origin_bytes = self._reading.origin_bytes
        return self._history

    def _start_jobs(self) -> None:
        """Start all jobs that fit, in order of arrival; a large one that does not fit does not hold up others."""
        started = set()
        for job in self._startable_jobs():
            if job.ranks <= int(self._free.sum()):
                nodes = self._policy.choose_nodes(job, self._free, self._now)
                self._queue.remove(job)
                np.subtract.at(self._free, list(nodes), 1)
                self._reading.start_run(SimulatedRun(job, nodes, self._now))
                started.add(job.dataset)
        self._count_per_copy(started)

    def _startable_jobs(self) -> list[SimulatedJob]:
        if not self._limit:
            return list(self._queue)
        self._observer.update_reports(self._now)
        free, jobs = {}, {str(job.number): job for job in self._queue}
        for dataset in dict.fromkeys(job.dataset for job in self._queue):
            wanted = [job for job in self._queue if job.dataset == dataset]
            free[str(dataset)] = self._slots(dataset, wanted)
        running = Counter(run.job.user for run in self._reading.runs if not run.is_copy)
        waiting = [SlotRequest(name, str(job.dataset), job.user, 0, job.arrival) for name, job in jobs.items()]
        return [jobs[one.job] for one in choose_next(waiting, free, running, self._now)]

    def _slots(self, dataset: int, wanted: list[SimulatedJob]) -> int:
        """Return how many more jobs may read a dataset; with clones, after beginning the copies that are needed."""
        readers = nodes_of_readers(self._reading.runs, dataset)
        copies = cached_copies(str(dataset), self._observer.cluster, readers)
        making = [run for run in self._reading.runs if run.is_copy and run.job.dataset == dataset]
        found = job_slots(copies, self._limit, len(readers), len(making))
        if self._clones and copies and found.free < len(wanted) and len(making) < 2:
            taken = {name for copy in copies for name in copy.nodes} | {str(run.nodes[0]) for run in making}
            able = [str(node) for node in np.flatnonzero(self._free > 0).tolist() if str(node) not in taken]
            target = plan_clone(job_request(wanted[found.free]), able, self._observer.cluster)
            if target is not None:
                self._copy(dataset, target)
                return found.free + self._limit
        return found.free

    def _copy(self, dataset: int, target: Clone) -> None:
        """Begin to copy a dataset to nodes, at up to half of a link's rate."""
        self._history.clones += 1
        nodes = node_numbers(target.nodes)
        job = SimulatedJob(-1, self._now, dataset, len(nodes), self._world.shape.peer_rate / 2, 1, "")
        self._reading.start_run(SimulatedRun(job, nodes, self._now, is_copy=True))

    def _end(self, run: SimulatedRun, when: float) -> None:
        self._reading.end_run(run)
        if run.is_copy:
            return
        np.add.at(self._free, list(run.nodes), 1)
        job = run.job
        ideal = float(self._caches.sizes[job.dataset]) * job.epochs / (job.ranks * job.rate)
        self._history.outcomes.append(JobOutcome(job, run.started - job.arrival, when - job.arrival, ideal))

    def _count_per_copy(self, datasets: set[int]) -> None:
        if datasets:
            self._observer.update_reports(self._now)
        for dataset in sorted(datasets):
            readers = nodes_of_readers(self._reading.runs, dataset)
            copies = cached_copies(str(dataset), self._observer.cluster, readers)
            making = sum(run.is_copy and run.job.dataset == dataset for run in self._reading.runs)
            most = -(-len(readers) // max(1, len(copies) + making))
            self._history.most_per_copy[dataset] = max(self._history.most_per_copy[dataset], most)


def _policy(name: SimulatedPolicyName, world: PolicyInput, seed: int) -> NodeSelectionPolicy:
    if name == "random":
        return RandomPolicy(world, seed)
    if name in ("all local", "least loaded"):
        return LeastLoadedPolicy(world, seed)
    if name.startswith("labels"):
        return LabelPolicy(world, seed, least=0.5 if name == "labels" else 0.01)
    return HintPolicy(world, seed)
