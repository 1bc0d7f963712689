"""What this node kept until other members counted for placement, and those who keep it now have not got yet.

It lets go of a block when the node that keeps it has got it, and of all when every node has what is its own. Else what
is another node's would be evicted first, before that one could get it, and be read from the origin once more: where a
node drains, joins or comes back.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import numpy as np

from cachefs.planning.blocks.space import Ids
from cachefs.planning.cluster.standing import Mine, Standing
from cachefs_daemon.cooperation.holders import FORMER_SECONDS, Former

# Seconds between two looks whether the others have got what is theirs.
LOOK_SECONDS: Final = 1.0


class Owed:
    """Of one snapshot. Used on the event loop."""

    def __init__(self, snapshot: str, me: str, standing: Standing, filled: Callable[[], bool]) -> None:
        """me: id of this node. filled: have all other nodes got what is theirs to keep?"""
        self._snapshot = snapshot
        self._me = me
        self._standing = standing
        self._filled = filled
        self._owed: Mine | None = None
        self._until = self._look_at = 0.0  # loop times

    def note(self, former: Former) -> None:
        """Other members count. former: who kept what until now."""
        if self._me not in former.ids:
            return
        number = former.ids.index(self._me)
        owed: Mine = np.logical_or.reduce([nodes == number for nodes in (former.holders, *former.besides)])
        self._owed = owed if self._owed is None else owed | self._owed
        self._until = asyncio.get_running_loop().time() + FORMER_SECONDS

    def stand(self, mine: Mine) -> None:
        """*mine* says from now on what is this node's to keep, beside what it owes. It is not copied."""
        if self._owed is not None:
            self._owed &= ~mine
            mine = mine | self._owed
        self._standing.set(self._snapshot, mine)
        self._standing.owe(self._snapshot, self._owed)

    def given(self, ids: Ids, keeps: Callable[[Ids], Mine]) -> None:
        """A node has got these blocks: shape (n,), int32. keeps: which of some blocks are that node's to keep."""
        if self._owed is not None and len(ids := ids[self._owed[ids]]):
            self._standing.update(self._snapshot, ids[keeps(ids)], False)

    def look(self) -> None:
        """To be called some times a second."""
        now = asyncio.get_running_loop().time()
        if self._owed is None or now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        if now > self._until or self._filled():
            self._standing.update(self._snapshot, np.flatnonzero(self._owed).astype(np.int32), False)
            self._standing.owe(self._snapshot, None)
            self._owed = None
