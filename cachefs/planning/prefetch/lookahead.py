"""What a prefetcher has to bring next: the blocks of the plan that are not where they should be, soonest first.

A lookahead remembers how far it has looked in each consumer's sequence, so that asking again costs what is new and not
what is known. With 8 consumers and 1.3 million blocks, polling takes 0.07 ms where nothing is new, 0.7 ms for 64
blocks, and never more than 3 ms, as what there is to see is looked at in steps.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import Ids
from cachefs.planning.sequences.plan import Plan

Name = tuple[str, int]  # snapshot, number of the block in its space
Residents = Mapping[str, npt.NDArray[np.uint8]]

_FIRST_LOOK: Final = 1024
_LONGEST_LOOK: Final = 1 << 15
# Reads of one consumer that are looked at in one call: 0.2 ms.
_MOST_LOOKS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Upcoming:
    """A block somebody will read. number: in the snapshot's block space; size: bytes; seconds: until it is read."""

    snapshot: str
    number: int
    size: int
    seconds: float
    consumer: str


@dataclass(frozen=True, slots=True)
class _Found:
    """Wanted reads of one consumer: parallel arrays; end: read up to which it was looked."""

    consumer: str
    snapshot: str
    reads: npt.NDArray[np.int64]
    blocks: Ids
    seconds: npt.NDArray[np.float64]
    end: int


class Lookahead:
    """wanted: the state (see cachefs.planning.blocks.presence) of the blocks it looks for."""

    def __init__(self, plan: Plan, wanted: int) -> None:
        self._plan = plan
        self._wanted = wanted
        self._looked: dict[str, tuple[tuple[str, int], int]] = {}

    def take(
        self, residents: Residents, seconds: float, blocks: int, size: int, known: Set[Name] = frozenset()
    ) -> list[Upcoming]:
        """The next wanted blocks, soonest first, that are read within *seconds*: at most *blocks* of them, and at most
        *size* bytes but for the first. Those *known* are passed over. None is given twice until `rewind`, or until its
        consumer jumps."""
        if blocks <= 0 or size <= 0:
            return []
        names = self._plan.consumers()
        self._looked = {name: looked for name, looked in self._looked.items() if name in names}
        found = [self._look(name, residents, seconds, blocks + len(known)) for name in names]
        return self._choose([one for one in found if one is not None], blocks, size, known)

    def rewind(self) -> None:
        """Look again from where consumers are: blocks that were given or passed over may be wanted now."""
        self._looked.clear()

    def _look(self, consumer: str, residents: Residents, seconds: float, blocks: int) -> _Found | None:
        generation = self._plan.generation(consumer)
        state = residents.get(generation[0])
        if state is None:
            return None
        before = self._looked.get(consumer)
        end = before[1] if before is not None and before[0] == generation else 0
        reads: list[npt.NDArray[np.int64]] = []
        ids: list[Ids] = []
        due: list[npt.NDArray[np.float64]] = []
        count, seen, look = 0, 0, _FIRST_LOOK
        while count < blocks and seen < _MOST_LOOKS and (window := self._plan.window(consumer, end, look)) is not None:
            near = int(min(len(window.blocks), max(0.0, (seconds - window.seconds) / window.period + 1)))
            here = np.flatnonzero(state[window.blocks[:near]] == self._wanted)
            reads.append(window.start + here)
            ids.append(window.blocks[here])
            due.append(np.asarray(window.seconds + window.period * here, np.float64))
            count += len(here)
            seen += near
            end = window.start + near
            if near < len(window.blocks):
                break
            look = min(2 * look, _LONGEST_LOOK)
        self._looked[consumer] = (generation, end)
        if not count:
            return None
        return _Found(consumer, generation[0], np.concatenate(reads), np.concatenate(ids), np.concatenate(due), end)

    def _choose(self, found: list[_Found], blocks: int, size: int, known: Set[Name]) -> list[Upcoming]:
        """The soonest of all; each consumer is looked at again from its first read that is left out."""
        if not found:
            return []
        whose = np.repeat(np.arange(len(found)), [len(one.reads) for one in found])
        which = np.concatenate([np.arange(len(one.reads)) for one in found])
        due = np.concatenate([one.seconds for one in found])
        order = np.argsort(due, kind="stable")
        # Who has this many was not looked at any further.
        horizon = min((float(one.seconds[-1]) for one in found if len(one.reads) >= blocks + len(known)), default=inf)
        chosen: list[Upcoming] = []
        given: set[Name] = set()
        left_out: dict[str, int] = {}
        total = 0
        for rank, index in enumerate(order.tolist()):
            one, place = found[whose[index]], int(which[index])
            name = (one.snapshot, int(one.blocks[place]))
            if name in given or name in known:
                continue
            bytes_of = int(self._plan.spaces[one.snapshot].sizes[name[1]])
            if len(chosen) >= blocks or due[index] > horizon or (chosen and total + bytes_of > size):
                left_out = self._first_of_each(found, whose, which, order[rank:])
                break
            given.add(name)
            total += bytes_of
            chosen.append(Upcoming(one.snapshot, name[1], bytes_of, float(due[index]), one.consumer))
        for consumer, read in left_out.items():
            self._looked[consumer] = (self._looked[consumer][0], read)
        return chosen

    @staticmethod
    def _first_of_each(
        found: list[_Found],
        whose: npt.NDArray[np.int64],
        which: npt.NDArray[np.int64],
        rest: npt.NDArray[np.int64],
    ) -> dict[str, int]:
        """By consumer, its first read among those numbered *rest*."""
        firsts = {}
        for number, one in enumerate(found):
            reads = one.reads[which[rest[whose[rest] == number]]]
            if len(reads):
                firsts[one.consumer] = int(reads.min())
        return firsts
