"""Simulates how many reads of several jobs hit a small cache, by the rule that combines the jobs' next reads.

All jobs begin together, read the same blocks at the same rate, and each has an order of its own. The cache evicts by
`alsd` with a given number of certain reads, or by one of two simpler rules over the same estimates of each job's next
read: the least over the jobs, and the mean over the jobs as in the thesis (DPFlow, 2024, ch. 3.4.3, in this project's
reading: equal weights, and a block without a further read counts as one of the next epoch). Offline Belady is the
bound of all.

The second table tells whether `clairvoyant` would gain by `alsd`'s estimates for reads beyond what is published, which
is `alsd` where all published reads are certain.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from cachefs.planning.blocks.space import BlockSpace, Numbers
from cachefs.planning.eviction.policies.alsd import Alsd
from cachefs.planning.eviction.policies.clairvoyant import Clairvoyant
from cachefs.planning.eviction.policies.ranked import RankedPolicy
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.timeline import UNKNOWN_READ, KnownFuture, Seconds
from cachefs_bench.bounds import belady_reads
from cachefs_bench.simulated_jobs import ReadingJob, merge_reads, origin_bytes

JOBS: Final = 4
# Parts of the dataset that fit in the cache.
SHARES: Final = (0.5, 0.2)
# Epochs of each job.
EPOCHS: Final = (1, 3)
# Epochs of each job in the second table, in which some are not published yet.
CLAIRVOYANT_EPOCHS: Final = 4


class _LeastOverJobs(Alsd):
    """Scores are the least over the jobs of each one's expected next read."""

    def _scores(self, snapshot: str, ids: Numbers) -> Seconds:
        soonest = np.full(len(ids), np.inf)
        for future, where, theirs in self._plan.futures(snapshot, ids):
            soonest[where] = np.minimum(soonest[where], _expected_read(future, theirs, self._certain))
        return soonest


class _MeanOverJobs(Alsd):
    """Scores are the mean over the jobs of each one's expected next read."""

    def _scores(self, snapshot: str, ids: Numbers) -> Seconds:
        total = np.zeros(len(ids))
        for future, where, theirs in self._plan.futures(snapshot, ids):
            reads = _expected_read(future, theirs, self._certain)
            reads[np.isinf(reads)] = (1.5 * future.length - future.position) / future.rate
            total[where] += reads
        return total


def _expected_read(future: KnownFuture, ids: Numbers, certain: int) -> Seconds:
    """Return the expected seconds until the job's next read of each of the blocks *ids* (shape (n,)): shape (n,)."""
    left = future.length - future.position
    reads = future.next_read[ids]
    distance = np.subtract(reads, future.position, dtype=np.float64)
    expected = np.where(reads < future.length, (certain + left) / 2, (max(left, certain) + left + future.length) / 2)
    expected[reads == UNKNOWN_READ] = future.beyond - future.position
    seconds: Seconds = np.where(distance < certain, distance, expected) / future.rate
    return seconds


def measure(blocks: int, seed: int) -> dict[str, Any]:
    """Return both tables: hits as percents of all reads. blocks: number of blocks of the dataset."""
    return {
        "blocks": blocks,
        "jobs": JOBS,
        "hits_percent": [
            compare_rules(blocks, seed, epochs, share, certain)
            for epochs in EPOCHS
            for share in SHARES
            for certain in (16, 128, blocks // 2, blocks)
        ],
        "clairvoyant_hits_percent": [
            compare_clairvoyant(blocks, seed, published, share) for published in (1, 2) for share in SHARES
        ],
    }


def compare_rules(blocks: int, seed: int, epochs: int, share: float, certain: int) -> dict[str, float]:
    """Return a row of the first table. share: the part of the dataset that fits in the cache."""
    jobs = _jobs(blocks, seed, epochs)
    rules: dict[str, type[Alsd]] = {"alsd": Alsd, "least_over_jobs": _LeastOverJobs, "mean_over_jobs": _MeanOverJobs}
    row: dict[str, float] = {"epochs": epochs, "share": share, "certain": certain}
    for name, rule in rules.items():
        row[name] = _hits(partial(rule, certain=certain), blocks, jobs, share)
    sequence = [int(job.epochs[epoch][read]) for _, job, epoch, read in merge_reads(jobs)]
    row["belady"] = _percent(belady_reads(sequence, int(share * blocks)), len(sequence))
    return row


def compare_clairvoyant(blocks: int, seed: int, published: int, share: float) -> dict[str, float]:
    """Return a row of the second table. published: epochs that each job has published when it begins one."""
    jobs = _jobs(blocks, seed, CLAIRVOYANT_EPOCHS)
    all_certain = partial(Alsd, certain=CLAIRVOYANT_EPOCHS * blocks)
    return {
        "published_epochs": published,
        "share": share,
        "clairvoyant": _hits(Clairvoyant, blocks, jobs, share, published),
        "alsd_of_certain_reads": _hits(all_certain, blocks, jobs, share, published),
    }


def _jobs(blocks: int, seed: int, epochs: int) -> list[ReadingJob]:
    draw = np.random.default_rng(seed)
    return [ReadingJob(f"job{job}", [draw.permutation(blocks) for _ in range(epochs)]) for job in range(JOBS)]


def _hits(
    make_policy: Callable[[Plan], RankedPolicy], blocks: int, jobs: Sequence[ReadingJob], share: float,
    published: int = 2,
) -> float:  # fmt: skip
    """Return the hits in percent. Each read is reported at once, as rules are compared and not reports."""
    contents = np.zeros(blocks, [("high", "<u8"), ("low", "<u8")])
    contents["high"] = np.arange(blocks)
    space = BlockSpace("bench", 4 << 20, np.ones(blocks, np.int64), contents)  # blocks of one byte
    misses = origin_bytes(make_policy, space, jobs, int(share * blocks), every=1, published=published)
    return _percent(misses, sum(len(order) for job in jobs for order in job.epochs))


def _percent(misses: int, reads: int) -> float:
    return round(100 * (1 - misses / reads), 1)
