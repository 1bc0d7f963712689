"""How many samples must come from the origin: closed forms, and the best that is possible for a known sequence.

Samples have one size. F: samples of the dataset; C: samples that fit into the tiers; c = C/F.
"""

import heapq
import math
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray


def least_reads(files: int, capacity: int, epochs: int) -> int:
    """F + (E-1)(F-C): no policy needs fewer for one job with a fresh permutation per epoch."""
    return files + (epochs - 1) * max(0, files - capacity)


def lru_reads(files: int, capacity: int, epochs: int) -> float:
    """Expected with LRU: c + (1-c) ln(1-c) of the reads after epoch 1 are hits."""
    c = min(1.0, capacity / files)
    hits = c + (1 - c) * math.log(1 - c) if c < 1 else 1.0
    return files + (epochs - 1) * files * (1 - hits)


def belady_reads(sequence: Sequence[int] | NDArray[numpy.int64], capacity: int) -> int:
    """Misses of Belady's MIN, which may also pass a sample by without keeping it, over the samples in this order."""
    upcoming = _next_uses(numpy.asarray(sequence, dtype=numpy.int64)).tolist()
    held: dict[int, int] = {}  # sample -> when it is used next
    furthest: list[tuple[int, int]] = []  # (-next use, sample), with entries that no longer hold
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
    """For each place, the next place that has the same sample; one past the end, and further, where there is none."""
    order = numpy.argsort(sequence, kind="stable")
    result = numpy.full(len(sequence), len(sequence), dtype=numpy.int64)
    same = sequence[order[:-1]] == sequence[order[1:]]
    result[order[:-1][same]] = order[1:][same]
    return result
