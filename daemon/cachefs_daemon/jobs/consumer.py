"""One reader of a job: its sequence on the way into the plan, its state for display, and whether it is still there."""

import asyncio
import itertools
import logging
from typing import Final, NamedTuple

import numpy as np

from cachefs.errors import CachefsError
from cachefs.job_messages import ConsumerView, JobPublish, SampleMap
from cachefs.planning.blocks.samples import Reads, Samples
from cachefs.planning.sequences.follower import Follower
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.position import Position
from cachefs.planning.sequences.sampler import Order, SamplerSpec
from cachefs.snapshot import Snapshot
from cachefs_daemon.jobs.epoch_loader import EpochLoader
from cachefs_daemon.jobs.epochs import Epochs
from cachefs_daemon.jobs.liveness import Liveness
from cachefs_daemon.jobs.states import ConsumerState

log = logging.getLogger(__name__)

SEARCH_SECONDS: Final = 2.0
# Epochs of a spec, from the current one on, in which a consumer that is lost is looked for, besides the first one.
SEARCHED: Final = 16

# A reader that has begun and of which nothing is seen for so long stands still, or reads what the kernel has cached.
STILL_SECONDS: Final = 10.0

_serial = itertools.count(1)


class _Heartbeat(NamedTuple):
    epoch: int
    samples: int  # how many samples of the epoch are delivered
    when: float  # seconds


class Consumer:
    """One consumer. Its task brings the current epoch and the next into the plan, until `close`. *now* is seconds of a
    monotonic clock."""

    def __init__(
        self,
        request: JobPublish,
        snapshot: Snapshot,
        sample_map: SampleMap,
        plan: Plan,
        loader: EpochLoader,
        now: float,
    ) -> None:
        self.request = request
        self.key = f"{request.job}/{request.consumer}#{next(_serial)}"  # its name in the plan
        self.snapshot = snapshot
        self.liveness = Liveness(request.pid, request.lease, now)
        self.position: Position | None = None  # where it is; None until the plan knows an epoch of it
        self._plan = plan
        self._loader = loader
        self._epochs = Epochs(request.spec)
        self._said: _Heartbeat | None = None  # until the plan knows that epoch
        self._problems: dict[str, None] = {}  # each once, in order
        self._news = asyncio.Event()  # there is something to do for the task
        self._task = asyncio.create_task(self._work(sample_map))

    def close(self) -> None:
        self._task.cancel()
        self._plan.remove(self.key)

    @property
    def name(self) -> str:
        """Unique within its job."""
        return self.request.consumer

    @property
    def follower(self) -> Follower | None:
        """What follows its reads; None until the plan knows an epoch of it."""
        return self.position.follower if self.position is not None else None

    # --- what it says ---------------------------------------------------------------------------------------------

    def add_order(self, epoch: int, order: Order, now: float) -> None:
        """It has published the *order* of an epoch: sample numbers, shape (samples of the epoch,), uint32."""
        self.liveness.renew(now)
        self._epochs.add(epoch, order, self._oldest)
        self._news.set()

    def on_heartbeat(self, epoch: int, samples: int, now: float) -> None:
        """It says that so many samples of the epoch are delivered."""
        self.liveness.renew(now)
        if not self._epochs.may_be_read(epoch):
            self._problems[f"it reads epoch {epoch}, and has published {len(self._epochs.computable)}"] = None
            return
        self._said = _Heartbeat(epoch, samples, now)
        if self.position is not None:
            self.position.on_heartbeat(now)
        self.moved()

    def moved(self) -> None:
        """Its place may have changed."""
        follower = self.follower
        if self._said is not None and follower is not None and self._said.epoch in self._epochs.reads:
            said, self._said = self._said, None
            follower.on_heartbeat(said.epoch, self._epochs.reads[said.epoch].after_samples(said.samples))
        if self._epochs.missing(self.epoch) is not None or self._is_lost:
            self._news.set()

    # --- where it is ----------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The number of the epoch that it is in, or will begin with."""
        if self._said is not None:
            return self._said.epoch
        return self.follower.place[0] if self.follower is not None else self._epochs.first

    @property
    def place(self) -> tuple[int, int] | None:
        """(epoch, samples of it that are read); None before it has begun, or while nobody knows."""
        if self._said is not None:
            return self._said.epoch, self._said.samples
        if self.follower is None or not self.follower.begun:
            return None
        epoch, position = self.follower.place
        reads = self._epochs.reads.get(epoch)
        return (epoch, reads.samples_after(position)) if reads is not None else None

    @property
    def published_orders(self) -> dict[int, Order]:
        """The orders that it has published, by epoch, of its current epoch and later ones: sample numbers, shape
        (samples of the epoch,), uint32."""
        return self._epochs.published(self._oldest)

    @property
    def _oldest(self) -> int:
        """No epoch before this one is needed."""
        return self.follower.place[0] if self.follower is not None else 0

    # --- its sequence ---------------------------------------------------------------------------------------------

    async def _work(self, sample_map: SampleMap) -> None:
        try:
            samples = self._epochs.samples = await self._loader.samples(self.snapshot, sample_map)
            self._check_size(samples)
            while True:
                self._news.clear()
                while (epoch := self._epochs.missing(self.epoch)) is not None:
                    await self._bring(samples, epoch)
                if self._is_lost:
                    await self._search(samples)
                    await asyncio.sleep(SEARCH_SECONDS)
                await self._news.wait()
        except CachefsError as error:
            self._problems[str(error)] = None
            log.warning("job %s, consumer %s: no plan: %s", self.request.job, self.name, error)
        except Exception as error:
            self._problems[f"internal error ({error!r}); see the daemon's log"] = None
            log.exception("job %s, consumer %s: no plan", self.request.job, self.name)

    async def _bring(self, samples: Samples, epoch: int) -> None:
        order = self._epochs.take(epoch)
        if order is not None:
            reads = await self._loader.reads(samples, order)
        else:
            reads = await self._loader.computed(samples, self._spec, epoch)
        self._publish(samples, epoch, reads)
        self.moved()

    def _publish(self, samples: Samples, epoch: int, reads: Reads) -> None:
        if reads.unknown:
            total = reads.unknown + reads.samples
            self._problems[f"epoch {epoch}: {reads.unknown} of {total} samples do not exist"] = None
        if self._plan.spaces.get(self.snapshot.id) is not samples.space:
            self._plan.add_space(samples.space)
        epochs = self._epochs
        if epochs.reads and epoch < min(epochs.reads):
            self._go_back()
        self._plan.set_epoch(self.key, self.snapshot.id, epoch, reads.blocks, last=epochs.is_last(epoch))
        epochs.reads[epoch] = reads
        if self.position is None:
            follower = Follower(self._plan, self.key, *_out_of_order(self.request, reads))
            self.position = Position(follower, self.request.batch_size)
            if self._said is not None:
                self.position.on_heartbeat(self._said.when)
        elif not self.position.follower.following:
            self._plan.suspend(self.key, True)
        epochs.keep_from(self.position.follower.place[0])
        self.position.shortest_epoch = epochs.shortest

    def _go_back(self) -> None:
        """A plan knows no past: an earlier epoch that is set next is where it begins anew."""
        self._plan.remove(self.key)
        self._epochs.reads = {}

    @property
    def _spec(self) -> SamplerSpec:
        assert self.request.spec is not None
        return self.request.spec

    def _check_size(self, samples: Samples) -> None:
        spec = self.request.spec
        if spec is not None and spec.size != len(samples):
            self._problems[f"the sampler has {spec.size} samples, the dataset {len(samples)}"] = None

    @property
    def _is_lost(self) -> bool:
        follower = self.follower
        return bool(self._epochs.computable) and follower is not None and not follower.following

    async def _search(self, samples: Samples) -> None:
        """Look for what is being read in other epochs of the spec: the first one, as if the loader forgot to count
        epochs, the one before, and those that follow."""
        follower = self.follower
        assert follower is not None
        current, evidence = self.epoch, follower.evidence
        epochs = dict.fromkeys([0, max(0, current - 1), *self._epochs.computable[current : current + SEARCHED]])
        found = await self._loader.locate(samples, self._spec, list(epochs), evidence.judged, follower.reorder_window)
        if found is None or follower.following or not evidence.believes(found.cluster):
            return
        self._said = None
        self._go_back()
        self._publish(samples, found.epoch, found.reads)
        follower.found(found.epoch, found.cluster)
        log.info("job %s, consumer %s: found again in epoch %d", self.request.job, self.name, found.epoch)

    # --- what is shown --------------------------------------------------------------------------------------------

    def view(self, ahead_bytes: int, now: float) -> ConsumerView:
        """The consumer as users see it. ahead_bytes: bytes on the node that it is still going to read."""
        follower, epoch = self.follower, self.epoch
        reads = self._epochs.reads.get(epoch)
        position = follower.place[1] if follower is not None and follower.place[0] == epoch else 0
        state, problem = self._state(now)
        return ConsumerView(
            consumer=self.name,
            epoch=epoch,
            position=reads.samples_after(position) if reads is not None else 0,
            epoch_length=reads.samples if reads is not None else 0,
            known_epochs=self._epochs.known(epoch),
            rate=self._epochs.in_samples(follower.rate.value) if follower is not None else 0.0,
            matched=follower.evidence.matched if follower is not None else 0,
            mismatched=follower.evidence.mismatched if follower is not None else 0,
            state=state,
            problem=problem,
            ahead_bytes=ahead_bytes,
        )

    def _state(self, now: float) -> tuple[ConsumerState, str]:
        """Its state, and what there is to say of it."""
        problems = list(self._problems)
        follower = self.follower
        if self._task.done():
            return ConsumerState.NOT_FOLLOWED, "; ".join(problems)
        if follower is None:
            preparing = self._epochs.samples is None
            return ConsumerState.PREPARING if preparing else ConsumerState.WAITING, "; ".join(problems)
        if not follower.following:
            elsewhere = f"{1 - follower.evidence.share:.0%} of the latest reads are not where the sequence has them"
            return ConsumerState.NOT_FOLLOWED, "; ".join([elsewhere, *problems])
        if not follower.begun:
            return ConsumerState.WAITING, "; ".join(problems)
        silence = self.liveness.silence(now)
        if silence > STILL_SECONDS:
            return ConsumerState.STANDING_STILL, "; ".join([f"no read of it seen for {silence:.0f} s", *problems])
        return ConsumerState.FOLLOWING, "; ".join(problems)


def _out_of_order(request: JobPublish, reads: Reads) -> tuple[int, int]:
    """The reorder window of its loader, and the reads that one of its workers does in order (1 where that varies)."""
    # The distance from the first sample that may not have been read to the last one that may have been. That is more
    # than the displacement of a sample, since some of the samples between have not been read either.
    samples = request.workers * request.prefetch * request.batch_size
    per_sample = len(reads.blocks) / max(1, reads.samples)
    batch = request.batch_size if reads.ends is None and samples else 1
    # Positions of a plan are 32 bits wide.
    return min(int(samples * max(1.0, per_sample)), 2**31 - 1), batch


def order_of(raw: bytes) -> Order:
    """The order of an epoch as sample numbers: shape (samples of the epoch,), uint32. raw: the same as it travels, u32
    little-endian."""
    return np.frombuffer(raw, "<u4").astype(np.uint32, copy=False)
