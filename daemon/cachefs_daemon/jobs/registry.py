"""The jobs that have published how they will read, from their first message to their end."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec
import numpy as np

from cachefs.errors import Busy, CachefsError, ConfigError, NotFound
from cachefs.identity import UNKNOWN_OWNER
from cachefs.job_messages import (
    MAX_NOTE,
    ConsumerView,
    JobEpoch,
    JobProgress,
    JobPublication,
    JobView,
    OriginShare,
    SampleMap,
    StallRow,
)
from cachefs.largest_user import find_largest_user
from cachefs.messages import REPORT_SHARE, Trouble
from cachefs.planning.blocks.presence import ABSENT, Presence
from cachefs.planning.blocks.space import Ids
from cachefs.planning.pagecache.push_lookahead import PushReader
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.position_estimate import REPORT_SECONDS
from cachefs.planning.sequences.sampler_spec import MAX_EPOCHS, MAX_SAMPLES
from cachefs.snapshot import Snapshot
from cachefs.trouble_texts import is_failing
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.jobs.consumer import Consumer
from cachefs_daemon.jobs.consumer_reads import check_size, decode_order
from cachefs_daemon.jobs.epoch_loader import EpochLoader
from cachefs_daemon.jobs.job_files import NO_PRIORITY, ConsumerPositions, JobPriority, JobRecord
from cachefs_daemon.jobs.owners import name_without_owner, no_such_job_error, owner_of, owner_text
from cachefs_daemon.jobs.publish_checks import check_publication, is_loader_valid
from cachefs_daemon.jobs.refetch_log import RefetchLog
from cachefs_daemon.jobs.sample_maps import TREE
from cachefs_daemon.jobs.stalls import Stalls, merge_rows
from cachefs_daemon.jobs.states import ConsumerState, JobState
from cachefs_daemon.ports import LOCAL_PLACEMENT, Placement
from cachefs_daemon.runtime.boot_clock import birth_of

log = logging.getLogger(__name__)

# Seconds by which a job may be published after its first reads.
LATE_PUBLICATION_SECONDS: Final = 10.0
# Most running jobs on the node, and most consumers of all of them.
MAX_JOBS: Final = 1024
MAX_CONSUMERS: Final = 8192
# One part in USER_LIMIT_DIVISOR is what each user may have, except the one that the daemon runs as; and what all users
# that publish through control files may have together.
USER_LIMIT_DIVISOR: Final = 4
_EVICTED_FOR_USER: Final = "another user of control files needed room, and this user had most of the room there"
# Reads of all consumers that are examined for display (20 ms). Of more, every n-th stands for the others.
MAX_EXAMINED_READS: Final = 1 << 21
# Ended jobs that are still shown, with their stalls and the reason for their end.
MAX_ENDED_JOBS: Final = 64
# Ended consumers of a running job that are still shown: the last ones.
MAX_ENDED_CONSUMERS: Final = 64

# Returns how many bytes of some blocks (numbers, shape (n,), int32) of a snapshot are in a page cache.
PushedBytes = Callable[[str, Ids], int]


@dataclass(slots=True, eq=False)
class Job:
    """The state of one job."""

    name: str
    # The publisher of the job.
    source: str
    # When the job began, in unix seconds.
    started: float = field(default_factory=time.time)
    state: JobState = JobState.RUNNING
    # The reason for its end; "" where it ended itself or was cancelled.
    reason: str = ""
    # The present consumers, by name.
    consumers: dict[str, Consumer] = field(default_factory=dict)
    # The sample map last published for each snapshot.
    maps: dict[str, SampleMap] = field(default_factory=dict)
    # The name of the dataset of each snapshot.
    datasets: dict[str, str] = field(default_factory=dict)
    # The last state of consumers that have ended.
    ended_views: list[ConsumerView] = field(default_factory=list)
    # Bytes that were fetched for the job: from origins, and from other nodes.
    fetched_bytes: int = 0
    peer_bytes: int = 0
    # Unix time since which failed reads may be its own: its first reads may precede its publication, but not its
    # process.
    reads_since: float = 0.0
    # The causes of its failed reads, when it ended.
    troubles: list[Trouble] = field(default_factory=list)
    # Its weight where jobs share an origin.
    priority: JobPriority = NO_PRIORITY


class JobTroubles(Protocol):
    """The troubles of the node, as those of its jobs."""

    def troubles_of(self, job: str, snapshots: Sequence[str], began: float, *, fresh: bool = False) -> list[Trouble]:
        """Return the troubles of a job that reads snapshots with these ids since a unix time in seconds. fresh: do not
        use a cached list."""


class _NoTroubles:
    def troubles_of(self, job: str, snapshots: Sequence[str], began: float, *, fresh: bool = False) -> list[Trouble]:
        return []


class JobRegistry:
    """All jobs of the node, and the life of each. Used from the event loop only."""

    def __init__(
        self,
        datasets: Catalog,
        plan: Plan,
        presence: Presence,
        loader: EpochLoader,
        capacity: Callable[[], float],
        placement: Placement = LOCAL_PLACEMENT,
    ) -> None:
        """capacity: returns the bytes that the node's tiers keep."""
        self.stalls = Stalls()
        # Weights of jobs where they share an origin, also of jobs of other nodes; 1 where missing.
        self.weights: dict[str, float] = {}
        self._capacity = capacity
        self._refetched = RefetchLog(plan, presence, capacity)
        self._troubles: JobTroubles = _NoTroubles()
        self._waiting_stalls: Callable[[], list[StallRow]] = list
        self._origin_shares: Callable[[str], list[OriginShare]] = lambda job: []
        self._placement = placement
        self.unsaved_jobs: set[str] = set()  # names of jobs whose files are out of date; the saver empties it
        self._catalog = datasets
        self._plan = plan
        self._presence = presence
        self._loader = loader
        self._jobs: dict[str, Job] = {}  # by name
        self._consumers: dict[str, Consumer] = {}  # of running jobs, by key

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def get(self, name: str) -> Job:
        """Return the job of that full name. Raises NotFound."""
        job = self._jobs.get(name)
        if job is None:
            raise no_such_job_error(name_without_owner(name))
        return job

    def job_view(self, job: Job, pushed: PushedBytes = lambda snapshot, blocks: 0) -> JobView:
        """Return the job as `cachectl job show` shows it."""
        consumers = [self._consumer_view(consumer, pushed) for consumer in job.consumers.values()]
        stalled = {name: dict(kinds) for name, kinds in self.stalls.seconds_of_consumers(job.name).items()}
        for row in self._waiting_rows(job.name):
            kinds, kind = stalled.setdefault(row.consumer, {}), row.source.partition(" ")[0]
            kinds[kind] = kinds.get(kind, 0.0) + row.seconds
        views = [*job.ended_views, *consumers]
        if stalled:
            views = [msgspec.structs.replace(one, stalled=stalled.get(one.consumer, {})) for one in views]
        return self._make_job_view(job, views)

    def report_troubles_of(
        self,
        troubles: JobTroubles,
        waiting_stalls: Callable[[], list[StallRow]],
        origin_shares: Callable[[str], list[OriginShare]],
    ) -> None:
        """Report with each job its troubles, its reads that wait, and what it wants of origins. waiting_stalls: returns
        the stalls that have not ended, of all jobs and of readers that have published nothing. origin_shares: returns
        the shares of a job."""
        self._troubles, self._waiting_stalls, self._origin_shares = troubles, waiting_stalls, origin_shares

    def stall_rows(self, job: str = "") -> list[StallRow]:
        """Return the stalls of one job, or of all, including those that have not ended."""
        return merge_rows([*self.stalls.stall_rows(job), *self._waiting_rows(job)])

    def _waiting_rows(self, job: str) -> list[StallRow]:
        """Return the stalls of one job, or of all, that have not come to an end."""
        return [row for row in self._waiting_stalls() if not job or row.job == job]

    def waited_reads(self, job: str) -> tuple[int, float]:
        """Return how many reads of a job have waited, or wait now, and for how many seconds altogether."""
        count, seconds = self.stalls.waited_of_job(job)
        waiting = self._waiting_rows(job)
        return count + sum(row.count for row in waiting), seconds + sum(row.seconds for row in waiting)

    def troubles_of(self, job: Job) -> list[Trouble]:
        """Return the troubles that concern the job's reads, and the causes of its failed reads."""
        if job.state != JobState.RUNNING:
            return job.troubles
        return self._troubles.troubles_of(job.name, list(job.datasets), job.reads_since)

    def _make_job_view(self, job: Job, consumers: list[ConsumerView]) -> JobView:
        waited, seconds = self.waited_reads(job.name)
        waiting = self._waiting_rows(job.name)
        return JobView(
            job=job.name,
            dataset=",".join(dict.fromkeys(job.datasets.values())),
            snapshot=",".join(job.datasets),
            source=job.source,
            started=job.started,
            state=job.state,
            consumers=consumers,
            stalls=waited,
            stall_seconds=seconds,
            fetched_bytes=job.fetched_bytes,
            peer_bytes=job.peer_bytes,
            fetched_again=self._refetched.refetches_of(job.name),
            reason=job.reason,
            troubles=self.troubles_of(job),
            waiting=sum(row.waiting for row in waiting),
            longest=max((row.longest for row in waiting), default=0.0),
            weight=job.priority.weight,
            origins=self._origin_shares(job.name) if job.state == JobState.RUNNING else [],
        )

    def _consumer_view(self, consumer: Consumer, pushed: PushedBytes) -> ConsumerView:
        now = time.monotonic()
        states = self._presence.states.get(consumer.snapshot.id)
        window = self._plan.window(consumer.key, 0, MAX_SAMPLES)
        if states is None or window is None:
            return consumer.make_view(0, now)
        every = max(1, len(window.blocks) * len(self._consumers) // MAX_EXAMINED_READS)
        looked_at = window.blocks[::every]
        here = looked_at[states[looked_at] != ABSENT]
        ahead = every * int(self._plan.spaces[consumer.snapshot.id].sizes[here].sum(dtype=np.int64))
        view = consumer.make_view(ahead, now)
        return msgspec.structs.replace(view, pushed_bytes=every * pushed(consumer.snapshot.id, looked_at))

    # --- calls of jobs ----------------------------------------------------------------------------------------------

    def publish(self, request: JobPublication) -> JobView:
        """Process a consumer's publication. The returned view has this consumer only: with a thousand ranks, all of
        them in each response took a minute. Raises ConfigError, NotFound, Busy."""
        check_publication(request)
        snapshot = self._requested_snapshot(request)
        running = self._running_job(request.job)
        latest = running.maps.get(snapshot.id) if running is not None else None
        if request.map is not None and request.map == latest:
            request = msgspec.structs.replace(request, map=latest)  # kept once, however many ranks publish it
        samples = _sample_count(request.map or latest or TREE, snapshot)
        if request.spec is not None and samples is not None:
            check_size(request.spec, samples)
        known = running.consumers.get(request.consumer) if running is not None else None
        with self._loader.plan_memory.hold_maps(request.job, *_as_sequence(request.map)):
            if known is None:  # only now, so that no job is ended for a map that cannot be held
                self._check_limits(running, request)
                running = self._running_job(request.job)  # its last consumer may have been ended
            job = running or self._create_job(request)
            if known is None:
                consumer = self._add_consumer(job, request, snapshot)
            elif known.request != request or known.is_given_up:
                consumer = self._replace_consumer(job, known, request, snapshot)
            else:
                consumer = known
                consumer.liveness.renew(time.monotonic())
        return self._make_job_view(job, [consumer.make_view(0, time.monotonic())])

    def _running_job(self, name: str) -> Job | None:
        job = self._jobs.get(name)
        return job if job is not None and job.state == JobState.RUNNING else None

    def _create_job(self, request: JobPublication) -> Job:
        before = self._jobs.get(request.job)
        if before is not None:
            self._forget_job(before)
        job = self._jobs[request.job] = Job(request.job, request.source)
        log.info("job %s began (%s)", job.name, request.source or "published")
        return job

    def _check_limits(self, job: Job | None, request: JobPublication) -> None:
        """Raise Busy where another consumer, or a job for it (*job* is None), would exceed a limit of the node or of
        one user. The limit per user keeps one user from shutting the others out."""
        owner = owner_of(request.job)
        if owner == UNKNOWN_OWNER:
            self._make_room_for_user(request.sent_by, has_job=job is not None)
        if owner:
            consumers = sum(owner_of(consumer.request.job) == owner for consumer in self._consumers.values())
            jobs = sum(one.state == JobState.RUNNING and owner_of(one.name) == owner for one in self._jobs.values())
            if consumers >= MAX_CONSUMERS // USER_LIMIT_DIVISOR or (
                job is None and jobs >= MAX_JOBS // USER_LIMIT_DIVISOR
            ):
                raise Busy(
                    f"{jobs:,} jobs of {owner_text(owner)} with {consumers:,} consumers run here; end some of these"
                )
        if len(self._consumers) >= MAX_CONSUMERS:
            raise Busy(f"the jobs of this node have {MAX_CONSUMERS:,} consumers; end some (`cachectl job cancel`)")
        if job is None and sum(one.state == JobState.RUNNING for one in self._jobs.values()) >= MAX_JOBS:
            raise Busy(f"{MAX_JOBS:,} jobs run on this node; end some (`cachectl job cancel`)")

    def _make_room_for_user(self, user: int | None, *, has_job: bool) -> None:
        """Make room for a consumer, and for a job where it has none, that *user* publishes through a control file.
        Where the share of control files is full, the user with most of it loses what was silent for longest. Where that
        is *user*, nothing changes."""
        now = time.monotonic()
        consumers = [one for one in self._consumers.values() if owner_of(one.request.job) == UNKNOWN_OWNER]
        jobs = {consumer.request.job: consumer.request.sent_by for consumer in reversed(consumers)}
        if not has_job and len(jobs) >= MAX_JOBS // USER_LIMIT_DIVISOR:
            loser = find_largest_user(((job, 1) for job in jobs.values()), user, 1)
            silent = {one.request.job: one.liveness.silence(now) for one in _by_silence(consumers, now)}
            theirs = [name for name, one in jobs.items() if one == loser != user]
            if theirs:
                self._end_job(self._jobs[max(theirs, key=silent.__getitem__)], JobState.ENDED, _EVICTED_FOR_USER)
                return
        if len(consumers) >= MAX_CONSUMERS // USER_LIMIT_DIVISOR:
            loser = find_largest_user(((consumer.request.sent_by, 1) for consumer in consumers), user, 1)
            of_loser = [one for one in _by_silence(consumers, now) if one.request.sent_by == loser != user]
            if of_loser:
                self._end_consumer(self._jobs[of_loser[0].request.job], of_loser[0], _EVICTED_FOR_USER)

    def _replace_consumer(self, job: Job, known: Consumer, request: JobPublication, snapshot: Snapshot) -> Consumer:
        """Replace *known* by another consumer. Published orders stay where the publication is the same."""
        orders = known.published_orders if known.request == request else {}
        self._forget_consumer(job, known)
        consumer = self._add_consumer(job, request, snapshot)
        if consumer.snapshot.id == known.snapshot.id:
            known.close_for_successor(consumer)
        else:
            known.close()
        consumer.keep_orders(orders, time.monotonic())
        return consumer

    def _add_consumer(self, job: Job, request: JobPublication, snapshot: Snapshot) -> Consumer:
        job.datasets[snapshot.id] = request.dataset
        if request.map is not None:
            self._loader.plan_memory.hold_map(request.map, job.name)  # held by the consumer
            self._set_map(job, snapshot.id, request.map)
        sample_map = job.maps.get(snapshot.id, TREE)
        consumer = Consumer(request, snapshot, sample_map, self._plan, self._loader, self._refetched.start_snapshot)
        if not job.reads_since:
            born = consumer.liveness.process_start
            job.reads_since = max(job.started - LATE_PUBLICATION_SECONDS, born.unix_time if born is not None else 0.0)
        job.consumers[request.consumer] = self._consumers[consumer.key] = consumer
        job.ended_views = [view for view in job.ended_views if view.consumer != consumer.name]
        self.unsaved_jobs.add(job.name)
        return consumer

    def _set_map(self, job: Job, snapshot: str, sample_map: SampleMap | None) -> None:
        """Set the map that *job* has published last for that snapshot; None removes it."""
        before = job.maps.pop(snapshot, None)
        if sample_map is not None:
            self._loader.plan_memory.hold_map(sample_map, job.name)
            job.maps[snapshot] = sample_map
        if before is not None:
            self._loader.plan_memory.release_map(before)

    def add_order(self, request: JobEpoch) -> None:
        """Process the published order of an epoch. Raises NotFound, ConfigError; Busy where the epoch is too far ahead,
        StoreFull where there is no memory for the order now."""
        consumer = self._consumer(request.job, request.consumer)
        if not 0 <= request.epoch < MAX_EPOCHS or len(request.order) % 4:
            raise ConfigError(
                f"epoch {request.epoch} of job {name_without_owner(request.job)}: expected u32 sample numbers, and "
                f"epochs from 0 to {MAX_EPOCHS - 1:,}"
            )
        consumer.add_order(request.epoch, decode_order(request.order), time.monotonic())
        self.unsaved_jobs.add(request.job)

    def note_progress(self, request: JobProgress) -> list[int]:
        """Process a consumer's progress, or its end. Return the epochs whose orders it has to publish, or publish
        again. Raises NotFound, ConfigError."""
        epochs_exist = 0 <= request.epoch < MAX_EPOCHS and -1 <= request.part_of < MAX_EPOCHS
        if not epochs_exist or min(request.position, request.part_begins) < 0:
            name = name_without_owner(request.job)
            raise ConfigError(f"job {name}: epochs count from 0 to {MAX_EPOCHS - 1:,}, and positions from 0")
        if len(request.note) > MAX_NOTE or not request.note.isprintable():
            raise ConfigError(
                f"job {name_without_owner(request.job)}: expected a printable note of {MAX_NOTE} characters at most"
            )
        consumer = self._consumer(request.job, request.consumer)
        if request.loader is not None and not is_loader_valid(request.loader):
            raise ConfigError(f"job {name_without_owner(request.job)}: the description of its loader is invalid")
        consumer.note, consumer.loader = request.note, request.loader or consumer.loader
        if request.part_of >= 0:
            consumer.note_part(request.epoch, request.part_of, request.part_begins)
        consumer.note_heartbeat(request.epoch, request.position, time.monotonic())
        if request.ended:
            self._end_consumer(self.get(request.job), consumer)
            return []
        return consumer.wanted_orders

    def cancel(self, name: str) -> None:
        """Stop fetching ahead for the job. Raises NotFound."""
        self._end_job(self.get(name), JobState.CANCELLED)

    def set_priority(self, name: str, priority: JobPriority) -> None:
        """Set the weight of a job of this node. Raises NotFound, and ConfigError for a job that has ended."""
        job = self.get(name)
        if job.state != JobState.RUNNING:
            raise ConfigError(
                f"job {name_without_owner(name)} runs no longer ({job.state}); only a running job has a weight"
            )
        job.priority = priority
        self.weights[name] = priority.weight
        self.unsaved_jobs.add(name)

    # --- restart ----------------------------------------------------------------------------------------------------

    def restore(self, record: JobRecord, positions: ConsumerPositions) -> None:
        """Restore a job of the previous daemon. Raises CachefsError where none of its processes lives or there is no
        memory for its maps, and IndexError or ValueError for a record that makes no sense; nothing has begun then."""
        now = time.monotonic()
        job = Job(record.job, record.source, record.started, priority=record.priority)
        maps = {snapshot: record.maps[number] for snapshot, number in record.latest.items()}
        living, lost = [], []
        for known in record.consumers:
            request = known.request
            if known.map >= 0:
                request = msgspec.structs.replace(request, map=record.maps[known.map])
            begins, _ = positions.get(request.consumer, (0, 0))
            orders = {epoch: decode_order(order) for epoch, order in known.orders.items() if epoch >= begins}
            try:
                check_publication(request)
                if known.born is not None and known.born != birth_of(known.pid):
                    raise NotFound(f"its process {known.pid} has ended")
                snapshot = self._requested_snapshot(msgspec.structs.replace(known.request, snapshot=known.snapshot))
            except CachefsError as error:
                lost.append(str(error))
                continue
            living.append((request, snapshot, orders, known))
        if not living:
            raise NotFound("; ".join(dict.fromkeys(lost)))
        with self._loader.plan_memory.hold_maps(job.name, *record.maps):
            for snapshot_id, sample_map in maps.items():
                self._set_map(job, snapshot_id, sample_map)
            for request, snapshot, orders, known in living:
                consumer = self._add_consumer(job, request, snapshot)
                consumer.note_lost_orders(known.forgotten, known.refused)
                consumer.keep_orders(orders, now)
                if request.consumer in positions:
                    consumer.note_heartbeat(*positions[request.consumer], now)
            for snapshot_id, sample_map in maps.items():
                self._set_map(job, snapshot_id, sample_map)
        self._jobs[job.name] = job
        self.weights[job.name] = job.priority.weight

    # --- queries ----------------------------------------------------------------------------------------------------

    def push_readers(self, latency: float) -> list[PushReader]:
        """Return the consumers whose pages are pushed, by commands that take *latency* seconds."""
        now = time.monotonic()
        return [
            PushReader(
                key,
                one.snapshot.id,
                position.reads_done_within(now, latency),
                position.search_distance(now),
                position.tripwire_interval(now),
            )
            for key in self._plan.consumers()
            if (one := self._consumers.get(key)) is not None and (position := one.position) is not None
        ]

    @property
    def consumers(self) -> Collection[Consumer]:
        """All consumers of running jobs."""
        return self._consumers.values()

    @property
    def consumer_keys(self) -> Collection[str]:
        """The plan's names of the consumers of running jobs."""
        return self._consumers.keys()

    def margins(self) -> dict[str, float]:
        """Return, by key of a consumer, seconds by which it may be ahead of the plan (see
        `PositionEstimate.margin`)."""
        now, share = time.monotonic(), REPORT_SHARE * self._capacity()
        found: dict[str, float] = {}
        for key, consumer in self._consumers.items():
            space = self._plan.spaces.get(consumer.snapshot.id)
            reads = share * space.count / space.bytes if space is not None and space.bytes else math.inf
            found[key] = consumer.position.margin(now, reads) if consumer.position is not None else REPORT_SECONDS
        return found

    def note_fetched_block(self, key: str, block: int, size: int, via: str = "") -> None:
        """Count a block of *size* bytes that was fetched for the consumer *key*. block: its number in the space of the
        consumer's snapshot; via: its source; "" for an origin."""
        consumer = self._consumers.get(key)
        job = self._jobs.get(consumer.request.job) if consumer is not None else None
        if consumer is not None and job is not None:
            if via:
                job.peer_bytes += size
            else:
                job.fetched_bytes += size
                self._refetched.count_fetch(
                    job.name, consumer.shown_epoch, consumer.snapshot.id, block, time.monotonic()
                )

    # --- end of consumers and jobs ------------------------------------------------------------------------------------

    async def end_gone(self) -> None:
        """End the consumers that are gone, and jobs without any other. Call every few seconds."""
        now = time.monotonic()
        for job in self:
            for consumer in list(job.consumers.values()):
                reason = consumer.liveness.end_reason(now)
                if reason:
                    self._end_consumer(job, consumer, reason)
        self._refetched.keep_snapshots({consumer.snapshot.id for consumer in self._consumers.values()})
        await self._loader.forget_unused(
            lambda: {
                *self._placement.used_snapshots(),
                *(consumer.snapshot.id for consumer in self._consumers.values()),
            }
        )

    async def close(self) -> None:
        for consumer in self._consumers.values():
            consumer.close()

    def _consumer(self, job: str, name: str) -> Consumer:
        found = self.get(job)
        consumer = found.consumers.get(name)
        if consumer is None:
            state = f"has {found.state}" if found.state != JobState.RUNNING else "has not published it"
            raise NotFound(f"job {name_without_owner(job)} has no consumer {name!r}: it {state}; publish first")
        return consumer

    def _end_consumer(self, job: Job, consumer: Consumer, reason: str = "") -> None:
        """reason: "" where the consumer itself reported its end."""
        if len(job.consumers) == 1:
            # The consumer exists while the job's failed reads are told from those of others.
            self._end_job(job, JobState.ENDED, reason)
        else:
            self._close_ended_consumer(job, consumer)
            log.info("consumer %s of job %s has ended%s", consumer.name, job.name, _reason_suffix(reason))

    def _close_ended_consumer(self, job: Job, consumer: Consumer) -> None:
        """End the consumer, and keep its last state for display."""
        view = consumer.make_view(0, time.monotonic())
        # The position of its reads, or that none was seen, is no longer a problem.
        view = msgspec.structs.replace(
            view, state=ConsumerState.ENDED, rate=0.0, problem=consumer.lasting_problems_text
        )
        job.ended_views = [*job.ended_views, view][-MAX_ENDED_CONSUMERS:]
        self._close_consumer(job, consumer)

    def _close_consumer(self, job: Job, consumer: Consumer) -> None:
        consumer.close()
        self._forget_consumer(job, consumer)

    def _forget_consumer(self, job: Job, consumer: Consumer) -> None:
        for sample_map in _as_sequence(consumer.request.map):
            self._loader.plan_memory.release_map(sample_map)
        del job.consumers[consumer.name]
        del self._consumers[consumer.key]
        self.unsaved_jobs.add(job.name)

    def _end_job(self, job: Job, state: JobState, reason: str = "") -> None:
        if job.state != JobState.RUNNING:
            return
        troubles = self._troubles.troubles_of(job.name, list(job.datasets), job.reads_since, fresh=True)
        job.troubles = [trouble for trouble in troubles if is_failing(trouble.cause)]
        for consumer in list(job.consumers.values()):
            self._close_ended_consumer(job, consumer)
        for snapshot in list(job.maps):
            self._set_map(job, snapshot, None)
        job.state, job.reason = state, reason
        self.weights.pop(job.name, None)
        end = "ended" if state == JobState.ENDED else "been cancelled"
        log.info("job %s has %s%s", job.name, end, _reason_suffix(reason))
        for old in [one for one in self if one.state != JobState.RUNNING][:-MAX_ENDED_JOBS]:
            self._forget_job(old)

    def _forget_job(self, job: Job) -> None:
        del self._jobs[job.name]
        self.stalls.forget(job.name)
        self._refetched.forget(job.name)

    def _requested_snapshot(self, request: JobPublication) -> Snapshot:
        """Return the snapshot that the request names by its first digits, else the dataset's current one."""
        if not request.snapshot:
            return self._catalog.snapshot(request.dataset)
        for snapshot in self._catalog.generations(self._catalog.get(request.dataset)):
            if snapshot.id.startswith(request.snapshot):
                return snapshot
        raise NotFound(f"dataset {request.dataset} has no snapshot {request.snapshot} on this node")


def _by_silence(consumers: Collection[Consumer], now: float) -> list[Consumer]:
    """Return the consumers in order of silence, the longest first."""
    return sorted(consumers, key=lambda one: -one.liveness.silence(now))


def _reason_suffix(reason: str) -> str:
    return f": {reason}" if reason else ""


def _as_sequence(sample_map: SampleMap | None) -> Sequence[SampleMap]:
    return () if sample_map is None else (sample_map,)


def _sample_count(sample_map: SampleMap, snapshot: Snapshot) -> int | None:
    """Return the number of samples in the map; None where only its files tell."""
    if sample_map.indexer:
        return None
    if sample_map.kind == "tree":
        return snapshot.files
    return len(sample_map.entries) // 4 or len(sample_map.paths)
