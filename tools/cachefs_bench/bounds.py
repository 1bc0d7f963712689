"""Bounds on the number of samples fetched from the origin: closed forms, and the least that a known sequence needs.

All samples have one size. In the formulas F is the number of samples of the dataset, C is the number of samples that
fit into the tiers, E is the number of epochs, and c = C/F. In the code F is `files` and C is `capacity`.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy
from numpy.typing import NDArray

from cachefs.planning.sequences.sampler import EpochOrder

# Some reads of one reader: sample numbers in order, shape (n,), and the times at which these reads began and ended.
ReadPart = tuple[EpochOrder, float, float]


def least_reads(files: int, capacity: int, epochs: int) -> int:
    """Return F + (E-1)(F-C): no policy fetches fewer for one job that draws a new permutation for every epoch."""
    return files + (epochs - 1) * max(0, files - capacity)


def lru_reads(files: int, capacity: int, epochs: int) -> float:
    """Return the expected fetches of LRU: c + (1-c) ln(1-c) of the reads after epoch 1 are hits."""
    c = min(1.0, capacity / files)
    hits = c + (1 - c) * math.log(1 - c) if c < 1 else 1.0
    return files + (epochs - 1) * files * (1 - hits)


def belady_reads(
    sequence: Sequence[int] | NDArray[numpy.int64], capacity: int, known: NDArray[numpy.int64] | None = None
) -> int:
    """Return the misses of Belady's MIN for this order of reads. MIN may also read a sample without keeping it.

    sequence: int64 array of shape (reads,), the sample number of each read. known: likewise, the read at which MIN
    learns of each read, itself at the latest; None: MIN knows all from the start.
    """
    order = numpy.asarray(sequence, dtype=numpy.int64).tolist()
    learned: dict[int, list[int]] = defaultdict(list)
    for read, when in enumerate(known.tolist() if known is not None else [0] * len(order)):
        learned[when].append(read)
    # sample -> its known future reads, the last first
    uses: dict[int, list[int]] = defaultdict(lambda: [len(order)])
    next_uses: dict[int, int] = {}  # sample -> its next use
    furthest: list[tuple[int, int]] = []  # heap of (-next use, sample); some entries are out of date
    misses = 0
    for now, sample in enumerate(order):
        if now in learned:
            for read in reversed(learned[now]):
                uses[order[read]].append(read)
            for reads in uses.values():
                reads.sort(reverse=True)
            next_uses = {one: uses[one][-1] for one in next_uses}
            furthest = [(-following, one) for one, following in next_uses.items()]
            heapq.heapify(furthest)
        misses += sample not in next_uses
        uses[sample].pop()
        next_uses[sample] = uses[sample][-1]
        heapq.heappush(furthest, (-next_uses[sample], sample))
        if len(next_uses) > capacity:
            while True:
                when, victim = heapq.heappop(furthest)
                if next_uses.get(victim) == -when:
                    del next_uses[victim]
                    break
    return misses


def merge_reads(parts: Iterable[ReadPart]) -> NDArray[numpy.int64]:
    """Return the reads of several readers in the order of time: int64 array of shape (reads,), sample numbers.

    The reads of each part are taken as evenly spaced in its time.
    """
    orders, moments = [], []
    for order, begin, end in parts:
        orders.append(order.astype(numpy.int64))
        moments.append(begin + (numpy.arange(len(order)) + 0.5) * (end - begin) / max(1, len(order)))
    return numpy.concatenate(orders)[numpy.argsort(numpy.concatenate(moments), kind="stable")]
