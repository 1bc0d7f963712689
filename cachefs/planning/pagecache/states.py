"""The states of a block's pages in one mount, and the blocks that the page caches of all mounts hold together.

Evictions from the tiers ask the latter (`Coverage`): memory need not keep a block that the page caches have.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import NO_BLOCK, Ids, Numbers
from cachefs.planning.sequences.plan import Plan

# By snapshot, a flag for each block of its space: shape (blocks of the space,), bool.
Marks = Mapping[str, npt.NDArray[np.bool_]]

# Added to a score in seconds: 30 years. Blocks that are never read again have infinity, and are still evicted first.
COVERED_PENALTY: Final = 1e9


class PageState(IntEnum):
    """The state of one block's pages in the page cache of one mount. Arrays of states have the dtype uint8."""

    OUT = 0  # none of its pages is present
    COMING = 1  # the pusher was told to store its pages
    HELD = 2  # all its pages are present
    GOING = 3  # the pusher was told to drop its pages
    REFUSED = 4  # none of its pages is present, and they could not be stored a moment ago
    PART = 5  # some of its pages are present, as it is larger than one read; it counts in full
    PART_REFUSED = 6  # some of its pages are present, and the rest could not be stored a moment ago


# The same as plain integers, for arrays: numpy takes 7 us to compare 300,000 bytes with one, and 96 us with a member of
# an IntEnum, as it first makes every byte an int64.
OUT: Final = int(PageState.OUT)
COMING: Final = int(PageState.COMING)
HELD: Final = int(PageState.HELD)
GOING: Final = int(PageState.GOING)
REFUSED: Final = int(PageState.REFUSED)
PART: Final = int(PageState.PART)
PART_REFUSED: Final = int(PageState.PART_REFUSED)


def _table(*states: int) -> npt.NDArray[np.bool_]:
    """Return a table with True for *states*: shape (number of states,), bool."""
    return np.isin(np.arange(len(PageState)), states)


# Tables with one bool per state: index them with an array of states.
# Blocks to be pushed.
WANTED: Final = _table(OUT, PART)
# Blocks whose reader must ask the mount for some of it.
INCOMPLETE: Final = _table(OUT, COMING, REFUSED, PART, PART_REFUSED)
# Blocks that take nothing of the budget.
UNCOUNTED: Final = _table(OUT, REFUSED)
# Blocks whose pages may be dropped.
DROPPABLE: Final = _table(HELD, PART, PART_REFUSED)

# By snapshot: the PageState of each block of its space. Shape (blocks of the space,), dtype uint8.
PageStates = Mapping[str, npt.NDArray[np.uint8]]
NO_PAGES: Final[PageStates] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Some blocks of one snapshot, in order."""

    snapshot: str
    ids: Ids  # block numbers, shape (n,), dtype int32


def bytes_of(sizes: npt.NDArray[np.uint32], ids: Ids) -> int:
    """Return the bytes of the blocks *ids* together: shape (n,), int32. sizes: bytes of each block of their space,
    shape (blocks of the space,), uint32."""
    return int(sizes[ids].sum(dtype=np.int64))


class MountPages(Protocol):
    """The part of a mount that this module uses."""

    @property
    def states(self) -> PageStates:
        """States of its page cache (see cachefs.planning.pagecache.model.PageCacheModel.states)."""


class Coverage:
    """The blocks covered by the page caches of all mounts.

    The event loop sets the mounts, and policies ask from other threads, without a lock: the data they see are replaced
    as a whole, except for the entries of the mounts' arrays, each of which is consistent by itself.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._mounts: Sequence[MountPages] = ()  # mounts with a pusher
        self._leaving: Marks = {}  # blocks that will be dropped from page caches before they are read

    def set_mounts(self, mounts: Sequence[MountPages], leaving: Marks) -> None:
        """Set the mounts into which pages are pushed. leaving: blocks that will be dropped from the page caches before
        they are read, as they are tripwires."""
        self._mounts, self._leaving = tuple(mounts), dict(leaving)

    def are_covered(self, snapshot: str, ids: Numbers) -> npt.NDArray[np.bool_]:
        """Return which of these blocks are in the page cache of each mount into which blocks of *snapshot* are pushed,
        and will still be there when they are read. ids: shape (n,); returns bool, shape (n,).

        Mounts without a pusher do not count.
        """
        states = [of_all[snapshot] for mount in self._mounts if snapshot in (of_all := mount.states)]
        covered = np.full(len(ids), bool(states))
        ids = ids.astype(np.intp, copy=False)
        for one in states:
            covered &= one[ids] == HELD
        leaving = self._leaving.get(snapshot)
        if leaving is not None:
            covered &= ~leaving[ids]
        return covered

    def is_covered(self, key: bytes) -> bool:
        """Return `are_covered` of one block, by its key, in any snapshot."""
        for snapshot, space in self._plan.spaces.items() if self._mounts else ():
            number = space.find(key)
            if number != NO_BLOCK and self.are_covered(snapshot, np.array([number], np.int32))[0]:
                return True
        return False


class MemoryCoverage:
    """Raises the scores of blocks that the memory tier evicts first: those in page caches that the tier below will
    keep.

    A page cache guarantees nothing: the kernel and programs may drop its pages. A block therefore leaves memory early
    only for the tier below, and only where that tier has room, or would evict a block that is read later.
    """

    def __init__(self, coverage: Coverage, kept_below: Callable[[], float]) -> None:
        """kept_below: returns the score below which the tier below takes each block; -inf where it takes none."""
        self._coverage = coverage
        self._kept_below = kept_below

    def are_covered(self, snapshot: str, ids: Numbers) -> npt.NDArray[np.bool_]:
        """As `Coverage.are_covered`."""
        return self._coverage.are_covered(snapshot, ids)

    def raise_scores(self, snapshot: str, ids: Numbers, scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Raise the scores of blocks (float64, shape (n,); the highest is evicted first) in page caches that the tier
        below keeps, so that they are evicted before all others that are read again. Returns *scores*."""
        covered = self._coverage.are_covered(snapshot, ids)
        if covered.any():
            scores[covered & (scores < self._kept_below())] += COVERED_PENALTY
        return scores
