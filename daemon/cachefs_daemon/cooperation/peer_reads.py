"""Plans the reads of other nodes on this one, as one more consumer of this node's plan.

So remote reads count like local ones: their blocks are fetched in time, kept as long, and promoted to memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cachefs.planning.blocks.space import Ids
from cachefs.planning.cluster.duties import Duty
from cachefs.planning.sequences.epoch import UNKNOWN, Epoch
from cachefs.planning.sequences.plan import Plan


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    duty: Duty
    planned: Epoch  # the duty, arranged for the plan


class PeerReads:
    """Remote reads of one group, epoch by epoch. Used from the event loop only."""

    def __init__(self, plan: Plan, snapshot: str, key: str) -> None:
        """key: name of the consumer in the plan."""
        self.key = key
        self._plan = plan
        self._snapshot = snapshot
        self._members: Sequence[object] = ()
        self._known: dict[int, _Known] = {}  # by epoch
        self._outdated: set[int] = set()  # epochs to be set anew; in use until then
        self._early: dict[int, list[Ids]] = {}  # by epoch: blocks handed over before it began
        self._epoch = -1  # the current epoch
        self._done = 0  # reads done in it

    def close(self) -> None:
        self._plan.remove(self.key)
        self._known, self._early = {}, {}

    def knows(self, epoch: int) -> bool:
        """Return whether the epoch is set and up to date."""
        return epoch in self._known and epoch not in self._outdated

    def has(self, epoch: int) -> bool:
        """Return whether the epoch is set, up to date or not."""
        return epoch in self._known

    @property
    def longest(self) -> int:
        """Reads of the longest known epoch."""
        return max((len(known.duty.blocks) for known in self._known.values()), default=0)

    def set(self, epoch: int, duty: Duty, planned: Epoch) -> None:
        """Set the remote reads of *epoch*, also as arranged for the plan. The first epoch set becomes the current
        one."""
        self._known[epoch] = _Known(duty, planned)
        self._outdated.discard(epoch)
        self._plan.set_prepared(self.key, self._snapshot, epoch, planned)
        if self._epoch < 0:
            self._epoch = epoch
        if epoch == self._epoch:
            self._done = 0

    def of(self, members: Sequence[object]) -> None:
        """Set the consumers of the group. If they changed, all epochs are outdated: ranks of a job publish one after
        the other, and at first only the reads of the first rank were planned."""
        if members != self._members:
            self._members = members
            self.outdate()

    def outdate(self) -> None:
        """Mark all epochs as to be set anew, as the holders have changed."""
        self._outdated = set(self._known)

    def follow(self, epoch: int, place: float, rate: float) -> list[tuple[int, Ids]]:
        """Follow the slowest reader to *place* (0 to 1) of *epoch*; rate: epochs per second, 0 if unknown. Returns the
        passed reads, by epoch: their blocks, shape (n,), int32."""
        passed: list[tuple[int, Ids]] = []
        while 0 <= self._epoch < epoch:
            known = self._known.pop(self._epoch, None)
            if known is not None:
                passed.append((self._epoch, known.duty.blocks[self._done :]))
                self._plan.set_progress(self.key, self._epoch, len(known.duty.blocks))
            self._early.pop(self._epoch, None)
            if not self._known:
                self._epoch, self._done = epoch, 0
                break
            self._epoch, self._done = self._epoch + 1, 0
            self._plan.set_progress(self.key, self._epoch, 0)
            for ids in self._early.pop(self._epoch, []):
                self._mark(ids)
        known = self._known.get(self._epoch)
        if known is None or self._epoch > epoch:
            return passed
        done = known.duty.done(place)
        if done > self._done:
            passed.append((self._epoch, known.duty.blocks[self._done : done]))
            self._done = done
        self._plan.set_progress(self.key, self._epoch, self._done, rate * len(known.duty.blocks))
        return passed

    def handed_over(self, ids: Ids, reader: int) -> list[tuple[int, Ids]]:
        """Record that node number *reader* has got some blocks, which it reads soon: shape (n,), int32. Returns those
        that it was to read here, by epoch."""
        found = []
        for epoch in (self._epoch, self._epoch + 1):
            known = self._known.get(epoch)
            if known is None:
                continue
            reads = known.planned.first[ids]
            todo = np.flatnonzero(reads != UNKNOWN)
            if epoch == self._epoch:
                todo = todo[reads[todo] >= self._done]
            todo = todo[known.duty.readers[reads[todo]] == reader]
            if len(todo):
                mine = ids[todo]
                found.append((epoch, mine))
                if epoch == self._epoch:
                    self._mark(mine)
                else:
                    # Otherwise the block would be fetched again, at worst from the origin, for a reader that has it.
                    self._plan.read_early(self.key, np.unique(reads[todo]), ahead=True)
                    self._early.setdefault(epoch, []).append(mine)
            ids = np.delete(ids, todo)
        return found

    def _mark(self, ids: Ids) -> None:
        known = self._known.get(self._epoch)
        if known is not None:
            reads = known.planned.first[ids]
            self._plan.read_early(self.key, np.unique(reads[reads != UNKNOWN]))
