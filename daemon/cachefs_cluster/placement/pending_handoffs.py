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
from cachefs.planning.cluster.ownership import OwnedMarks, Ownership
from cachefs_cluster.placement.holders import FORMER_HOLDER_SECONDS, FormerHolders

# Seconds between two checks whether all nodes have their blocks.
CHECK_SECONDS: Final = 1.0


class PendingHandoffs:
    """Pending handoffs of one snapshot. Used on the event loop."""

    def __init__(self, snapshot: str, me: str, standing: Ownership, are_others_complete: Callable[[], bool]) -> None:
        """me: id of this node. are_others_complete: returns whether all other nodes have their blocks."""
        self._snapshot = snapshot
        self._me = me
        self._standing = standing
        self._are_others_complete = are_others_complete
        self._pending: OwnedMarks | None = None
        self._until = self._check_at = 0.0  # loop times

    def add_handoffs(self, former: FormerHolders) -> None:
        """Add handoffs after a change of the ring. former: the holders until now."""
        if self._me not in former.ids:
            return
        number = former.ids.index(self._me)
        owed: OwnedMarks = np.logical_or.reduce([nodes == number for nodes in (former.holders, *former.other_holders)])
        self._pending = owed if self._pending is None else owed | self._pending
        self._until = asyncio.get_running_loop().time() + FORMER_HOLDER_SECONDS

    def set_kept(self, mine: OwnedMarks) -> None:
        """Set the blocks that this node keeps, besides pending handoffs. *mine* is not copied."""
        if self._pending is not None:
            self._pending &= ~mine
            mine = mine | self._pending
        self._standing.set_owned(self._snapshot, mine)
        self._standing.set_pending_handoffs(self._snapshot, self._pending)

    def release_blocks(self, ids: Ids, keeps: Callable[[Ids], OwnedMarks]) -> None:
        """Let go of blocks that a node has got: shape (n,), int32. keeps: returns which of some blocks that node
        keeps."""
        if self._pending is not None and len(ids := ids[self._pending[ids]]):
            self._standing.update_owned(self._snapshot, ids[keeps(ids)], False)

    def expire(self) -> None:
        """End all handoffs if every node has its blocks, or after a timeout. Call several times a second."""
        now = asyncio.get_running_loop().time()
        if self._pending is None or now < self._check_at:
            return
        self._check_at = now + CHECK_SECONDS
        if now > self._until or self._are_others_complete():
            self._standing.update_owned(self._snapshot, np.flatnonzero(self._pending).astype(np.int32), False)
            self._standing.set_pending_handoffs(self._snapshot, None)
            self._pending = None
