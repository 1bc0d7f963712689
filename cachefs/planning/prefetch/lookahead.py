"""Finds the next blocks of the plan that are not where they should be, soonest first.

A lookahead remembers its position in each consumer's sequence, so that the cost of a call depends on what is new. With
8 consumers and 1.3 million blocks, a call takes 0.07 ms where nothing is new, and 0.7 ms for 64 blocks. It never takes
more than 3 ms, since one call examines a limited number of reads.
"""

from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.presence import TierStates
from cachefs.planning.blocks.space import Ids
from cachefs.planning.cluster.ownership import Ownership
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.timeline import Seconds

BlockName = tuple[str, int]  # snapshot, number of the block in its space

# Returns which reads need no block on the node, as their pages are in the page cache: shape (n,), bool. Arguments: a
# consumer, its snapshot, blocks of it (shape (n,), int32), and the seconds until the consumer reads each (shape (n,)).
CachedReadFilter = Callable[[str, str, Ids, Seconds], npt.NDArray[np.bool_]]

# Reads of one consumer that are examined as one array: at first, and at most.
_FIRST_WINDOW: Final = 1024
_MAX_WINDOW: Final = 1 << 15
# Most reads of one consumer that one call examines: 0.2 ms.
_MAX_EXAMINED: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class UpcomingBlock:
    """A block that a consumer will read."""

    # Id of the snapshot.
    snapshot: str
    # The block's number in the snapshot's block space.
    number: int
    # Bytes of the block.
    size: int
    # Seconds until it is read.
    seconds: float
    # The consumer that reads it first.
    consumer: str

    @property
    def name(self) -> BlockName:
        """The block's name in the plan."""
        return self.snapshot, self.number


@dataclass(frozen=True, slots=True)
class _WantedReads:
    """Wanted reads of one consumer, as three arrays with one element per read."""

    consumer: str
    snapshot: str
    # Positions of the reads, counted from the consumer's first read.
    reads: npt.NDArray[np.int64]
    # Number of each read's block, in the snapshot's block space.
    blocks: Ids
    # Seconds until each of them.
    seconds: npt.NDArray[np.float64]


class Lookahead:
    """Finds blocks of one state in the futures of all consumers, and returns each once."""

    def __init__(
        self, plan: Plan, wanted: int, ownership: Ownership | None = None, is_cached: CachedReadFilter | None = None
    ) -> None:
        """wanted: the state of the blocks to find (see cachefs.planning.blocks.presence). ownership: only blocks that
        are this node's to keep are found; None: all. is_cached: tells which reads need no block."""
        self._plan = plan
        self._is_cached = is_cached
        self._wanted = wanted
        self._ownership = ownership
        # By consumer: seconds by which it may be ahead of its place in the plan; 0 where missing.
        self.margins: Mapping[str, float] = {}
        # By consumer: its generation (see Plan.generation) at the last search, and the read up to which it was
        # searched.
        self._examined: dict[str, tuple[tuple[str, int], int]] = {}

    def take_blocks(
        self,
        states: TierStates,
        seconds: float,
        blocks: int,
        size: int,
        excluded: Set[BlockName] = frozenset(),
        readers: Collection[str] | None = None,
    ) -> list[UpcomingBlock]:
        """Return the next wanted blocks that are read within *seconds*, soonest first: at most *blocks* blocks of at
        most *size* bytes together. Only the first may be larger than *size*.

        states: by snapshot, the state of each of its blocks (uint8, see Presence.states); excluded: blocks to skip;
        readers: the consumers that read them (None: all). No block is returned twice until `rewind`, or until its
        consumer jumps.
        """
        if blocks <= 0 or size <= 0:
            return []
        names = self._plan.consumers()
        self._examined = {name: looked for name, looked in self._examined.items() if name in names}
        readers = names if readers is None else readers
        found = [self._examine(name, states, seconds, blocks + len(excluded)) for name in readers]
        return self._choose_soonest([one for one in found if one is not None], blocks, size, excluded)

    def rewind(self) -> None:
        """Restart from the consumers' positions: blocks that were returned or skipped may be wanted now."""
        self._examined.clear()

    def _examine(self, consumer: str, states: TierStates, seconds: float, blocks: int) -> _WantedReads | None:
        generation = self._plan.generation(consumer)
        state = states.get(generation[0])
        if state is None:
            return None
        before = self._examined.get(consumer)
        end = before[1] if before is not None and before[0] == generation else 0
        reads: list[npt.NDArray[np.int64]] = []
        ids: list[Ids] = []
        due: list[npt.NDArray[np.float64]] = []
        count, seen, look = 0, 0, _FIRST_WINDOW
        mine = self._ownership.owned.get(generation[0]) if self._ownership is not None else None
        margin = self.margins.get(consumer, 0.0)
        while (
            count < blocks and seen < _MAX_EXAMINED and (window := self._plan.window(consumer, end, look)) is not None
        ):
            first = window.seconds - margin
            near = int(min(len(window.blocks), max(0.0, (seconds - first) / window.period + 1)))
            here = np.flatnonzero(state[window.blocks[:near]] == self._wanted)
            if mine is not None:
                here = here[mine[window.blocks[here]]]
            # Blocks that workers have read ahead of the others are evicted soon, and are not wanted again: they would
            # take the places of others. In a job with 4 workers they took all: nothing was fetched for a second.
            here = here[self._plan.is_coming(consumer, window.start + here, window.blocks[here])]
            if self._is_cached is not None and len(here):
                seconds_to = np.asarray(first + window.period * here, np.float64)
                here = here[~self._is_cached(consumer, generation[0], window.blocks[here], seconds_to)]
            if count + len(here) > blocks:
                # This call cannot return more: to sort 1,024 reads instead of 100 takes an eighth of a step.
                here = here[: blocks - count]
                near = int(here[-1]) + 1
            reads.append(window.start + here)
            ids.append(window.blocks[here])
            due.append(np.asarray(first + window.period * here, np.float64))
            count += len(here)
            seen += near
            end = window.start + near
            if near < len(window.blocks):
                break
            look = min(2 * look, _MAX_WINDOW)
        self._examined[consumer] = (generation, end)
        if not count:
            return None
        return _WantedReads(consumer, generation[0], np.concatenate(reads), np.concatenate(ids), np.concatenate(due))

    def _choose_soonest(
        self, found: list[_WantedReads], blocks: int, size: int, excluded: Set[BlockName]
    ) -> list[UpcomingBlock]:
        """Return the soonest of all reads. The next search of each consumer begins at its first read that is left
        out."""
        if not found:
            return []
        whose = np.repeat(np.arange(len(found)), [len(one.reads) for one in found])
        which = np.concatenate([np.arange(len(one.reads)) for one in found])
        due = np.concatenate([one.seconds for one in found])
        order = np.argsort(due, kind="stable")
        # A consumer with this many wanted reads was not searched any further.
        horizon = min(
            (float(one.seconds[-1]) for one in found if len(one.reads) >= blocks + len(excluded)), default=inf
        )
        chosen: list[UpcomingBlock] = []
        names: set[BlockName] = set()
        left_out: dict[str, int] = {}
        total = 0
        for rank, index in enumerate(order.tolist()):
            one, position = found[whose[index]], int(which[index])
            name = (one.snapshot, int(one.blocks[position]))
            if name in names or name in excluded:
                continue
            bytes_of = int(self._plan.spaces[one.snapshot].sizes[name[1]])
            if len(chosen) >= blocks or due[index] > horizon or (chosen and total + bytes_of > size):
                left_out = self._first_of_each(found, whose, which, order[rank:])
                break
            names.add(name)
            total += bytes_of
            chosen.append(UpcomingBlock(one.snapshot, name[1], bytes_of, float(due[index]), one.consumer))
        for consumer, read in left_out.items():
            self._examined[consumer] = (self._examined[consumer][0], read)
        return chosen

    @staticmethod
    def _first_of_each(
        found: list[_WantedReads],
        whose: npt.NDArray[np.int64],
        which: npt.NDArray[np.int64],
        remaining: npt.NDArray[np.int64],
    ) -> dict[str, int]:
        """Return by consumer its first read among *remaining*: indices in the arrays *whose* (index in *found*) and
        *which* (index in that one's reads)."""
        firsts = {}
        for number, one in enumerate(found):
            reads = one.reads[which[remaining[whose[remaining] == number]]]
            if len(reads):
                firsts[one.consumer] = int(reads.min())
        return firsts
