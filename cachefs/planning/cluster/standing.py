"""Is a block this node's to keep? What is not goes first, and is fetched only when it is about to be read.

A node has more blocks than those that it holds for the cluster: what it has fetched from its holder to read it, and
what it has handed on. These are copies, of which another node has the original. So a copy is brought within the window
of what is read next and no earlier, and is the first to be evicted once it has been read.
"""

from collections import deque
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import Ids, Numbers
from cachefs.planning.cluster.homes import Nodes
from cachefs.planning.cluster.reads import Reads

# By block of a snapshot, whether it is this node's to keep: shape (blocks,), bool.
Mine = npt.NDArray[np.bool_]

# Added to a score in seconds: 30,000 years, which is more than what page caches hold is raised by. What is never read
# again, at infinity, is still evicted first.
RAISED: Final = 1e12
# Seconds: what is read sooner counts as about to be read, if nobody says how far ahead is fetched.
NEAR: Final = 5.0
# Changes that are remembered for policies that look now and then: more than an epoch has windows.
_REMEMBERED: Final = 1024


class Standing:
    """Which blocks are this node's to keep, by snapshot. Snapshots that it does not know have no copies to tell from
    originals, and all of their blocks are kept as the plan says.

    The event loop changes it, and policies and planners read it from other threads without a lock: the mapping is
    replaced, and entries of its arrays change one by one, each right by itself.
    """

    def __init__(self) -> None:
        # Per snapshot, whose blocks are whose. Not to be changed.
        self.mine: Mapping[str, Mine] = {}
        # Per snapshot, what other nodes are to keep since the members changed, and have not got from here yet. It is
        # among what is mine, and goes last of all: nobody else may have it. Not to be changed.
        self.owed: Mapping[str, Mine] = {}
        # Seconds ahead of readers within which copies are fetched: until then they are worth what the plan says.
        self.near = NEAR
        # (number, snapshot, blocks): what is not mine any more; None for all: look at everything again.
        self._lost: deque[tuple[int, str, Ids | None]] = deque(maxlen=_REMEMBERED)
        self._changes = 0  # the next number in `_lost`

    def set(self, snapshot: str, mine: Mine) -> None:
        """From now on *mine* says it for all blocks of *snapshot*. It is not copied, and only `update` may change it.

        It takes 1 ms per million blocks where little has changed, and then policies look at what has. Else they look at
        all blocks again."""
        before = self.mine.get(snapshot)
        self.mine = {**self.mine, snapshot: mine}
        if before is None or len(before) != len(mine):
            self._note(snapshot, None)
        elif len(lost := np.flatnonzero(before & ~mine)):
            self._note(snapshot, lost.astype(np.int32))

    def update(self, snapshot: str, ids: Ids, mine: "npt.NDArray[np.bool_] | bool") -> None:
        """Some blocks change. ids: shape (n,), int32. Unknown snapshots are ignored."""
        marks = self.mine.get(snapshot)
        if marks is None:
            return
        lost = ids[marks[ids] & ~np.asarray(mine)]
        marks[ids] = mine
        if (owed := self.owed.get(snapshot)) is not None:
            owed[ids] = False
        if len(lost):
            self._note(snapshot, lost)

    def owe(self, snapshot: str, owed: Mine | None) -> None:
        """From now on *owed* says what other nodes have still to get of it; None: nothing. It is not copied: `update`
        clears it for the blocks that it is told."""
        others = {known: one for known, one in self.owed.items() if known != snapshot}
        self.owed = others if owed is None else {**others, snapshot: owed}

    def forget(self, snapshot: str) -> None:
        """There are no copies of *snapshot* any more: all its blocks are kept as the plan says."""
        self.owe(snapshot, None)
        if snapshot in self.mine:
            self.mine = {known: mine for known, mine in self.mine.items() if known != snapshot}
            self._note(snapshot, None)

    def lost_since(self, mark: int) -> tuple[int, list[tuple[str, Ids]] | None]:
        """The next mark, and what has ceased to be mine since *mark*: a pair (snapshot, blocks) per change, where the
        blocks are numbers of shape (n,), int32. None in the place of the list where anything may have changed."""
        if self._changes == mark:
            return mark, []
        remembered = list(self._lost)
        end = remembered[-1][0] + 1 if remembered else mark
        new = [one for one in remembered if one[0] >= mark]
        if len(new) < end - mark or any(ids is None for _, _, ids in new):
            return end, None
        return end, [(snapshot, ids) for _, snapshot, ids in new if ids is not None]

    def raises(
        self, snapshot: str, ids: Numbers, scores: npt.NDArray[np.float64], near: float | None = None
    ) -> npt.NDArray[np.bool_]:
        """Which blocks are copies that go before all that is mine: shape (n,), bool.

        ids: shape (n,); scores: of each of them, the highest is evicted first: shape (n,), float64. What scores *near*
        at most is about to be read: by default seconds, `self.near`.
        """
        mine = self.mine.get(snapshot)
        if mine is None:
            return np.zeros(len(ids), np.bool_)
        raised: npt.NDArray[np.bool_] = ~mine[ids.astype(np.intp, copy=False)]
        raised &= scores > (self.near if near is None else near)
        return raised

    def _note(self, snapshot: str, ids: Ids | None) -> None:
        self._lost.append((self._changes, snapshot, ids))
        self._changes += 1


def mine_now(
    holders: Nodes, following: Nodes, reads: Reads, passed: npt.NDArray[np.floating], me: int
) -> npt.NDArray[np.bool_]:
    """Which blocks are node *me*'s to keep in the middle of an epoch: shape (blocks,), bool. 8 ms per million blocks.

    A block is its holder's until it is read, and then its next holder's. holders, following: at the start of this epoch
    and of the next (see cachefs.planning.cluster.copies); reads: of this one; passed: how far each node is in it, from
    0 to 1, shape (nodes,). For *me* itself that had better be a little more than where it is: what it fetches to keep
    it is then mine before it is read, and no policy takes it for a copy meanwhile.

    Raises ValueError where the places are not known.
    """
    if reads.when is None:
        raise ValueError("the places of reads in this epoch are not known")
    # The last one is for reads of nobody, which never pass.
    limits = np.append(passed.astype(np.float32), np.float32(0))
    is_read = reads.when < limits.take(reads.reader, mode="clip")
    mine: npt.NDArray[np.bool_] = np.where(is_read, following == me, holders == me)
    return mine
