"""One reader of a job: its sequence on the way into the plan, and its place in it."""

import asyncio
import itertools
import logging
import math
import time
from typing import Final

import numpy as np

from cachefs.errors import CachefsError
from cachefs.job_messages import ConsumerView, JobPublish, SampleMap
from cachefs.planning.blocks.samples import Reads, Samples
from cachefs.planning.sequences.follower import Follower
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.sampler import SamplerSpec
from cachefs.planning.sequences.tripwires import Interval
from cachefs.snapshot import Snapshot
from cachefs_daemon.jobs.epoch_loader import EpochLoader, Order
from cachefs_daemon.jobs.liveness import Liveness

log = logging.getLogger(__name__)

# Epochs that were published far ahead wait as they came, and no more than this of them (in bytes).
MAX_WAITING: Final = 64 << 20
SEARCH_SECONDS: Final = 2.0
# Epochs of a spec, from the current one on, in which a consumer that is lost is looked for, besides the first one.
SEARCHED: Final = 16

# A mount reports as soon as the one or the other has passed (see cachefs.mount.worker), and the report travels.
REPORT_SECONDS: Final = 0.12
REPORT_READS: Final = 64
# A reader that has begun and of which nothing is seen for so long stands still, or reads what the kernel has cached.
STILL_SECONDS: Final = 10.0

# A consumer that has said where it is does so again within this time.
TOLD_SECONDS: Final = 2.0
# One that does not move is taken to have stopped after so long.
UNSEEN_SECONDS: Final = 10.0

# Seconds in which the search for a silent reader goes on to grow.
LONGEST_SEARCH: Final = 16.0

_serial = itertools.count(1)


class Consumer:
    """name: within its job; key: in the plan; follower: once the plan knows an epoch; fetched_bytes: for its sake.

    Its task brings epochs into the plan, the current one and the next, until `close`.
    """

    def __init__(
        self, request: JobPublish, snapshot: Snapshot, sample_map: SampleMap, plan: Plan, sequences: EpochLoader
    ) -> None:
        self.request = request
        self.name = request.consumer
        self.key = f"{request.job}/{request.consumer}#{next(_serial)}"
        self.snapshot = snapshot
        self.lease = Liveness(request.pid, request.lease)
        self.follower: Follower | None = None
        self.fetched_bytes = 0
        spec = request.spec
        self._computable = range(spec.epochs) if spec is not None and spec.kind != "explicit" else range(0)
        self._map = sample_map
        self._plan = plan
        self._sequences = sequences
        self._orders: dict[int, Order] = {}
        self._published: dict[int, Order] = {}
        self._reads: dict[int, Reads] = {}
        self._said: tuple[int, int] | None = None
        self._told = -math.inf
        self._interval = Interval()
        self._passed = (0.0, (-1, 0))  # when it was first seen at its place, and which: none so far
        self._problems: dict[str, None] = {}
        self._samples: Samples | None = None
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._work())

    def close(self) -> None:
        self._task.cancel()
        self._plan.remove(self.key)

    def add_order(self, epoch: int, order: Order) -> None:
        """What is too far ahead to be kept is forgotten: the nearest epochs matter."""
        self.lease.renew()
        self._orders[epoch] = order
        self._published = {**self.published, epoch: order}
        for orders in (self._orders, self._published):
            while sum(one.nbytes for one in orders.values()) > MAX_WAITING and len(orders) > 2:
                del orders[max(orders)]
        self._news.set()

    def told(self, epoch: int, position: int) -> None:
        """A heartbeat: *position* samples of the epoch are delivered."""
        self.lease.renew()
        if self._computable and epoch not in self._computable and epoch not in self._orders:
            self._problems[f"it reads epoch {epoch}, and has published {len(self._computable)}"] = None
            return
        self._said = (epoch, position)
        self._told = time.monotonic()
        self.moved()

    def moved(self) -> None:
        """Its place may have changed."""
        if self._said is not None and self.follower is not None and self._said[0] in self._reads:
            epoch, position = self._said
            self._said = None
            self.follower.told(epoch, self._reads[epoch].after_samples(position))
        if self._missing() is not None or self._is_lost:
            self._news.set()

    @property
    def epoch(self) -> int:
        """The one it is in, or will begin with."""
        if self._said is not None:
            return self._said[0]
        if self.follower is not None:
            return self.follower.place[0]
        return 0 if self._computable else min(self._orders, default=0)

    @property
    def published(self) -> dict[int, Order]:
        """The orders it was told, of its epoch and later ones."""
        current = self.follower.place[0] if self.follower is not None else 0
        return {number: order for number, order in self._published.items() if number >= current}

    @property
    def place(self) -> tuple[int, int] | None:
        """Epoch, and samples of it that are read; None before it has begun, or while nobody knows."""
        if self._said is not None or self.follower is None or not self.follower.begun:
            return self._said
        epoch, position = self.follower.place
        reads = self._reads.get(epoch)
        return (epoch, reads.samples_after(position)) if reads is not None else None

    @property
    def margin(self) -> float:
        """Seconds by which it may be ahead of its place in the plan: reads since the last report, the distance between
        its loader's workers, and the batch that the next of them begins."""
        follower = self.follower
        if follower is None or not follower.following or follower.demand <= 0:
            return REPORT_SECONDS
        behind = min(REPORT_SECONDS * follower.demand, REPORT_READS) + follower.spread + self.request.batch_size
        return behind / follower.demand

    @property
    def tripwires(self) -> int:
        """Reads from one to the next; 0 while it says itself how far it is."""
        now = time.monotonic()
        epoch = min((len(reads.blocks) for reads in self._reads.values()), default=0)
        self._interval.follow(self.follower.rate if self.follower is not None else 0.0, epoch, now)
        return self._interval.now if now - self._told >= TOLD_SECONDS else 0

    @property
    def left_out(self) -> int:
        """`tripwires` as they may still be from before, when they were closer."""
        return self._interval.left_out if self.tripwires else 0

    def passed_by(self, now: float, seconds: float) -> int:
        """Reads, from its place in the plan on, that it has done by *seconds* after *now*, as far as its rate tells:
        no further than to its next tripwire, which would have shown, or than a report brings it."""
        rate = self.follower.rate if self.follower is not None else 0.0
        return int(min(self.unseen(now), self.tripwires or REPORT_READS) + seconds * rate)

    def unseen(self, now: float) -> int:
        """Reads that it may have done since it was last seen to move, had it missed its tripwires."""
        follower = self.follower
        if follower is None or not follower.begun or follower.rate <= 0:
            return 0
        if self._passed[1] != follower.place:
            self._passed = (now, follower.place)
        return int(min(now - self._passed[0], UNSEEN_SECONDS) * follower.rate)

    def searched(self, now: float) -> int:
        """Reads ahead within which its tripwires are to show. While none does it may be beyond them all, as after a
        daemon's absence, at a rate nobody knows: the further the longer, so that it is overtaken."""
        unseen = self.unseen(now)
        silence = min(now - self._passed[0], LONGEST_SEARCH) if unseen else 0.0
        return int(unseen * 2**silence)

    def view(self, resident_bytes: int) -> ConsumerView:
        follower, epoch = self.follower, self.epoch
        reads = self._reads.get(epoch)
        position = follower.place[1] if follower is not None and follower.place[0] == epoch else 0
        state, problem = self._state()
        return ConsumerView(
            consumer=self.name,
            epoch=epoch,
            position=reads.samples_after(position) if reads is not None else 0,
            epoch_length=reads.samples if reads is not None else 0,
            known_epochs=self._known(),
            rate=self._in_samples(follower.rate) if follower is not None else 0.0,
            matched=follower.matched if follower is not None else 0,
            mismatched=follower.mismatched if follower is not None else 0,
            state=state,
            problem=problem,
            ahead_bytes=resident_bytes,
        )

    # --- its sequence ---------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        try:
            self._samples = await self._sequences.samples(self.snapshot, self._map)
            self._check_size(self._samples)
            while True:
                self._news.clear()
                while (epoch := self._missing()) is not None:
                    await self._bring(self._samples, epoch)
                if self._is_lost:
                    await self._search(self._samples)
                    await asyncio.sleep(SEARCH_SECONDS)
                await self._news.wait()
        except CachefsError as error:
            self._problems[str(error)] = None
            log.warning("job %s, consumer %s: no plan: %s", self.request.job, self.name, error)
        except Exception as error:
            self._problems[f"internal error ({error!r}); see the daemon's log"] = None
            log.exception("job %s, consumer %s: no plan", self.request.job, self.name)

    def _missing(self) -> int | None:
        """An epoch the plan should know and does not."""
        if self._samples is None:
            return None
        for number in (self.epoch, self.epoch + 1):
            if number in self._orders or (number in self._computable and number not in self._reads):
                return number
        return None

    async def _bring(self, samples: Samples, epoch: int) -> None:
        order = self._orders.pop(epoch, None)
        if order is not None:
            reads = await self._sequences.reads(samples, order)
        else:
            reads = await self._sequences.computed(samples, self._spec, epoch)
        self._publish(samples, epoch, reads)
        self.moved()

    def _publish(self, samples: Samples, epoch: int, reads: Reads) -> None:
        if reads.unknown:
            total = reads.unknown + reads.samples
            self._problems[f"epoch {epoch}: {reads.unknown} of {total} samples do not exist"] = None
        if self._plan.spaces.get(self.snapshot.id) is not samples.space:
            self._plan.add_space(samples.space)
        if self._reads and epoch < min(self._reads):
            self._go_back()
        last = bool(self._computable) and epoch == self._computable[-1]
        self._plan.set_epoch(self.key, self.snapshot.id, epoch, reads.blocks, last=last)
        self._reads[epoch] = reads
        if self.follower is not None and not self.follower.following:
            self._plan.suspend(self.key, True)
        if self.follower is None:
            request = self.request
            # From the first sample that may not have been read to the last one that may have been, which is more than
            # a sample's displacement: some of those between have not been read either.
            spread = request.workers * request.prefetch * request.batch_size
            per_sample = len(reads.blocks) / max(1, reads.samples)
            batch = request.batch_size if reads.ends is None and spread else 1
            self.follower = Follower(self._plan, self.key, int(spread * max(1.0, per_sample)), batch)
        current = self.follower.place[0]
        self._reads = {number: one for number, one in self._reads.items() if number >= current}

    def _go_back(self) -> None:
        """A plan knows no past: an earlier epoch that is set next is where it begins anew."""
        self._plan.remove(self.key)
        self._reads = {}

    @property
    def _spec(self) -> SamplerSpec:
        assert self.request.spec is not None
        return self.request.spec

    def _check_size(self, samples: Samples) -> None:
        spec = self.request.spec
        if spec is not None and spec.size != len(samples):
            self._problems[f"the sampler has {spec.size} samples, the dataset {len(samples)}"] = None

    # --- its place ------------------------------------------------------------------------------------------------

    @property
    def _is_lost(self) -> bool:
        return bool(self._computable) and self.follower is not None and not self.follower.following

    async def _search(self, samples: Samples) -> None:
        """Look for what is being read in other epochs of the spec: the first one, as if the loader forgot to count
        epochs, the one before, and those that follow."""
        follower = self.follower
        assert follower is not None
        current = self.epoch
        epochs = dict.fromkeys([0, max(0, current - 1), *self._computable[current : current + SEARCHED]])
        found = await self._sequences.locate(samples, self._spec, list(epochs), follower.judged, follower.tolerance)
        if found is None or follower.following or not follower.believes(found[2]):
            return
        epoch, reads, cluster = found
        self._said = None
        self._go_back()
        self._publish(samples, epoch, reads)
        follower.found(epoch, cluster)
        log.info("job %s, consumer %s: found again in epoch %d", self.request.job, self.name, epoch)

    # --- what is shown --------------------------------------------------------------------------------------------

    def _state(self) -> tuple[str, str]:
        problem = "; ".join(self._problems)
        follower = self.follower
        if self._task.done():
            return "not followed", problem
        if follower is None:
            return ("waiting" if self._samples is not None else "preparing"), problem
        if not follower.following:
            strange = f"{1 - follower.share:.0%} of the latest reads are not where the sequence has them"
            return "not followed", f"{strange}; {problem}" if problem else strange
        if not follower.begun:
            return "waiting", problem
        if self.lease.silence > STILL_SECONDS:
            still = f"no read of it seen for {self.lease.silence:.0f} s"
            return "standing still", f"{still}; {problem}" if problem else still
        return "following", problem

    def _known(self) -> list[int]:
        return sorted({*self._computable[self.epoch :], *self._orders, *self._reads})

    def _in_samples(self, reads: float) -> float:
        for known in self._reads.values():
            return reads * known.samples / max(1, len(known.blocks))
        return reads


def order_of(raw: bytes) -> Order:
    """u32 little-endian, as they travel."""
    return np.frombuffer(raw, "<u4").astype(np.uint32, copy=False)
