"""Finds the blocks that are in the page caches of all mounts that may read them, for eviction from the tiers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import NO_BLOCK, Numbers
from cachefs.planning.pagecache.states import HELD, PageStates
from cachefs.planning.sequences.plan import Plan

# By snapshot, a flag for each block of its space: shape (blocks of the space,), bool.
Marks = Mapping[str, npt.NDArray[np.bool_]]

# Added to a score in seconds: 30 years. Blocks that are never read again have infinity, and are still evicted first.
COVERED_PENALTY: Final = 1e9


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
        held = np.full(len(ids), bool(states))
        ids = ids.astype(np.intp, copy=False)
        for one in states:
            held &= one[ids] == HELD
        leaving = self._leaving.get(snapshot)
        if leaving is not None:
            held &= ~leaving[ids]
        return held

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
        held = self._coverage.are_covered(snapshot, ids)
        if held.any():
            scores[held & (scores < self._kept_below())] += COVERED_PENALTY
        return scores
