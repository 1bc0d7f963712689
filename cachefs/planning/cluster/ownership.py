"""Records which blocks are this node's to keep. Other blocks are evicted first, and fetched only shortly before their
read.

A node has more blocks than those that it holds for the cluster: blocks that it has fetched from their holder to read
them, and blocks that it has handed on. These are copies, whose original is on another node. A copy is therefore fetched
within the window of the next reads and no earlier, and is the first to be evicted once it has been read.

Some of the copies are second copies (see cachefs.planning.cluster.copies): other nodes read the block here if its
holder is lost. They are evicted after the other copies, and before all blocks that are this node's to keep.
"""

from collections import deque
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import Ids, Numbers
from cachefs.planning.cluster.homes import NodeNumbers
from cachefs.planning.cluster.moves import EpochMoves

# Per block of a snapshot, whether it is this node's to keep: shape (blocks,), bool.
OwnedMarks = npt.NDArray[np.bool_]

# Added to a score in seconds: 30,000 years, more than the raise of blocks in page caches. Blocks that are never read
# again have infinity, and are still evicted first.
COPY_PENALTY: Final = 1e12
# The same for second copies. Blocks that a node fetches in order to read them displace blocks that score more than half
# of COPY_PENALTY, so they displace second copies too.
SECOND_COPY_PENALTY: Final = 0.75 * COPY_PENALTY
# Highest score of a second copy without that penalty: it is worth as much where this node never reads it.
_MAX_SECOND_SCORE: Final = 1e10
# Seconds: blocks read sooner count as about to be read, unless the fetcher sets another distance.
COPY_WINDOW_SECONDS: Final = 5.0
# Changes that are remembered for policies that poll: more than an epoch has windows.
_MAX_CHANGES: Final = 1024


class Ownership:
    """Records by snapshot which blocks are this node's to keep. In a snapshot without a record, blocks are not
    distinguished, and all are kept as the plan says.

    The event loop changes the records, and policies and planners read them from other threads without a lock: the
    mapping is replaced, and entries of its arrays change one by one, each consistent by itself.
    """

    def __init__(self) -> None:
        # By snapshot. Not to be changed by readers.
        self.owned: Mapping[str, OwnedMarks] = {}
        # By snapshot: blocks that other nodes are to keep since the members changed, and have not fetched from here
        # yet. A subset of `owned`, evicted last, since no other node may have them. Not to be changed by readers.
        self.pending_handoffs: Mapping[str, OwnedMarks] = {}
        # By snapshot: blocks of which this node keeps the second copy while it does not own them. Not to be changed.
        self.second_copies: Mapping[str, OwnedMarks] = {}
        # Seconds ahead of readers within which copies are fetched: in that time copies count as the plan says.
        self.copy_window = COPY_WINDOW_SECONDS
        # (number, snapshot, blocks): blocks that ceased to be this node's; None: all blocks must be checked again.
        self._lost: deque[tuple[int, str, Ids | None]] = deque(maxlen=_MAX_CHANGES)
        self._changes = 0  # next number in `_lost`

    def set_copy_window(self, seconds: float) -> None:
        """Set the seconds ahead of readers within which copies are fetched."""
        self.copy_window = seconds

    def set_owned(self, snapshot: str, owned: OwnedMarks) -> None:
        """Replace the record of *snapshot*. *owned* is not copied, and only `update_owned` may change it.

        Takes 1 ms per million blocks where little has changed; policies then check only the changed blocks, and else
        all blocks again.
        """
        before = self.owned.get(snapshot)
        self.owned = {**self.owned, snapshot: owned}
        if before is None or len(before) != len(owned):
            self._note_lost(snapshot, None)
        elif len(lost := np.flatnonzero(before & ~owned)):
            self._note_lost(snapshot, lost.astype(np.int32))

    def update_owned(self, snapshot: str, ids: Ids, owned: "npt.NDArray[np.bool_] | bool") -> None:
        """Change some blocks of a record. ids: shape (n,), int32. Unknown snapshots are ignored."""
        marks = self.owned.get(snapshot)
        if marks is None:
            return
        lost = ids[marks[ids] & ~np.asarray(owned)]
        marks[ids] = owned
        if (owed := self.pending_handoffs.get(snapshot)) is not None:
            owed[ids] = False
        if len(lost):
            self._note_lost(snapshot, lost)

    def set_pending_handoffs(self, snapshot: str, pending: OwnedMarks | None) -> None:
        """Replace the record of blocks that other nodes have still to fetch; None: none. *pending* is not copied:
        `update_owned` clears it for the blocks it is given. Policies check all blocks again."""
        if pending is None and snapshot not in self.pending_handoffs:
            return
        others = {known: one for known, one in self.pending_handoffs.items() if known != snapshot}
        self.pending_handoffs = others if pending is None else {**others, snapshot: pending}
        self._note_lost(snapshot, None)  # blocks that were to be evicted next may be owed now

    def set_second_copies(self, snapshot: str, marks: OwnedMarks | None) -> None:
        """Replace the record of second copies; None: none. *marks* is not copied."""
        others = {known: one for known, one in self.second_copies.items() if known != snapshot}
        self.second_copies = others if marks is None else {**others, snapshot: marks}

    def forget_snapshot(self, snapshot: str) -> None:
        """Drop the record of *snapshot*: all its blocks are kept as the plan says."""
        self.set_pending_handoffs(snapshot, None)
        self.set_second_copies(snapshot, None)
        if snapshot in self.owned:
            self.owned = {known: mine for known, mine in self.owned.items() if known != snapshot}
            self._note_lost(snapshot, None)

    def lost_since(self, mark: int) -> tuple[int, list[tuple[str, Ids]] | None]:
        """Return the next mark, and the blocks that have ceased to be this node's since *mark*: a pair (snapshot,
        blocks) per change, with block numbers of shape (n,), int32. None instead of the list where any block may have
        changed."""
        if self._changes == mark:
            return mark, []
        remembered = list(self._lost)
        end = remembered[-1][0] + 1 if remembered else mark
        new = [one for one in remembered if one[0] >= mark]
        if len(new) < end - mark or any(ids is None for _, _, ids in new):
            return end, None
        return end, [(snapshot, ids) for _, snapshot, ids in new if ids is not None]

    def evictable_copies(self, snapshot: str, ids: Numbers, scores: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """Return which blocks are copies, to be evicted before all blocks that are this node's: shape (n,), bool.

        ids: shape (n,); scores: of each block, the highest is evicted first: shape (n,), float64. Blocks with a score
        of `self.copy_window` seconds or less are about to be read, and are not raised.
        """
        mine = self.owned.get(snapshot)
        if mine is None:
            return np.zeros(len(ids), np.bool_)
        raised: npt.NDArray[np.bool_] = ~mine[ids.astype(np.intp, copy=False)]
        raised &= scores > self.copy_window
        return raised

    def raise_copies(
        self, snapshot: str, ids: Numbers, copies: npt.NDArray[np.bool_], scores: npt.NDArray[np.float64]
    ) -> None:
        """Raise the *scores* of blocks that are *copies* to be evicted first, in place: second copies less than others.
        ids, copies, scores: shape (n,)."""
        marks = self.second_copies.get(snapshot)
        if marks is None:
            scores[copies] += COPY_PENALTY
            return
        second = copies & marks[ids.astype(np.intp, copy=False)]
        scores[copies & ~second] += COPY_PENALTY
        scores[second] = np.minimum(scores[second], _MAX_SECOND_SCORE) + SECOND_COPY_PENALTY

    def _note_lost(self, snapshot: str, ids: Ids | None) -> None:
        self._lost.append((self._changes, snapshot, ids))
        self._changes += 1


def owned_now(
    holders: NodeNumbers, moves: EpochMoves, passed: npt.NDArray[np.floating], me: int
) -> npt.NDArray[np.bool_]:
    """Return which blocks are node *me*'s to keep in the middle of an epoch: shape (blocks,), bool. Takes 8 ms per
    million blocks.

    A block belongs to its holder until its next holder has read it. holders: at the start of the epoch; passed: time up
    to which each node has read, from 0 to 1: shape (nodes,). For *me*, pass a little more than its progress: a block
    that it fetches to keep is then its own before the read, and no policy takes it for a copy meanwhile.
    """
    # The last element is for NO_NODE, which reads nothing.
    limits = np.append(passed.astype(np.float32), np.float32(0))
    is_read = moves.times < limits.take(moves.following, mode="clip")
    mine: npt.NDArray[np.bool_] = np.where(is_read, moves.following == me, holders == me)
    return mine
