"""One consumer of a job: its sequence on the way into the plan, its state for display, and its liveness."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cachefs.errors import Busy, CachefsError, ConfigError, NotFound, StoreFull
from cachefs.job_messages import ConsumerView, JobPublication, LoaderView, SampleMap
from cachefs.planning.blocks.space import BlockSpace, Samples
from cachefs.planning.sequences.follower import SequenceFollower
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.position_estimate import PositionEstimate
from cachefs.planning.sequences.sampler import EpochOrder, SamplerSpec
from cachefs.sizes import format_size
from cachefs.snapshot import Snapshot
from cachefs_daemon.jobs.consumer_reads import check_size, mean_bytes, reorder_window
from cachefs_daemon.jobs.epoch_loader import EpochLoader, PreparedEpoch
from cachefs_daemon.jobs.epochs import MAX_WAITING_BYTES, MAX_WAITING_ORDERS, Epochs
from cachefs_daemon.jobs.liveness import PublisherLiveness
from cachefs_daemon.jobs.owners import name_without_owner, user_of
from cachefs_daemon.jobs.plan_memory import PlanPurpose, plan_bytes
from cachefs_daemon.jobs.states import ConsumerState

log = logging.getLogger(__name__)

SEARCH_SECONDS: Final = 2.0
# Epochs of a spec, from the current one on, in which a lost consumer is searched for, besides the first one.
MAX_SEARCHED_EPOCHS: Final = 16

# A consumer that has begun stands still, or reads what the kernel has cached, when no read is seen for this long.
STANDING_STILL_SECONDS: Final = 10.0

# Pauses before samples are resolved again, after a temporary failure.
RETRY_SECONDS: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
_serial = itertools.count(1)


class ConsumerProblem(Enum):
    """The kinds of problems that a consumer may have."""

    WORK = auto()  # it has no plan, or not yet
    SIZE = auto()  # its sampler is for another number of samples
    SAMPLES = auto()  # its orders name samples that do not exist
    EPOCH = auto()  # it reads an epoch that it has not published
    SHARED = auto()  # other nodes do not receive it


class _EpochPart(NamedTuple):
    """A published epoch that is only a part of one."""

    number: int  # the number under which it was published
    epoch: int  # the job's own epoch to which it belongs
    begins: int  # samples of the own epoch before this part


class _Heartbeat(NamedTuple):
    epoch: int
    samples: int  # how many samples of the epoch are delivered
    when: float  # seconds


class Consumer:
    """One consumer. Its task brings the current epoch and the next into the plan, until `close`. *now* is seconds of a
    monotonic clock."""

    def __init__(
        self,
        request: JobPublication,
        snapshot: Snapshot,
        sample_map: SampleMap,
        plan: Plan,
        loader: EpochLoader,
        on_space: Callable[[BlockSpace, float], None],
    ) -> None:
        """on_space: called with the block space and the monotonic time before any block is fetched for it."""
        self.request = request
        self.key = f"{request.job}/{request.consumer}#{next(_serial)}"  # its name in the plan
        self.snapshot = snapshot
        self.sample_map = sample_map
        self.note = ""  # a remark of its publisher
        self.loader: LoaderView | None = None  # as its process sees it
        self._part: _EpochPart | None = None  # the part that was published last
        self.liveness = PublisherLiveness(
            request.pid, request.lease, time.monotonic(), request.pid_namespace, user_of(request.job)
        )
        self._mean_bytes = 0.0  # of a sample, in the epoch that entered the plan last
        self.position: PositionEstimate | None = None  # None until the plan knows an epoch of the consumer
        self._plan = plan
        self._loader = loader
        self._on_space = on_space
        self._epochs = Epochs(request.spec)
        self._last_heartbeat: _Heartbeat | None = None  # until the plan knows that epoch
        self._replaced_key = ""  # the plan's name of the consumer that this one replaces, while that plan still counts
        self._problems: dict[ConsumerProblem, str] = {}  # the latest of each kind
        self._own_blocks: npt.NDArray[np.bool_] | None = (
            None  # which blocks its samples have; None: all, or not known yet
        )
        self._failures = 0  # consecutive failures to resolve its samples
        self._wakeup = asyncio.Event()  # set when the task has work
        self._task = asyncio.create_task(self._run(sample_map))

    def close(self) -> None:
        self._remove_replaced()
        self._task.cancel()
        self._plan.remove_consumer(self.key)
        self._loader.plan_memory.release_consumer(self.key)

    def close_for_successor(self, successor: "Consumer") -> None:
        """Close, with *successor* in this consumer's place. Until the plan knows an epoch of the successor, this
        consumer's plan still counts: otherwise no block would be about to be read, and all could be evicted."""
        if self._plan.has_consumer(self.key):
            self._remove_replaced()
            successor._replaced_key = self.key
        else:
            successor._replaced_key, self._replaced_key = self._replaced_key, ""
        self._task.cancel()
        self._loader.plan_memory.release_consumer(self.key, PlanPurpose.ORDERS)
        if successor._replaced_key != self.key:
            self.close()

    def _remove_replaced(self) -> None:
        """Remove the plan of the consumer that this one replaces."""
        if self._replaced_key:
            self._plan.remove_consumer(self._replaced_key)
            self._loader.plan_memory.release_consumer(self._replaced_key)
        self._replaced_key = ""

    def _reserve_memory(self, purpose: PlanPurpose, size: int) -> None:
        """Reserve plan memory. The replaced consumer's plan is removed where necessary. Raises StoreFull."""
        try:
            self._loader.plan_memory.reserve(self.key, purpose, size)
        except StoreFull:
            if not self._replaced_key:
                raise
            self._remove_replaced()
            self._loader.plan_memory.reserve(self.key, purpose, size)

    def _leave_plan(self) -> None:
        self._remove_replaced()
        self._plan.remove_consumer(self.key)
        self.position = self._own_blocks = None
        self._epochs.clear()
        self._loader.plan_memory.release_consumer(self.key, PlanPurpose.PLAN)

    def fail(self, error: BaseException) -> None:
        """Give up the plan after an internal error. The consumer has none until it is published again."""
        log.error("job %s, consumer %s: no plan any longer", self.request.job, self.name, exc_info=error)
        self._task.cancel()
        self._leave_plan()
        self._problems[ConsumerProblem.WORK] = f"internal error ({error!r}); see the daemon's log, and publish again"

    @property
    def is_given_up(self) -> bool:
        """Whether there is no plan, and no further attempt to make one."""
        return self._task.done() or self._task.cancelling() > 0

    @property
    def name(self) -> str:
        """Unique within its job."""
        return self.request.consumer

    @property
    def follower(self) -> SequenceFollower | None:
        """The object that follows its reads; None until the plan knows an epoch of it."""
        return self.position.follower if self.position is not None else None

    # --- publication ----------------------------------------------------------------------------------------------

    def add_order(self, epoch: int, order: EpochOrder, now: float) -> None:
        """Add the published *order* of an epoch: sample numbers, shape (samples of the epoch,), uint32. Raises Busy
        where the epoch is too far ahead to be kept, StoreFull where there is no memory for the order."""
        self.liveness.renew(now)
        which = f"epoch {epoch} of consumer {self.name} of job {name_without_owner(self.request.job)}"
        kept = self._epochs.add_order(epoch, order, self._oldest_epoch)
        try:
            self._reserve_for_orders()
        except StoreFull as error:
            self._epochs.refuse_order(epoch)
            self._reserve_for_orders()
            raise StoreFull(f"{which}: {error}") from None
        if not kept:
            raise Busy(
                f"{which} is too far ahead: orders of nearer epochs fill {format_size(MAX_WAITING_BYTES)} or are "
                f"{MAX_WAITING_ORDERS:,}; publish it again when these are read"
            )
        self._wakeup.set()

    def keep_orders(self, orders: Mapping[int, EpochOrder], now: float) -> None:
        """Add orders published earlier, by epoch, as in `add_order`. Orders that are not kept appear as a problem."""
        for epoch in sorted(orders):
            with contextlib.suppress(Busy, StoreFull):
                self.add_order(epoch, orders[epoch], now)

    def _reserve_for_orders(self) -> None:
        """Reserve memory for the present orders. Raises StoreFull, but not where there are fewer than before."""
        self._reserve_memory(PlanPurpose.ORDERS, self._epochs.order_bytes)

    @property
    def forgotten_orders(self) -> list[int]:
        """Epochs from the current one on whose orders were published too far ahead to be kept."""
        return self._epochs.forgotten(self.epoch)

    @property
    def refused_orders(self) -> list[int]:
        """Epochs from the current one on for whose published orders there was no memory."""
        return self._epochs.refused(self.epoch)

    @property
    def wanted_orders(self) -> list[int]:
        """Epochs, of the current and the next one, whose orders the job has to publish, or publish again."""
        return self._epochs.missing_orders(self.epoch)

    def note_lost_orders(self, forgotten: Iterable[int], refused: Iterable[int]) -> None:
        """Record epochs whose published orders are lost: they were too far ahead, or there was no memory."""
        self._epochs.note_lost(forgotten, refused)

    def note_heartbeat(self, epoch: int, samples: int, now: float) -> None:
        """Record that *samples* samples of the epoch are delivered."""
        self.liveness.renew(now)
        if not self._epochs.may_be_read(epoch):
            published = len(self._epochs.computable)
            self._problems[ConsumerProblem.EPOCH] = f"it reads epoch {epoch}, and has published {published}"
            return
        self._problems.pop(ConsumerProblem.EPOCH, None)
        self._last_heartbeat = _Heartbeat(epoch, samples, now)
        if self.position is not None:
            self.position.on_heartbeat(now)
        self.update_position()

    def note_part(self, number: int, epoch: int, begins: int) -> None:
        """Record that epoch *number*, as published, is part of the job's own *epoch*, after *begins* of its samples."""
        self._part = _EpochPart(number, epoch, begins)

    @property
    def shown_epoch(self) -> int:
        """The current epoch, as the job counts epochs."""
        return self._part.epoch if self._part is not None else self.epoch

    def update_position(self) -> None:
        """Update the state after the position may have changed."""
        follower = self.follower
        if (
            self._last_heartbeat is not None
            and follower is not None
            and self._last_heartbeat.epoch in self._epochs.reads
        ):
            heartbeat, self._last_heartbeat = self._last_heartbeat, None
            follower.on_heartbeat(heartbeat.epoch, self._epochs.reads[heartbeat.epoch].reads_after(heartbeat.samples))
        if self._epochs.next_unplanned(self.epoch) is not None or self._is_lost:
            self._wakeup.set()

    # --- position -------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The number of the current epoch, or of the one it will begin with."""
        if self._last_heartbeat is not None:
            return self._last_heartbeat.epoch
        return self.follower.progress[0] if self.follower is not None else self._epochs.first

    @property
    def epoch_position(self) -> tuple[int, int] | None:
        """(epoch, samples of it that are read); None before it has begun, or while that is unknown."""
        if self._last_heartbeat is not None:
            return self._last_heartbeat.epoch, self._last_heartbeat.samples
        if self.follower is None or not self.follower.has_begun:
            return None
        epoch, position = self.follower.progress
        reads = self._epochs.reads.get(epoch)
        return (epoch, reads.samples_after(position)) if reads is not None else None

    @property
    def rate(self) -> float:
        """Samples per second; 0 while unknown."""
        return self._epochs.reads_to_samples(self.follower.rate.value) if self.follower is not None else 0.0

    @property
    def progress(self) -> tuple[int, int, int]:
        """Its epoch, as its job counts them; samples of it that are read; samples in the epoch, 0 while unknown."""
        follower, epoch, part = self.follower, self.epoch, self._part
        # A part that has only just begun has no known begin yet.
        before = part.begins if part is not None and part.number == epoch else 0
        reads = self._epochs.reads.get(epoch)
        if reads is None:
            return self.shown_epoch, before, 0
        position = follower.progress[1] if follower is not None and follower.progress[0] == epoch else 0
        return self.shown_epoch, before + reads.samples_after(position), before + reads.samples

    @property
    def published_orders(self) -> dict[int, EpochOrder]:
        """The published orders of its current and later epochs, by epoch: sample numbers, shape (samples of the
        epoch,), uint32."""
        return self._epochs.published(self._oldest_epoch)

    @property
    def _oldest_epoch(self) -> int:
        return self.follower.progress[0] if self.follower is not None else 0

    def note_unshared(self, why: str) -> None:
        """Record the reason for which other nodes reject the consumer's publication; "" where they accept it."""
        self._problems.pop(ConsumerProblem.SHARED, None)
        if why:
            self._problems[ConsumerProblem.SHARED] = f"it is not published to other nodes of the cluster: {why}"

    # --- sequence -------------------------------------------------------------------------------------------------

    async def _run(self, sample_map: SampleMap) -> None:
        if self.liveness.is_in_other_namespace:
            await asyncio.to_thread(self.liveness.find_process)
        while True:
            try:
                await self._keep_planned(sample_map)
            except (ConfigError, NotFound) as error:  # a retry would fail in the same way
                self._give_up(str(error))
                return
            except (CachefsError, OSError) as error:
                self._problems[ConsumerProblem.WORK] = f"{error}; trying again"
                pause = RETRY_SECONDS[min(self._failures, len(RETRY_SECONDS) - 1)]
                self._failures += 1
                log.warning(
                    "job %s, consumer %s: no plan yet: %s; the next try is in %g s",
                    self.request.job, self.name, error, pause,
                )  # fmt: skip
                await asyncio.sleep(pause)
            except Exception as error:
                log.exception("job %s, consumer %s: no plan", self.request.job, self.name)
                self._give_up(f"internal error ({error!r}); see the daemon's log")
                return

    def _give_up(self, problem: str) -> None:
        self._problems[ConsumerProblem.WORK] = problem
        self._leave_plan()
        log.warning("job %s, consumer %s: no plan: %s", self.request.job, self.name, problem)

    async def _keep_planned(self, sample_map: SampleMap) -> None:
        """Keep the plan up to date until an error. Raises CachefsError, OSError."""
        samples = self._epochs.samples
        if samples is None:
            samples = await self._loader.load_samples(self.snapshot, sample_map)
            self._on_space(samples.space, time.monotonic())
            self._check_size(samples)
            self._reserve_memory(PlanPurpose.PLAN, plan_bytes(samples))
            self._own_blocks = await self._loader.own_blocks(samples)
            self._epochs.use_samples(samples)
        while True:
            self._wakeup.clear()
            while (epoch := self._epochs.next_unplanned(self.epoch)) is not None:
                await self._plan_epoch(samples, epoch)
            self._problems.pop(ConsumerProblem.WORK, None)
            self._failures = 0
            if self._is_lost:
                await self._search_reads(samples)
                await asyncio.sleep(SEARCH_SECONDS)
            await self._wakeup.wait()

    async def _plan_epoch(self, samples: Samples, epoch: int) -> None:
        order = self._epochs.waiting_order(epoch)
        last = self._epochs.is_last(epoch)
        if order is not None:
            self._reserve_for_reads(samples, len(order))
            prepared = await self._loader.prepare_order(samples, order, last)
        else:
            prepared = await self._loader.compute_epoch(samples, self._spec, epoch, last)
        self._reserve_for_reads(samples, len(prepared.reads.blocks))
        self._epochs.mark_planned(epoch, order)
        self._publish(samples, epoch, prepared)
        self.update_position()

    def _reserve_for_reads(self, samples: Samples, reads: int) -> None:
        """Reserve memory for a plan with one more epoch of *reads* reads. Raises StoreFull."""
        self._reserve_memory(PlanPurpose.PLAN, plan_bytes(samples, max(reads, self._epochs.longest)))

    def _publish(self, samples: Samples, epoch: int, prepared: PreparedEpoch) -> None:
        self._problems.pop(ConsumerProblem.WORK, None)
        reads = prepared.reads
        if reads.unknown:
            total = reads.unknown + reads.samples
            self._problems[ConsumerProblem.SAMPLES] = f"epoch {epoch}: {reads.unknown} of {total} samples do not exist"
        if self._plan.spaces.get(self.snapshot.id) is not samples.space:
            self._plan.add_space(samples.space)
        epochs = self._epochs
        if epochs.reads and epoch < min(epochs.reads):
            self._restart_plan()
        self._plan.set_prepared_epoch(self.key, self.snapshot.id, epoch, prepared.planned)
        self._remove_replaced()
        epochs.reads[epoch] = reads
        self._mean_bytes = mean_bytes(reads, samples)
        if self.position is None:
            if self._loader.first_rate:
                self._plan.set_progress(self.key, *self._plan.progress(self.key), self._loader.first_rate)
            follower = SequenceFollower(self._plan, self.key, *reorder_window(self.request, reads), self._own_blocks)
            self.position = PositionEstimate(follower, self.request.batch_size)
            if self._last_heartbeat is not None:
                self.position.on_heartbeat(self._last_heartbeat.when)
        elif not self.position.follower.is_following:
            self._plan.suspend(self.key, True)
        epochs.keep_from(self.position.follower.progress[0])
        self._reserve_for_orders()
        self.position.set_shortest_epoch(epochs.shortest)

    def _restart_plan(self) -> None:
        """Start the plan again at an earlier epoch: a plan has no past, so the next epoch set becomes its first."""
        self._plan.remove_consumer(self.key)
        self._epochs.forget_reads()

    @property
    def _spec(self) -> SamplerSpec:
        assert self.request.spec is not None
        return self.request.spec

    def _check_size(self, samples: Samples) -> None:
        """Record a sampler of the wrong size as a problem. Raises ConfigError where it is far too large."""
        spec = self.request.spec
        if spec is not None and spec.size != len(samples):
            check_size(spec, len(samples))
            self._problems[ConsumerProblem.SIZE] = f"the sampler has {spec.size} samples, the dataset {len(samples)}"

    @property
    def _is_lost(self) -> bool:
        follower = self.follower
        return bool(self._epochs.computable) and follower is not None and not follower.is_following

    async def _search_reads(self, samples: Samples) -> None:
        """Search for the latest reads in other epochs of the spec: the first one, in case the loader does not count
        epochs, the one before, and those that follow."""
        follower = self.follower
        assert follower is not None
        current, evidence = self.epoch, follower.evidence
        epochs = dict.fromkeys(
            [0, max(0, current - 1), *self._epochs.computable[current : current + MAX_SEARCHED_EPOCHS]]
        )
        found = await self._loader.locate_reads(
            samples, self._spec, list(epochs), evidence.judged, follower.reorder_window
        )
        if found is None or follower.is_following or not evidence.is_credible(found.cluster):
            return
        self._last_heartbeat = None
        self._restart_plan()
        self._publish(samples, found.number, found.epoch)
        follower.on_found(found.number, found.cluster)
        log.info("job %s, consumer %s: is followed again, in epoch %d", self.request.job, self.name, found.number)

    # --- display --------------------------------------------------------------------------------------------------

    def make_view(self, ahead_bytes: int, now: float) -> ConsumerView:
        """Return the consumer as users see it. ahead_bytes: bytes on the node that it is still going to read."""
        follower = self.follower
        epoch, position, length = self.progress
        state, problem = self._state_and_problem(now)
        return ConsumerView(
            consumer=self.name,
            epoch=epoch,
            position=position,
            epoch_length=length,
            known_epochs=self._epochs.known_epochs(self.epoch),
            rate=self.rate,
            matched=follower.evidence.matched if follower is not None else 0,
            mismatched=follower.evidence.mismatched if follower is not None else 0,
            state=state,
            problem=problem,
            ahead_bytes=ahead_bytes,
            note=self.note,
            rank=self.request.rank,
            world_size=self.request.world_size,
            epochs=self.request.spec.epochs if self.request.spec is not None else 0,
            mean_bytes=self._mean_bytes,
            loader=self.loader,
            mount_device=self.request.mount_device,
        )

    @property
    def lasting_problems_text(self) -> str:
        """Its problems, except for where its reads are; "" without any."""
        return "; ".join(self._lasting_problems)

    @property
    def _lasting_problems(self) -> list[str]:
        problems = list(self._problems.values())
        if forgotten := self.forgotten_orders:
            problems.append(
                f"orders of {len(forgotten)} epochs from {forgotten[0]} on were published too far ahead to be kept; "
                "publish them again when the job is nearer"
            )
        if refused := self.refused_orders:
            problems.append(
                f"no memory for the orders of {len(refused)} epochs from {refused[0]} on; publish them again when "
                "other jobs have ended (`cachefs run` does by itself)"
            )
        return problems

    def _state_and_problem(self, now: float) -> tuple[ConsumerState, str]:
        problems = self._lasting_problems
        follower = self.follower
        if self.loader is not None and self.loader.learning:
            return ConsumerState.LEARNING, "; ".join(problems)
        if self.is_given_up:
            return ConsumerState.NOT_FOLLOWED, "; ".join(problems)
        if follower is None:
            preparing = self._epochs.samples is None
            return ConsumerState.PREPARING if preparing else ConsumerState.WAITING, "; ".join(problems)
        if not follower.is_following:
            elsewhere = (
                f"{1 - follower.evidence.share:.0%} of the latest reads are not where the sequence has them: it reads "
                "other files than it publishes, or a program without `cachefs run` reads the same ones"
            )
            return ConsumerState.NOT_FOLLOWED, "; ".join([elsewhere, *problems])
        if not follower.has_begun:
            return ConsumerState.WAITING, "; ".join(problems)
        silence = self.liveness.silence(now)
        if silence > STANDING_STILL_SECONDS:
            return ConsumerState.STANDING_STILL, "; ".join([f"no read of it seen for {silence:.0f} s", *problems])
        return ConsumerState.FOLLOWING, "; ".join(problems)
