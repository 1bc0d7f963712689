"""Which blocks are in the page caches of the mounts that may read them, and what the tiers make of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import NO_BLOCK, Numbers
from cachefs.planning.pagecache.states import HELD, PageStates
from cachefs.planning.sequences.plan import Plan

# By snapshot, whether each block of its space is meant: shape (blocks of the space,), bool.
Marks = Mapping[str, npt.NDArray[np.bool_]]

# Added to a score in seconds: 30 years. What is never read again, at infinity, is still evicted first.
LATER: Final = 1e9


class Mount(Protocol):
    """A mount as far as this module needs to know it."""

    @property
    def states(self) -> PageStates:
        """In its page cache (see cachefs.planning.pagecache.model.PageCacheModel.states)."""


class Coverage:
    """What the page caches of all mounts cover.

    The event loop says which mounts have page caches, and policies ask from other threads, without a lock: what they
    see is replaced as a whole, but for the entries of the mounts' arrays, each of which is right by itself.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._mounts: Sequence[Mount] = ()  # those into which pages are pushed
        self._leaving: Marks = {}  # blocks that will be dropped from page caches before they are read

    def show(self, mounts: Sequence[Mount], leaving: Marks) -> None:
        """Pages are pushed into these mounts from now on, and into no others. leaving: which blocks will be dropped
        from the page caches before they are read, as they are tripwires."""
        self._mounts, self._leaving = tuple(mounts), dict(leaving)

    def holds(self, snapshot: str, ids: Numbers) -> npt.NDArray[np.bool_]:
        """Which of these blocks are in the page cache of every mount into which blocks of *snapshot* are pushed, and
        will still be there when they are read. ids: shape (n,); returns bool, shape (n,).

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

    def holds_key(self, key: bytes) -> bool:
        """`holds` of one block, by its key, in any snapshot."""
        for snapshot, space in self._plan.spaces.items() if self._mounts else ():
            number = space.find(key)
            if number != NO_BLOCK and self.holds(snapshot, np.array([number], np.int32))[0]:
                return True
        return False


class MemoryCoverage:
    """What the memory tier gives up first: blocks in page caches of which the tier below keeps a copy that lasts.

    A page cache promises nothing: the kernel takes pages back, and so do programs. So a block leaves memory early only
    for the tier below, and only where that tier has room, or would evict a block that is read later.
    """

    def __init__(self, coverage: Coverage, kept_below: Callable[[], float]) -> None:
        """kept_below: the tier below takes every block whose score is less than this; -inf where it takes none."""
        self._coverage = coverage
        self._kept_below = kept_below

    def holds(self, snapshot: str, ids: Numbers) -> npt.NDArray[np.bool_]:
        """As `Coverage.holds`."""
        return self._coverage.holds(snapshot, ids)

    def defer(self, snapshot: str, ids: Numbers, scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Change the scores of blocks (float64, shape (n,); the highest is evicted first) so that blocks in page caches
        that the tier below keeps are evicted before all others that are read again. Returns *scores*."""
        held = self._coverage.holds(snapshot, ids)
        if held.any():
            scores[held & (scores < self._kept_below())] += LATER
        return scores
