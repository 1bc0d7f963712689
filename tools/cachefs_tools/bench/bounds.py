"""How many samples must be fetched from the origin: closed forms, and the least that a known sequence needs.

All samples have one size. In the formulas F is the number of samples of the dataset, C is the number of samples that
fit into the tiers, E is the number of epochs, and c = C/F. In the code F is `files` and C is `capacity`.
"""

import heapq
import math
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray


def least_reads(files: int, capacity: int, epochs: int) -> int:
    """F + (E-1)(F-C) samples: no policy needs fewer for one job that draws a new permutation for every epoch."""
    return files + (epochs - 1) * max(0, files - capacity)


def lru_reads(files: int, capacity: int, epochs: int) -> float:
    """The number of samples that LRU is expected to fetch: c + (1-c) ln(1-c) of the reads after epoch 1 are hits."""
    c = min(1.0, capacity / files)
    hits = c + (1 - c) * math.log(1 - c) if c < 1 else 1.0
    return files + (epochs - 1) * files * (1 - hits)


def belady_reads(sequence: Sequence[int] | NDArray[numpy.int64], capacity: int) -> int:
    """Misses of Belady's MIN when it reads the samples in this order. MIN may also read a sample without keeping it.

    sequence: int64 array of shape (reads,), the number of the sample that each read reads.
    """
    upcoming = _next_uses(numpy.asarray(sequence, dtype=numpy.int64)).tolist()
    held: dict[int, int] = {}  # sample -> when it is used next
    furthest: list[tuple[int, int]] = []  # heap of (-next use, sample); some entries are out of date
    misses = 0
    for sample, following in zip(sequence, upcoming, strict=True):
        if held.pop(sample, None) is None:
            misses += 1
        held[sample] = following
        heapq.heappush(furthest, (-following, sample))
        if len(held) > capacity:
            while True:
                when, victim = heapq.heappop(furthest)
                if held.get(victim) == -when:
                    del held[victim]
                    break
    return misses


def _next_uses(sequence: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
    """For each place of the sequence, the next place that has the same sample, or len(sequence) where there is none.

    Both arrays are int64 of shape (reads,).
    """
    order = numpy.argsort(sequence, kind="stable")
    result = numpy.full(len(sequence), len(sequence), dtype=numpy.int64)
    same = sequence[order[:-1]] == sequence[order[1:]]
    result[order[:-1][same]] = order[1:][same]
    return result
