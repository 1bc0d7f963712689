"""Measures the cost of planning: plan, followers, lookahead and eviction policy, without any bytes.

It runs the daemon's own objects in a loop. Consumers read a part of the dataset in their orders, interleaved; the
node's reports are followed, next reads are looked up, and blocks to evict for them are chosen.
"""

import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.presence import ABSENT, IN_MEMORY
from cachefs.planning.blocks.space import BlockSpace, Ids, Samples
from cachefs.planning.eviction.policies.clairvoyant import Clairvoyant
from cachefs.planning.eviction.simulated_tiers import SimulatedTier
from cachefs.planning.prefetch.lookahead import Lookahead
from cachefs.planning.sequences.follower import SequenceFollower, observe_reads
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.sampler import SamplerSpec, epoch_order

SAMPLE_BYTES: Final = 110_000
BATCH: Final = 64
# Reads per report of a mount, and most blocks fetched per report.
READS_PER_REPORT: Final = 64
WINDOW_SECONDS: Final = 1.0
# Share of the dataset that fits: so little that most fetches evict.
CAPACITY: Final = 0.02
# Bytes evicted together: the daemon's tiers evict more than a block at a time.
EVICTION_BYTES: Final = 64 * SAMPLE_BYTES


@dataclass(slots=True)
class PlanningCosts:
    """Processor time by purpose."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by purpose

    @contextmanager
    def count_time(self, what: str) -> Iterator[None]:
        """Count the time of the block under *what*."""
        begin = time.process_time()
        yield
        self.seconds[what] += time.process_time() - begin


def measure(samples: int, consumers: int, reads: int, *, share: bool) -> dict[str, Any]:
    """Return the figures of one run, by name.

    share: the consumers are ranks of one job and share the dataset; else each reads all of it, in its own order. reads:
    number of reads followed, of all consumers together.
    """
    costs = PlanningCosts()
    before = _peak()
    with costs.count_time("block space"):
        space = BlockSpace("bench", 4 << 20, np.full(samples, SAMPLE_BYTES, np.int64), _contents(samples))
        mapped = Samples(space, *space.blocks_of(np.arange(samples)))
    plan = Plan()
    plan.add_space(space)
    known = _peak()
    orders, publishing = [], []
    for number in range(consumers):
        spec = _spec(number, samples, consumers, share)
        for epoch in (0, 1):
            order = epoch_order(spec, epoch)
            begin = time.process_time()
            blocks = mapped.reads_in_order(order).blocks
            plan.set_epoch(f"consumer{number}", space.snapshot, epoch, blocks)
            publishing.append(time.process_time() - begin)
            orders += [blocks] if epoch == 0 else []
    published = _peak()
    each = reads // consumers
    mixed = np.stack([order[:each] for order in orders], 1).ravel()
    fetched = _run_reads(plan, space, consumers, mixed, costs)
    per_100k = {what: round(seconds * 100_000 / len(mixed), 3) for what, seconds in costs.seconds.items()}
    del per_100k["block space"]
    return {
        "samples": samples,
        "consumers": consumers,
        "ranks_of_one_job": share,
        "publish_epoch_of_all_ms": round(1e3 * sum(publishing) / 2, 1),
        "publish_epoch_of_one_ms": round(1e3 * float(np.median(publishing)), 1),
        "block_space_s": round(costs.seconds["block space"], 2),
        "block_space_mb": known - before,
        "plan_mb": published - known,
        "peak_mb": _peak(),
        "followed_reads": len(mixed),
        "fetched": fetched,
        "cpu_s_per_100k_samples": {**per_100k, "all": round(sum(per_100k.values()), 3)},
    }


def _run_reads(plan: Plan, space: BlockSpace, consumers: int, mixed: Ids, costs: PlanningCosts) -> int:
    """Return the number of fetched blocks. mixed: block numbers in the interleaved order of all consumers, int32."""
    followers = [SequenceFollower(plan, f"consumer{number}", 8 * BATCH, BATCH) for number in range(consumers)]
    state = np.zeros(space.count, np.uint8)
    tier = SimulatedTier(Clairvoyant(plan), int(CAPACITY * space.bytes))
    lookahead = Lookahead(plan, ABSENT)
    fetched = 0
    for start in range(0, len(mixed), READS_PER_REPORT):
        keys = space.keys(mixed[start : start + READS_PER_REPORT])
        with costs.count_time("follow"):
            observe_reads(followers, space.ids(keys))
        with costs.count_time("look ahead"):
            lookahead.rewind()
            found = lookahead.take_blocks({space.snapshot: state}, WINDOW_SECONDS, 2 * READS_PER_REPORT, 1 << 30)
        with costs.count_time("evict"):
            for one in found:
                key = space.key(one.number)
                for evicted in tier.make_room(key, one.size, EVICTION_BYTES):
                    state[space.find(evicted.key)] = ABSENT
                if tier.add_block(key, one.size):
                    state[one.number] = IN_MEMORY
                    fetched += 1
    return fetched


def _spec(number: int, samples: int, consumers: int, share: bool) -> SamplerSpec:
    if share:
        return SamplerSpec(kind="torch-distributed", size=samples, epochs=2, replicas=consumers, rank=number)
    return SamplerSpec(kind="torch-distributed", size=samples, epochs=2, seed=number)


def _contents(count: int) -> npt.NDArray[np.void]:
    contents = np.zeros(count, [("high", "<u8"), ("low", "<u8")])
    contents["high"] = np.random.default_rng(0).permutation(count) + 1
    return contents


def _peak() -> int:
    """Return the peak resident megabytes of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
