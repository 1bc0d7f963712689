"""How far ahead of its readers a node must fetch so that the origin's bandwidth suffices.

What is evicted last is what is read last, so the blocks that are missing in an epoch lie close together: after the
first part of the epoch, which is all here, comes a part of which nothing is. Where readers would take that part faster
than the origin delivers, fetching it must begin during the first part. This is a schedule of jobs with deadlines on one
machine: in order of deadlines (Jackson's rule) it holds if, for each of them, what is due until then can be delivered
until then.

At 0.75 times the demand, with tiers for 35 % of the dataset, a job stalled for 22 s in 176 s without it.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs_daemon.plan import Plan, Seconds
from cachefs_daemon.residents import ABSENT

# Reads of each epoch that are looked at; of longer ones every n-th. 8 consumers then take 12 ms.
_SAMPLED: Final = 1 << 14
_ALL: Final = 1 << 62
# Of the bandwidth that was measured, what is counted on.
_RELIABLE: Final = 0.9
_SMOOTHING: Final = 0.25


def seconds_ahead(plan: Plan, residents: Mapping[str, npt.NDArray[np.uint8]], bandwidth: float) -> float:
    """What is missing and due within so many seconds must be fetched without a pause from now on; 0 where waiting does
    no harm yet. bandwidth: bytes per second."""
    parts = list(_missing(plan, residents))
    if not parts or bandwidth <= 0:
        return 0.0
    due = np.concatenate([due for due, _ in parts])
    sizes = np.concatenate([sizes for _, sizes in parts])
    order = np.argsort(due, kind="stable")
    due = due[order]
    late = np.flatnonzero(due - np.cumsum(sizes[order]) / (_RELIABLE * bandwidth) < 0)
    return float(due[late[-1]]) if len(late) else 0.0


def _missing(
    plan: Plan, residents: Mapping[str, npt.NDArray[np.uint8]]
) -> Iterator[tuple[Seconds, npt.NDArray[np.float64]]]:
    """When, and how many bytes; what two readers miss counts twice, which errs on the early side."""
    for consumer in plan.consumers():
        snapshot, _ = plan.generation(consumer)
        state = residents.get(snapshot)
        start = 0
        while state is not None and (window := plan.window(consumer, start, _ALL)) is not None:
            stride = 1 + len(window.blocks) // _SAMPLED
            reads = np.arange(0, len(window.blocks), stride)
            missing = reads[state[window.blocks[::stride]] == ABSENT]
            due = np.asarray(window.seconds + window.period * missing, np.float64)
            yield due, np.multiply(plan.spaces[snapshot].sizes[window.blocks[missing]], stride, dtype=np.float64)
            start = window.start + len(window.blocks)


class Bandwidth:
    """What an origin delivers when it is asked for all it can: bytes per second; infinite while nobody knows."""

    def __init__(self) -> None:
        self.value = np.inf
        self._since = time.monotonic()
        self._bytes = 0
        self._busy = True

    def idle(self) -> None:
        """More could have been asked for."""
        self._busy = False

    def measure(self, total: int) -> None:
        """total: bytes delivered so far. To be called every second or so."""
        now = time.monotonic()
        rate = (total - self._bytes) / max(now - self._since, 1e-3)
        if self._busy and self.value == np.inf:
            self.value = rate
        elif self._busy:
            self.value += _SMOOTHING * (rate - self.value)
        elif self.value < rate:
            self.value = rate
        self._since, self._bytes, self._busy = now, total, True
