"""Which blocks need no place in memory: the mounts that may read them have them in their page caches. No I/O."""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import NO_BLOCK, Ids
from cachefs.planning.pagecache.model import HELD
from cachefs.planning.sequences.plan import Plan

Marks = Mapping[str, npt.NDArray[np.bool_]]

# Added to a score in seconds: 30 years. What is never read again, at infinity, is still given up before.
LATER: Final = 1e9


class Mount(Protocol):
    """states: of the blocks in its page cache, as those of cachefs.planning.pagecache.model.PageCache."""

    @property
    def states(self) -> Mapping[str, npt.NDArray[np.uint8]]: ...


class Coverage:
    """The event loop says who has page caches, and policies ask from other threads, without a lock: what they see is
    replaced as a whole, but for the entries of the mounts' arrays, each of which is right by itself.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._mounts: Sequence[Mount] = ()
        self._leaving: Marks = {}

    def show(self, mounts: Sequence[Mount], leaving: Marks) -> None:
        """leaving: by snapshot, which blocks will be taken out of page caches before they are read, as tripwires."""
        self._mounts, self._leaving = tuple(mounts), dict(leaving)

    def holds(self, snapshot: str, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which of these blocks every mount has that is pushed blocks of *snapshot*, and will have when they are read.

        One without a pusher does not count.
        """
        states = [of_all[snapshot] for mount in self._mounts if snapshot in (of_all := mount.states)]
        held = np.full(len(ids), bool(states))
        for one in states:
            held &= one[ids] == HELD
        leaving = self._leaving.get(snapshot)
        if leaving is not None:
            held &= ~leaving[ids]
        return held

    def holds_key(self, key: bytes) -> bool:
        """`holds` of one block, whichever snapshot it is of."""
        for snapshot, space in self._plan.spaces.items() if self._mounts else ():
            number = space.find(key)
            if number != NO_BLOCK and self.holds(snapshot, np.array([number], np.int32))[0]:
                return True
        return False

    def defer(self, snapshot: str, ids: Ids, scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Scores (of what goes first, the highest) by which what is held goes before all else that is read again."""
        if self._mounts:
            scores[self.holds(snapshot, ids)] += LATER
        return scores
