"""Pending handoffs: blocks whose holder has moved to another node, which has not fetched them yet.

This node lets go of a block when the new holder has got it, and of all blocks when every node has its own. Otherwise
the blocks of other nodes would be evicted first, before these could fetch them, and be read from the origin once more,
whenever a node drains, joins or comes back.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import numpy as np

from cachefs.planning.blocks.space import Ids
from cachefs.planning.cluster.standing import Mine, Standing
from cachefs_daemon.cooperation.holders import FORMER_SECONDS, Former

# Seconds between two checks whether all nodes have their blocks.
LOOK_SECONDS: Final = 1.0


class Owed:
    """Pending handoffs of one snapshot. Used on the event loop."""

    def __init__(self, snapshot: str, me: str, standing: Standing, filled: Callable[[], bool]) -> None:
        """me: id of this node. filled: returns whether all other nodes have their blocks."""
        self._snapshot = snapshot
        self._me = me
        self._standing = standing
        self._filled = filled
        self._owed: Mine | None = None
        self._until = self._look_at = 0.0  # loop times

    def note(self, former: Former) -> None:
        """Add handoffs after a change of the ring. former: the holders until now."""
        if self._me not in former.ids:
            return
        number = former.ids.index(self._me)
        owed: Mine = np.logical_or.reduce([nodes == number for nodes in (former.holders, *former.besides)])
        self._owed = owed if self._owed is None else owed | self._owed
        self._until = asyncio.get_running_loop().time() + FORMER_SECONDS

    def stand(self, mine: Mine) -> None:
        """Set the blocks that this node keeps, besides pending handoffs. *mine* is not copied."""
        if self._owed is not None:
            self._owed &= ~mine
            mine = mine | self._owed
        self._standing.set(self._snapshot, mine)
        self._standing.owe(self._snapshot, self._owed)

    def given(self, ids: Ids, keeps: Callable[[Ids], Mine]) -> None:
        """Let go of blocks that a node has got: shape (n,), int32. keeps: returns which of some blocks that node
        keeps."""
        if self._owed is not None and len(ids := ids[self._owed[ids]]):
            self._standing.update(self._snapshot, ids[keeps(ids)], False)

    def look(self) -> None:
        """End all handoffs if every node has its blocks, or after a timeout. Call several times a second."""
        now = asyncio.get_running_loop().time()
        if self._owed is None or now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        if now > self._until or self._filled():
            self._standing.update(self._snapshot, np.flatnonzero(self._owed).astype(np.int32), False)
            self._standing.owe(self._snapshot, None)
            self._owed = None
