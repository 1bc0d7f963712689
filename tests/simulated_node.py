"""A training node on a clock of its own: jobs whose loaders read in bursts, a slow origin, and between them the plan,
the followers, the fetch plan and the eviction of the daemon. No bytes, no threads, no waiting.

A minute of training takes a few seconds, and always gives the same figures, whatever else the machine does.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from cachefs.planning.blocks.presence import ABSENT, IN_MEMORY, Presence
from cachefs.planning.eviction.policies.clairvoyant import Clairvoyant
from cachefs.planning.eviction.simulated_tiers import SimulatedTier
from cachefs.planning.prefetch.fetch_plan import FetchBatch, FetchLimits, FetchPlan
from cachefs.planning.prefetch.fetch_window import FetchLatency
from cachefs.planning.prefetch.lookahead import UpcomingBlock
from cachefs.planning.sequences.follower import SequenceFollower, observe_reads
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.position_estimate import REPORT_SECONDS, PositionEstimate
from cachefs_bench.bounds import belady_reads
from tests.simulated import space_of

SIZE = 110_000
# A read that waits for longer is late.
LATE = 0.01
HIT = 0.0005
# Of the daemon's prefetcher: seconds between two steps, where there is news and where there is none.
FASTEST, SLOWEST = 0.01, 0.05


@dataclass(frozen=True)
class SimulatedOrigin:
    """Like the benchmark's slow link. bandwidth: bytes per second, 0 for no limit; latency: seconds, the median."""

    bandwidth: float = 0.0
    latency: float = 0.02
    sigma: float = 0.47


@dataclass(frozen=True)
class SimulatedLoader:
    """How a job reads. demand: samples per second that its accelerator takes; start: seconds; rest: seconds between two
    epochs; resumes: epoch, and samples of it that were done before, with which it begins; batches: after so many it is
    killed, 0 for never; seed: of its orders, None for one of its own; decode: seconds that a worker takes for each
    sample that it has read."""

    demand: float = 150.0
    epochs: int = 4
    workers: int = 4
    prefetch: int = 2
    batch: int = 32
    start: float = 0.0
    published: bool = True
    rest: float = 0.0
    resumes: tuple[int, int] = (0, 0)
    batches: int = 0
    seed: int | None = None
    decode: float = HIT


@dataclass
class EpochFigures:
    samples: int = 0
    stalled: float = 0.0  # seconds that the accelerator has waited
    late: int = 0  # reads that took longer than LATE
    ended: float = 0.0


class Clock:
    """What happens, in order."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._count), what))

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            self.now, _, what = heapq.heappop(self._events)
            what()


@dataclass
class _Flight:
    asked: float
    waiting: list[Callable[[], None]] = field(default_factory=list)
    ahead: UpcomingBlock | None = None
    is_sent: bool = False  # whether the origin was asked


class SimulatedNode:
    """It has one tier and one mount. Several jobs read the same dataset, each in an order of its own."""

    def __init__(self, files: int, capacity: int, origin: SimulatedOrigin, loaders: list[SimulatedLoader]) -> None:
        self.clock = Clock()
        self.space = space_of([SIZE] * files)
        self.plan, self.presence = Plan(), Presence()
        self.plan.add_space(self.space)
        self.presence.add_space(self.space)
        self.state = self.presence.states["space"]
        self.keys = self.space.keys(np.arange(files))
        self.policy = Clairvoyant(self.plan)
        self.tier = SimulatedTier(self.policy, capacity * SIZE)
        self.slots = 48
        limits = FetchLimits(2.0, 1 << 30, 512 << 20, self.slots)
        self.fetches = FetchPlan(self.plan, self.presence, limits, self.clock.now)
        self.latency = FetchLatency(0.05)
        self.fetched = 0
        self.refused = 0
        self.flights: dict[int, _Flight] = {}
        self._queue: list[tuple[float, int]] = []  # when blocks are due, and these
        self._asked = 0  # blocks that the origin was asked for
        self.idle_link = 0.0  # seconds for which the origin could have delivered more
        self.news = True  # for the prefetcher
        self._origin, self._random, self._free = origin, random.Random(1), -math.inf
        self.jobs = [SimulatedJobRun(self, f"job{number}", number, one) for number, one in enumerate(loaders)]

    def run(self) -> "SimulatedNode":
        for job in self.jobs:
            self.clock.at(self.clock.now + job.loader.start, job.begin)
        self._step()
        self.clock.run(lambda: all(job.done for job in self.jobs))
        return self

    # --- the origin -----------------------------------------------------------------------------------------------

    def fetch(self, block: int, ahead: UpcomingBlock | None, landed: Callable[[], None] | None = None) -> None:
        flight = self.flights.get(block)
        if flight is None or (landed is not None and not flight.is_sent):
            flight = self.flights.setdefault(block, _Flight(self.clock.now, ahead=ahead))
            due = self.clock.now + ahead.seconds if ahead is not None and landed is None else 0.0
            heapq.heappush(self._queue, (due, block))
            self._ask()
        if landed is not None:
            flight.waiting.append(landed)

    def _ask(self) -> None:
        """Ask the origin for the blocks that are needed first, as many at once as there are connections."""
        while self._queue and self._asked < self.slots:
            _, block = heapq.heappop(self._queue)
            flight = self.flights.get(block)
            if flight is None or flight.is_sent:
                continue
            flight.asked, flight.is_sent = self.clock.now, True
            self._asked += 1
            first = self._origin.latency * math.exp(self._random.gauss(0, self._origin.sigma))
            self.clock.at(self.clock.now + first, partial(self._send, block, [64 << 10, SIZE - (64 << 10)]))

    def _send(self, block: int, chunks: list[int]) -> None:
        if not chunks:
            self._landed(block)
            return
        if self._origin.bandwidth:
            self.idle_link += max(0.0, self.clock.now - self._free) if self._free > 0 else 0.0
            self._free = max(self._free, self.clock.now) + chunks[0] / self._origin.bandwidth
        self.clock.at(self._free, lambda: self._send(block, chunks[1:]))

    def _landed(self, block: int) -> None:
        flight = self.flights.pop(block)
        self.fetched += 1
        self._asked -= 1
        self.latency.measure(self.clock.now - flight.asked)
        key = self.keys[block]
        taken = key in self.tier
        if not taken and self.tier.can_admit(key, SIZE):
            for gone in self.tier.make_room(key, SIZE):
                self.presence.set_state(gone.key, ABSENT)
            taken = self.tier.add_block(key, SIZE)
            if taken:
                self.state[block] = IN_MEMORY
        if flight.ahead is not None:
            if taken:
                self.fetches.note_landed(flight.ahead)
            else:
                self.refused += 1
                self.fetches.note_refused(flight.ahead, self.clock.now)
        for landed in flight.waiting:
            landed()
        self._ask()
        self.news = True

    # --- the prefetcher -------------------------------------------------------------------------------------------

    def _step(self) -> None:
        if not self.plan.is_empty:
            self._prefetch()
        pause = FASTEST if self.news else SLOWEST
        self.news = False
        self.clock.at(self.clock.now + pause, self._step)

    def _prefetch(self) -> None:
        fetches, now = self.fetches, self.clock.now
        fetches.refresh(now, self.fetched * SIZE)
        full = self.tier.free < SIZE + (self.tier_capacity >> 6)
        self._start(fetches.choose_for_free_room(0 if full else self.tier.free))
        margins = {job.name: job.position.margin(now) for job in self.jobs if job.position is not None}
        window = fetches.update_window(margins, self.latency, now)
        self._start_evicting(fetches.choose_for_window(window), 0)
        for batch in fetches.choose_for_backlog(window):
            self._start_evicting(batch, SIZE)
        fetches.note_idle()

    def _start_evicting(self, batch: FetchBatch | None, spared: int) -> None:
        if batch is not None:
            room = self.tier.free + self.policy.replaceable_bytes(batch.last_key) - spared
            self._start(self.fetches.fit_into_room(batch.blocks, room))

    @property
    def tier_capacity(self) -> int:
        return self.tier.free + sum(self.tier.sizes.values())

    def _start(self, blocks: list[UpcomingBlock]) -> None:
        self.fetches.note_started(blocks)
        for one in blocks:
            if one.number in self.flights:
                self.fetches.note_dropped(one)
            else:
                self.fetch(one.number, one)


class SimulatedJobRun:
    """One job on the node. Its accelerator takes batches in order; each worker reads its batches one after the other,
    as soon as it is given them, as those of torch do."""

    def __init__(self, node: SimulatedNode, name: str, seed: int, loader: SimulatedLoader) -> None:
        self.node, self.name, self.loader = node, name, loader
        files = node.space.count
        draw = np.random.default_rng(seed if loader.seed is None else loader.seed)
        self.orders = [draw.permutation(files) for _ in range(loader.epochs)]
        self.figures = [EpochFigures() for _ in range(loader.epochs)]
        self.reads: list[tuple[float, int]] = []  # when it began, and of which block
        self.position: PositionEstimate | None = None
        self.done = False
        self._waited = 0.0
        self._late: list[float] = []
        self._read: list[int] = []
        self._epoch = loader.resumes[0] - 1
        self._batches_left = loader.batches or -1

    # --- loader ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._report()
        self._next_epoch()

    def _next_epoch(self) -> None:
        self._epoch += 1
        loader = self.loader
        if self._epoch == loader.epochs:
            self._end()
            return
        self._publish()
        order = self.orders[self._epoch][loader.resumes[1] if self._epoch == loader.resumes[0] else 0 :]
        self._batches = [order[start : start + loader.batch] for start in range(0, len(order), loader.batch)]
        self._queues: list[deque[int]] = [deque() for _ in range(loader.workers)]
        self._busy = [False] * loader.workers
        self._ready: set[int] = set()
        self._given = self._taken = 0
        self._asked: float | None = self.node.clock.now
        for _ in range(loader.workers * loader.prefetch):
            self._give()

    def _end(self) -> None:
        self.done, self.position = True, None
        self.node.plan.remove_consumer(self.name)

    def _publish(self) -> None:
        if not self.loader.published:
            return
        for epoch in (self._epoch, self._epoch + 1):
            if epoch < len(self.orders) and self.node.plan.epoch(self.name, epoch) is None:
                last = epoch == len(self.orders) - 1
                self.node.plan.set_epoch(self.name, "space", epoch, self.orders[epoch], is_last=last)
        if self.position is None:
            loader = self.loader
            window = loader.workers * loader.prefetch * loader.batch
            self.position = PositionEstimate(
                SequenceFollower(self.node.plan, self.name, window, loader.batch), loader.batch
            )

    def _give(self) -> None:
        if self._given < len(self._batches):
            worker = self._given % self.loader.workers
            self._queues[worker].append(self._given)
            self._given += 1
            if not self._busy[worker]:
                self._busy[worker] = True
                self._work(worker)

    def _work(self, worker: int) -> None:
        if not self._queues[worker]:
            self._busy[worker] = False
            return
        batch = self._queues[worker].popleft()
        blocks: Iterator[int] = iter(self._batches[batch].tolist())
        self._read_next(worker, batch, blocks, self._epoch)

    def _read_next(self, worker: int, batch: int, blocks: Iterator[int], epoch: int) -> None:
        block = next(blocks, None) if not self.done else None
        if block is None:
            self._ready.add(batch)
            if self._asked is not None and batch == self._taken:
                self._take()
            self._work(worker)
            return
        node, began = self.node, self.node.clock.now
        self.reads.append((began, block))

        def got() -> None:
            waited = node.clock.now - began
            if waited > 0:
                self._waited += waited
                self._late.append(waited)
                if waited > LATE:
                    self.figures[epoch].late += 1
            self._read.append(block)
            node.clock.at(node.clock.now + self.loader.decode, lambda: self._read_next(worker, batch, blocks, epoch))

        if node.state[block] == IN_MEMORY:
            got()
        else:
            node.fetch(block, None, got)

    def _take(self) -> None:
        """The accelerator has the batch that it has asked for."""
        now, figures = self.node.clock.now, self.figures[self._epoch]
        assert self._asked is not None
        figures.stalled += now - self._asked
        self._asked = None
        blocks = self._batches[self._taken]
        figures.samples += len(blocks)
        self._ready.discard(self._taken)
        self._taken += 1
        self._give()
        self.node.clock.at(now + len(blocks) / self.loader.demand, self._computed)

    def _computed(self) -> None:
        self.figures[self._epoch].ended = self.node.clock.now
        self._batches_left -= 1
        if not self._batches_left:
            self._end()
            return
        if self._taken == len(self._batches):
            self.node.clock.at(self.node.clock.now + self.loader.rest, self._next_epoch)
            return
        self._asked = self.node.clock.now
        if self._taken in self._ready:
            self._take()

    # --- what the mount reports -------------------------------------------------------------------------------------

    def _report(self) -> None:
        node = self.node
        if self.done:
            return
        if self._read and self.position is not None:
            ids = np.array(self._read, np.int32)
            followed = [job.position.follower for job in node.jobs if job.position is not None and not job.done]
            observe_reads(followed, ids)
            now = node.clock.now
            self.position.follower.measure_rate(now, self._waited, self.loader.workers)
            node.fetches.note_late_reads(self._late, len(self._read), now)
            node.news = True
        self._read, self._late, self._waited = [], [], 0.0
        node.clock.at(node.clock.now + REPORT_SECONDS, self._report)


def bytes_over_belady(node: SimulatedNode, capacity: int) -> float:
    """What was fetched, beside what Belady's MIN would have fetched for the reads in the order in which they came, had
    it known of no job before it began."""
    whose = np.repeat(np.arange(len(node.jobs)), [len(job.reads) for job in node.jobs])
    reads = list(itertools.chain.from_iterable(job.reads for job in node.jobs))
    when, blocks = np.array([one[0] for one in reads]), np.array([one[1] for one in reads])
    order = np.argsort(when, kind="stable")
    _, first = np.unique(whose[order], return_index=True)
    return node.fetched / belady_reads(blocks[order], capacity, first[whose[order]])
