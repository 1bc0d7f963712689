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
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.presence import ABSENT
from cachefs.planning.blocks.space import Ids
from cachefs.planning.sequences.course import Seconds
from cachefs.planning.sequences.plan import Plan

# Reads of each epoch that are looked at; of longer ones every n-th.
_SAMPLED: Final = 1 << 13
_ALL: Final = 1 << 62
# Of the bandwidth that was measured, what is counted on.
_RELIABLE: Final = 0.9
_SMOOTHING: Final = 0.25


@dataclass(frozen=True, slots=True)
class Backlog:
    """What is missing and due within *seconds* must be fetched without a pause from now on. last: the block that is due
    then; to make room, only what is read after it may go, or as much would be missing again."""

    seconds: float
    snapshot: str
    last: int


def find(plan: Plan, residents: Mapping[str, npt.NDArray[np.uint8]], bandwidth: float) -> Backlog | None:
    """None where waiting does no harm yet. bandwidth: bytes per second. With 8 consumers 15 ms, however much they
    read."""
    parts = [part for part in _missing(plan, residents) if len(part.due)]
    if not parts or bandwidth <= 0:
        return None
    due = np.concatenate([part.due for part in parts])
    order = np.argsort(due, kind="stable")
    sizes = np.concatenate([part.sizes for part in parts])[order]
    late = np.flatnonzero(due[order] - np.cumsum(sizes) / (_RELIABLE * bandwidth) < 0)
    if not len(late):
        return None
    last = int(order[late[-1]])
    whose = np.repeat(np.arange(len(parts)), [len(part.due) for part in parts])[last]
    blocks = np.concatenate([part.blocks for part in parts])
    return Backlog(float(due[last]), parts[whose].snapshot, int(blocks[last]))


@dataclass(frozen=True, slots=True)
class _Part:
    """Missing blocks, when each is read first, and how many bytes it stands for."""

    snapshot: str
    blocks: Ids
    due: Seconds
    sizes: npt.NDArray[np.float64]


def _missing(plan: Plan, residents: Mapping[str, npt.NDArray[np.uint8]]) -> Iterator[_Part]:
    for consumer in plan.consumers():
        snapshot, _ = plan.generation(consumer)
        state = residents.get(snapshot)
        start = 0
        while state is not None and (window := plan.window(consumer, start, _ALL)) is not None:
            stride = 1 + len(window.blocks) // _SAMPLED
            reads = np.arange(0, len(window.blocks), stride)
            reads = reads[state[window.blocks[::stride]] == ABSENT]
            blocks = window.blocks[reads]
            due = np.asarray(window.seconds + window.period * reads, np.float64)
            # Later reads, and those of others, find it here.
            first = due <= plan.next_use_of(snapshot, blocks) + 1e-6
            sizes = np.multiply(plan.spaces[snapshot].sizes[blocks[first]], stride, dtype=np.float64)
            yield _Part(snapshot, blocks[first], due[first], sizes)
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
