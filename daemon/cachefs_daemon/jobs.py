"""The jobs that have said how they will read, from their first word to their end."""

import logging
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.errors import ConfigError, NotFound
from cachefs.job_messages import (
    ConsumerView,
    JobEpoch,
    JobProgress,
    JobPublish,
    JobView,
    SampleMap,
    SamplerSpec,
)  # fmt: skip
from cachefs.snapshot import Snapshot
from cachefs_daemon.datasets import Datasets
from cachefs_daemon.lease import Lease

log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:@+-]{0,127}")
SAMPLERS: Final = ("sequential", "torch-random", "torch-distributed", "numpy", "explicit")
MAPS: Final = ("tree", "files", "records")
MAX_EPOCHS: Final = 1_000_000
MAX_SAMPLES: Final = 2**32 - 1
MAX_LEASE: Final = 7 * 86400.0
# Jobs that have ended are shown for a while: what stalled, and why they ended.
ENDED_KEPT: Final = 64

RUNNING: Final = "running"
ENDED: Final = "ended"
CANCELLED: Final = "cancelled"

Order = npt.NDArray[np.uint32]


@dataclass(slots=True, eq=False)
class Consumer:
    """One reader of a job. orders: explicit ones by epoch, while they are needed; epoch, position: how far it is."""

    name: str
    request: JobPublish
    snapshot: Snapshot
    lease: Lease
    orders: dict[int, Order] = field(default_factory=dict)
    epoch: int = 0
    position: int = 0

    def view(self) -> ConsumerView:
        spec = self.request.spec
        known = set(self.orders) | set(range(spec.epochs) if spec is not None and spec.kind != "explicit" else ())
        return ConsumerView(
            consumer=self.name,
            epoch=self.epoch,
            position=self.position,
            epoch_length=len(self.orders.get(self.epoch, ())),
            known_epochs=sorted(known),
            rate=0.0,
            matched=0,
            mismatched=0,
            state="waiting",
        )


@dataclass(slots=True, eq=False)
class Job:
    """started: unix seconds; maps: the sample map last published for each snapshot; reason: why it ended."""

    name: str
    source: str
    started: float = field(default_factory=time.time)
    state: str = RUNNING
    reason: str = ""
    consumers: dict[str, Consumer] = field(default_factory=dict)
    maps: dict[str, SampleMap] = field(default_factory=dict)

    def view(self) -> JobView:
        consumers = list(self.consumers.values())
        return JobView(
            job=self.name,
            dataset=",".join(dict.fromkeys(consumer.request.dataset for consumer in consumers)),
            snapshot=",".join(dict.fromkeys(consumer.snapshot.id for consumer in consumers)),
            source=self.source,
            started=self.started,
            state=self.state,
            consumers=[consumer.view() for consumer in consumers],
            problems=[self.reason] if self.reason else [],
        )


class Jobs:
    """Used from the event loop only."""

    def __init__(self, datasets: Datasets) -> None:
        self._datasets = datasets
        self._jobs: dict[str, Job] = {}

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def get(self, name: str) -> Job:
        """Raises NotFound."""
        job = self._jobs.get(name)
        if job is None:
            raise NotFound(f"no job named {name!r} has published anything here; see `cachectl job list`")
        return job

    def publish(self, request: JobPublish) -> JobView:
        """Raises ConfigError, NotFound."""
        _check(request)
        snapshot = self._snapshot(request)
        job = self._jobs.get(request.job)
        if job is None or job.state != RUNNING:
            self._jobs.pop(request.job, None)
            job = self._jobs[request.job] = Job(request.job, request.source)
            log.info("job %s began (%s)", job.name, request.source or "published")
        lease = Lease(request.pid, request.lease)
        job.consumers[request.consumer] = Consumer(request.consumer, request, snapshot, lease)
        if request.map is not None:
            job.maps[snapshot.id] = request.map
        return job.view()

    def epoch(self, request: JobEpoch) -> None:
        """Raises NotFound, ConfigError."""
        consumer = self._consumer(request.job, request.consumer)
        if request.epoch < 0 or len(request.order) % 4:
            raise ConfigError(
                f"epoch {request.epoch} of job {request.job}: expected u32 sample numbers from epoch 0 on"
            )
        consumer.lease.renew()
        consumer.orders[request.epoch] = np.frombuffer(request.order, "<u4").astype(np.uint32, copy=False)

    def progress(self, request: JobProgress) -> None:
        """Raises NotFound."""
        consumer = self._consumer(request.job, request.consumer)
        consumer.lease.renew()
        consumer.epoch, consumer.position = request.epoch, request.position
        if request.ended:
            self._end_consumer(self.get(request.job), consumer, "it said so")

    def cancel(self, name: str) -> None:
        """Raises NotFound."""
        self._end(self.get(name), CANCELLED, "cancelled")

    def end_lapsed(self) -> None:
        """End what is there no longer; to be called every few seconds."""
        for job in self:
            if job.state == RUNNING:
                for consumer in list(job.consumers.values()):
                    reason = consumer.lease.lapsed()
                    if reason:
                        self._end_consumer(job, consumer, reason)

    def _consumer(self, job: str, name: str) -> Consumer:
        found = self.get(job)
        consumer = found.consumers.get(name)
        if consumer is None or found.state != RUNNING:
            state = f"has {found.state}" if found.state != RUNNING else "has not published it"
            raise NotFound(f"job {job} has no consumer {name!r}: it {state}; publish first")
        return consumer

    def _end_consumer(self, job: Job, consumer: Consumer, reason: str) -> None:
        if len(job.consumers) == 1:
            self._end(job, ENDED, reason)
        else:
            del job.consumers[consumer.name]
            log.info("consumer %s of job %s ended: %s", consumer.name, job.name, reason)

    def _end(self, job: Job, state: str, reason: str) -> None:
        if job.state != RUNNING:
            return
        job.state, job.reason = state, reason
        log.info("job %s ended: %s", job.name, reason)
        for old in [one.name for one in self if one.state != RUNNING][:-ENDED_KEPT]:
            del self._jobs[old]

    def _snapshot(self, request: JobPublish) -> Snapshot:
        """The one it names by its first digits, else the dataset's current one."""
        if not request.snapshot:
            return self._datasets.snapshot(request.dataset)
        for snapshot in self._datasets.generations(self._datasets.get(request.dataset)):
            if snapshot.id.startswith(request.snapshot):
                return snapshot
        raise NotFound(f"dataset {request.dataset} has no snapshot {request.snapshot} on this node")


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
