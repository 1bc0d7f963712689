"""The jobs that have said how they will read, from their first word to their end."""

import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from cachefs.errors import CachefsError, ConfigError, NotFound
from cachefs.job_messages import ConsumerView, JobEpoch, JobProgress, JobPublish, JobView, SampleMap
from cachefs.messages import Stall
from cachefs.planning.blocks.presence import ABSENT, Presence
from cachefs.planning.blocks.space import Ids
from cachefs.planning.pagecache.lookahead import NOTHING, Reader, States
from cachefs.planning.pagecache.model import WANTED
from cachefs.planning.sequences.follower import Passed, observe
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.sampler import LOADER_DRAWS, SamplerSpec
from cachefs.snapshot import Snapshot
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.jobs.consumer import Consumer, order_of
from cachefs_daemon.jobs.epoch_loader import EpochLoader
from cachefs_daemon.jobs.liveness import Liveness
from cachefs_daemon.jobs.records import JobRecord, Places
from cachefs_daemon.jobs.sample_maps import TREE
from cachefs_daemon.jobs.stalls import Stalls

log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:@+-]{0,127}")
SAMPLERS: Final = ("sequential", *LOADER_DRAWS, "torch-distributed", "numpy", "explicit")
MAPS: Final = ("tree", "files", "records")
MAX_EPOCHS: Final = 1_000_000
MAX_SAMPLES: Final = 2**32 - 1
MAX_LEASE: Final = 7 * 86400.0
# JobRegistry that have ended are shown for a while: what stalled, and why they ended.
ENDED_KEPT: Final = 64

# When a process started is told from the time of boot, which moves with the clock.
CLOCK_STEP: Final = 5.0

# Reads ahead of a consumer by which it is judged how many of them will show, and by how much at most.
VISIBLE: Final = 4096
MOST_HIDDEN: Final = 64

Pushed = Callable[[str, Ids], int]

RUNNING: Final = "running"
ENDED: Final = "ended"
CANCELLED: Final = "cancelled"


@dataclass(slots=True, eq=False)
class Job:
    """started: unix seconds; maps: the sample map last published for each snapshot; reason: why it ended; last: how its
    consumers were then; fetched_bytes: for those that have ended."""

    name: str
    source: str
    started: float = field(default_factory=time.time)
    state: str = RUNNING
    reason: str = ""
    consumers: dict[str, Consumer] = field(default_factory=dict)
    maps: dict[str, SampleMap] = field(default_factory=dict)
    datasets: dict[str, str] = field(default_factory=dict)
    last: list[ConsumerView] = field(default_factory=list)
    fetched_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Observed:
    """What a mount's reads have told of the jobs."""

    tripped: Mapping[str, Ids]  # by snapshot: blocks that were left out of the mount's page cache to see them read
    own_reads: Mapping[str, int]  # by key of the consumer: how many reads were its own


class JobRegistry:
    """Used from the event loop only. unsaved: names of jobs that are not on disk as they are, for others to empty."""

    def __init__(self, datasets: Catalog, plan: Plan, presence: Presence, sequences: EpochLoader) -> None:
        self._datasets = datasets
        self._plan = plan
        self._presence = presence
        self._sequences = sequences
        self._jobs: dict[str, Job] = {}
        self._consumers: dict[str, Consumer] = {}
        self.stalls = Stalls()
        self.unsaved: set[str] = set()

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def get(self, name: str) -> Job:
        """Raises NotFound."""
        job = self._jobs.get(name)
        if job is None:
            raise NotFound(f"no job named {name!r} has published anything here; see `cachectl job list`")
        return job

    def view(self, job: Job, pushed: Pushed = lambda snapshot, blocks: 0) -> JobView:
        """pushed: how many bytes of blocks of a snapshot are in a page cache."""
        waited, seconds = self.stalls.of(job.name)
        return JobView(
            job=job.name,
            dataset=",".join(dict.fromkeys(job.datasets.values())),
            snapshot=",".join(job.datasets),
            source=job.source,
            started=job.started,
            state=job.state,
            consumers=[*job.last, *(self._consumer_view(consumer, pushed) for consumer in job.consumers.values())],
            stalls=waited,
            stall_seconds=seconds,
            fetched_bytes=job.fetched_bytes + sum(consumer.fetched_bytes for consumer in job.consumers.values()),
            problems=[job.reason] if job.reason else [],
        )

    def _consumer_view(self, consumer: Consumer, pushed: Pushed) -> ConsumerView:
        states = self._presence.states.get(consumer.snapshot.id)
        window = self._plan.window(consumer.key, 0, MAX_SAMPLES)
        if states is None or window is None:
            return consumer.view(0)
        blocks = window.blocks[states[window.blocks] != ABSENT]
        view = consumer.view(int(self._plan.spaces[consumer.snapshot.id].sizes[blocks].sum(dtype=np.int64)))
        return msgspec.structs.replace(view, pushed_bytes=pushed(consumer.snapshot.id, window.blocks))

    # --- what jobs say ----------------------------------------------------------------------------------------------

    def publish(self, request: JobPublish) -> JobView:
        """Raises ConfigError, NotFound."""
        _check(request)
        snapshot = self._snapshot(request)
        job = self._jobs.get(request.job)
        if job is None or job.state != RUNNING:
            if job is not None:
                self._forget(job)
            job = self._jobs[request.job] = Job(request.job, request.source)
            log.info("job %s began (%s)", job.name, request.source or "published")
        known = job.consumers.get(request.consumer)
        if known is not None:
            if known.request == request:
                known.lease.renew()
                return self.view(job)
            self._close(job, known)
        self._begin(job, request, snapshot)
        return self.view(job)

    def _begin(self, job: Job, request: JobPublish, snapshot: Snapshot) -> Consumer:
        job.datasets[snapshot.id] = request.dataset
        if request.map is not None:
            job.maps[snapshot.id] = request.map
        sample_map = job.maps.get(snapshot.id, TREE)
        consumer = Consumer(request, snapshot, sample_map, self._plan, self._sequences)
        job.consumers[request.consumer] = self._consumers[consumer.key] = consumer
        job.last = [view for view in job.last if view.consumer != consumer.name]
        self.unsaved.add(job.name)
        return consumer

    def epoch(self, request: JobEpoch) -> None:
        """Raises NotFound, ConfigError."""
        consumer = self._consumer(request.job, request.consumer)
        if request.epoch < 0 or len(request.order) % 4:
            raise ConfigError(
                f"epoch {request.epoch} of job {request.job}: expected u32 sample numbers, and epochs from 0 on"
            )
        consumer.add_order(request.epoch, order_of(request.order))
        self.unsaved.add(request.job)

    def progress(self, request: JobProgress) -> None:
        """Raises NotFound, ConfigError."""
        if request.epoch < 0 or request.position < 0:
            raise ConfigError(f"job {request.job}: epochs and positions count from 0")
        consumer = self._consumer(request.job, request.consumer)
        consumer.told(request.epoch, request.position)
        if request.ended:
            self._end_consumer(self.get(request.job), consumer, "it said so")

    def cancel(self, name: str) -> None:
        """Raises NotFound."""
        self._end(self.get(name), CANCELLED, "cancelled")

    # --- over a restart ---------------------------------------------------------------------------------------------

    def restore(self, record: JobRecord, places: Places) -> None:
        """Take up a job where an earlier daemon left it. Raises CachefsError where nobody is there to read on, and
        IndexError or ValueError for a record that makes no sense; nothing has begun then."""
        job = Job(record.job, record.source, record.started)
        maps = {snapshot: record.maps[number] for snapshot, number in record.latest.items()}
        job.maps, living, lost = dict(maps), [], []
        for known in record.consumers:
            request, lease = known.request, Liveness(known.request.pid, known.request.lease)
            if known.map >= 0:
                request = msgspec.structs.replace(request, map=record.maps[known.map])
            orders = {epoch: order_of(order) for epoch, order in known.orders.items()}
            try:
                if known.born and abs(known.born - lease.born) > CLOCK_STEP:
                    raise NotFound(f"its process {request.pid} is gone")
                snapshot = self._snapshot(msgspec.structs.replace(known.request, snapshot=known.snapshot))
            except CachefsError as error:
                lost.append(str(error))
                continue
            living.append((request, snapshot, orders))
        if not living:
            raise NotFound("; ".join(dict.fromkeys(lost)))
        for request, snapshot, orders in living:
            consumer = self._begin(job, request, snapshot)
            for epoch, order in orders.items():
                consumer.add_order(epoch, order)
            if request.consumer in places:
                consumer.told(*places[request.consumer])
        job.maps = maps
        self._jobs[job.name] = job

    # --- what is seen of them ---------------------------------------------------------------------------------------

    def on_reads(self, accessed: Sequence[bytes], stalls: Sequence[Stall], pages: States = NOTHING) -> Observed:
        """A mount reports blocks that were read, in order, and reads that waited. pages: what is in its page cache."""
        waited = self._attribute(stalls)
        tripped: dict[str, Ids] = {}
        own_reads: dict[str, int] = {}
        now = time.monotonic()
        for snapshot, consumers in self._by_snapshot().items():
            followers = [consumer.follower for consumer in consumers if consumer.follower is not None]
            ids = self._plan.spaces[snapshot].ids(accessed)
            ids = ids[ids >= 0]
            before = [follower.matched for follower in followers]
            if snapshot in pages:
                passed = self._trip(consumers, ids, pages[snapshot])
                tripped[snapshot] = passed.wires
                if len(passed.reads):
                    ids = ids[~np.isin(ids, passed.reads)]
            observe(followers, ids)
            for consumer, follower, matched in zip(consumers, followers, before, strict=True):
                if follower.matched > matched:
                    consumer.lease.renew()
                    own_reads[consumer.key] = follower.matched - matched
                follower.measure(now, waited.get(consumer.key, 0.0), consumer.request.workers)
                consumer.moved()
        return Observed(tripped, own_reads)

    def _trip(self, consumers: Sequence[Consumer], ids: Ids, states: npt.NDArray[np.uint8]) -> Passed:
        """Move those consumers on whose tripwires these are."""
        found, now = [Passed(ids[:0], ids[:0])], time.monotonic()
        for consumer in consumers:
            assert consumer.follower is not None
            window = self._plan.window(consumer.key, 0, VISIBLE)
            if window is not None:
                shown = float(np.mean(WANTED[states[window.blocks]]))
                consumer.follower.hidden = 1 / max(shown, 1 / MOST_HIDDEN)
                # Of several, one's tripwires are read by the others too: far ahead they prove nothing.
                unseen = consumer.unseen(now) if len(consumers) == 1 else 0
                found.append(consumer.follower.tripped(ids, consumer.left_out, unseen))
        return Passed(np.concatenate([one.wires for one in found]), np.concatenate([one.reads for one in found]))

    def readers(self, latency: float) -> list[Reader]:
        """Those whose pages are pushed, by orders that take *latency* seconds."""
        now = time.monotonic()
        consumers = {consumer.key: consumer for consumer in self._consumers.values()}
        return [
            Reader(key, one.snapshot.id, one.passed_by(now, latency), one.searched(now), one.tripwires)
            for key in self._plan.consumers()
            if (one := consumers.get(key)) is not None
        ]

    @property
    def consumer_keys(self) -> Collection[str]:
        """Of all consumers of running jobs, as the plan knows them."""
        return self._consumers.keys()

    def margin(self) -> float:
        """Seconds by which some reader may be ahead of its place in the plan: that of its last report, and of the
        slowest of its loader's workers."""
        return max((consumer.margin for consumer in self._consumers.values()), default=0.0)

    def fetched(self, key: str, size: int) -> None:
        """*size* bytes were fetched ahead for the consumer *key*."""
        consumer = self._consumers.get(key)
        if consumer is not None:
            consumer.fetched_bytes += size

    def _attribute(self, stalls: Sequence[Stall]) -> dict[str, float]:
        """Seconds that each consumer has waited."""
        owners: list[Consumer | None] = [None] * len(stalls)
        if stalls:
            for snapshot, consumers in self._by_snapshot().items():
                space = self._plan.spaces[snapshot]
                ids = space.ids([stall.key for stall in stalls])
                here = np.flatnonzero(ids >= 0)
                for consumer in consumers:
                    # A sequence that is wrong claims nothing; if there is only one, it is still its job that waits.
                    theirs = np.ones(len(here), np.bool_) if len(consumers) == 1 else _claims(consumer, ids[here])
                    for place in here[theirs].tolist():
                        if owners[place] is None:
                            owners[place] = consumer
                            consumer.fetched_bytes += int(space.sizes[ids[place]]) * (stalls[place].source == "origin")
        waited: dict[str, float] = {}
        for stall, owner in zip(stalls, owners, strict=True):
            if owner is None:
                self.stalls.add("", "", 0, stall.source, stall.seconds)
            else:
                self.stalls.add(owner.request.job, owner.name, owner.epoch, stall.source, stall.seconds)
                waited[owner.key] = waited.get(owner.key, 0.0) + stall.seconds
        return waited

    def _by_snapshot(self) -> dict[str, list[Consumer]]:
        """Those whose place is known."""
        found: dict[str, list[Consumer]] = {}
        for consumer in self._consumers.values():
            if consumer.follower is not None:
                found.setdefault(consumer.snapshot.id, []).append(consumer)
        return found

    # --- their ends ---------------------------------------------------------------------------------------------------

    async def end_lapsed(self) -> None:
        """End what is there no longer; to be called every few seconds."""
        for job in self:
            for consumer in list(job.consumers.values()):
                reason = consumer.lease.lapsed()
                if reason:
                    self._end_consumer(job, consumer, reason)
        await self._sequences.close_unused({consumer.snapshot.id for consumer in self._consumers.values()})

    async def close(self) -> None:
        for consumer in self._consumers.values():
            consumer.close()

    def _consumer(self, job: str, name: str) -> Consumer:
        found = self.get(job)
        consumer = found.consumers.get(name)
        if consumer is None:
            state = f"has {found.state}" if found.state != RUNNING else "has not published it"
            raise NotFound(f"job {job} has no consumer {name!r}: it {state}; publish first")
        return consumer

    def _end_consumer(self, job: Job, consumer: Consumer, reason: str) -> None:
        job.last.append(self._ended_view(consumer))
        self._close(job, consumer)
        if not job.consumers:
            self._end(job, ENDED, reason)
        else:
            log.info("consumer %s of job %s ended: %s", consumer.name, job.name, reason)

    def _ended_view(self, consumer: Consumer) -> ConsumerView:
        return msgspec.structs.replace(consumer.view(0), state=ENDED)

    def _close(self, job: Job, consumer: Consumer) -> None:
        consumer.close()
        del job.consumers[consumer.name]
        del self._consumers[consumer.key]
        self.unsaved.add(job.name)
        job.fetched_bytes += consumer.fetched_bytes

    def _end(self, job: Job, state: str, reason: str) -> None:
        if job.state != RUNNING:
            return
        for consumer in list(job.consumers.values()):
            job.last.append(self._ended_view(consumer))
            self._close(job, consumer)
        job.state, job.reason = state, reason
        log.info("job %s ended: %s", job.name, reason)
        for old in [one for one in self if one.state != RUNNING][:-ENDED_KEPT]:
            self._forget(old)

    def _forget(self, job: Job) -> None:
        del self._jobs[job.name]
        self.stalls.forget(job.name)

    def _snapshot(self, request: JobPublish) -> Snapshot:
        """The one it names by its first digits, else the dataset's current one."""
        if not request.snapshot:
            return self._datasets.snapshot(request.dataset)
        for snapshot in self._datasets.generations(self._datasets.get(request.dataset)):
            if snapshot.id.startswith(request.snapshot):
                return snapshot
        raise NotFound(f"dataset {request.dataset} has no snapshot {request.snapshot} on this node")


def _claims(consumer: Consumer, ids: Ids) -> npt.NDArray[np.bool_]:
    assert consumer.follower is not None
    return consumer.follower.claim(ids).mine | consumer.follower.knows(ids)


def _check(request: JobPublish) -> None:
    """Raises ConfigError."""
    if not _NAME.fullmatch(request.job):
        raise ConfigError(f"{request.job!r} cannot name a job: use 1 to 128 of A-Z a-z 0-9 . _ : @ + -")
    if not 0 < request.lease <= MAX_LEASE:
        raise ConfigError(f"job {request.job}: lease {request.lease:g} s: expected more than 0, and at most a week")
    if not 0 <= request.rank < request.world_size:
        raise ConfigError(f"job {request.job}: rank {request.rank} is not below the world size {request.world_size}")
    if request.workers < 0 or request.batch_size < 1 or request.prefetch < 0:
        raise ConfigError(f"job {request.job}: workers, batch size and prefetch cannot be negative, or a batch empty")
    if request.spec is not None:
        _check_spec(request.job, request.spec)
    if request.map is not None and request.map.kind not in MAPS:
        raise ConfigError(f"job {request.job}: sample map {request.map.kind!r}: expected one of {', '.join(MAPS)}")


def _check_spec(job: str, spec: SamplerSpec) -> None:
    if spec.kind not in SAMPLERS:
        raise ConfigError(f"job {job}: sampler {spec.kind!r}: expected one of {', '.join(SAMPLERS)}")
    if not 0 <= spec.size <= MAX_SAMPLES or not 1 <= spec.epochs <= MAX_EPOCHS:
        raise ConfigError(f"job {job}: {spec.size} samples in {spec.epochs} epochs are not possible")
    if not 0 <= spec.rank < spec.replicas:
        raise ConfigError(f"job {job}: rank {spec.rank} is not below the number of replicas {spec.replicas}")
