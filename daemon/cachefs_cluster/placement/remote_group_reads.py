"""Plans the reads of other nodes on this one, as one more consumer of this node's plan.

So remote reads count like local ones: their blocks are fetched in time, kept as long, and promoted to memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cachefs.planning.blocks.space import Ids
from cachefs.planning.cluster.copies import RemoteEpochReads
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.timeline import UNKNOWN_READ, PlannedEpoch


@dataclass(frozen=True, slots=True, eq=False)
class _PlannedEpoch:
    duty: RemoteEpochReads
    planned: PlannedEpoch  # the duty, arranged for the plan


class RemoteGroupReads:
    """Remote reads of one group, epoch by epoch. Used from the event loop only."""

    def __init__(self, plan: Plan, snapshot: str, key: str) -> None:
        """key: name of the consumer in the plan."""
        self.key = key
        self._plan = plan
        self._snapshot = snapshot
        self._members: Sequence[object] = ()
        self._planned_epochs: dict[int, _PlannedEpoch] = {}  # by epoch
        self._outdated: set[int] = set()  # epochs to be set anew; in use until then
        self._early: dict[int, list[Ids]] = {}  # by epoch: blocks handed over before it began
        self._epoch = -1  # the current epoch
        self._done = 0  # reads done in it

    def close(self) -> None:
        self._plan.remove_consumer(self.key)
        self._planned_epochs, self._early = {}, {}

    def is_current(self, epoch: int) -> bool:
        """Return whether the epoch is set and up to date."""
        return epoch in self._planned_epochs and epoch not in self._outdated

    def has_epoch(self, epoch: int) -> bool:
        """Return whether the epoch is set, up to date or not."""
        return epoch in self._planned_epochs

    @property
    def longest_epoch(self) -> int:
        """Reads of the longest known epoch."""
        return max((len(known.duty.blocks) for known in self._planned_epochs.values()), default=0)

    def set_epoch(self, epoch: int, duty: RemoteEpochReads, planned: PlannedEpoch) -> None:
        """Set the remote reads of *epoch*, also as arranged for the plan. The first epoch set becomes the current
        one."""
        self._planned_epochs[epoch] = _PlannedEpoch(duty, planned)
        self._outdated.discard(epoch)
        self._plan.set_prepared_epoch(self.key, self._snapshot, epoch, planned)
        if self._epoch < 0:
            self._epoch = epoch
        if epoch == self._epoch:
            self._done = 0

    def set_members(self, members: Sequence[object]) -> None:
        """Set the consumers of the group. If they changed, all epochs are outdated: ranks of a job publish one after
        the other, and at first only the reads of the first rank were planned."""
        if members != self._members:
            self._members = members
            self.mark_outdated()

    def mark_outdated(self) -> None:
        """Mark all epochs as to be set anew, as the holders have changed."""
        self._outdated = set(self._planned_epochs)

    def follow_reader(self, epoch: int, progress: float, rate: float) -> list[tuple[int, Ids]]:
        """Follow the slowest reader to *progress* (0 to 1) of *epoch*; rate: epochs per second, 0 if unknown. Returns
        the passed reads, by epoch: their blocks, shape (n,), int32."""
        passed: list[tuple[int, Ids]] = []
        while 0 <= self._epoch < epoch:
            known = self._planned_epochs.pop(self._epoch, None)
            if known is not None:
                passed.append((self._epoch, known.duty.blocks[self._done :]))
                self._plan.set_progress(self.key, self._epoch, len(known.duty.blocks))
            self._early.pop(self._epoch, None)
            if not self._planned_epochs:
                self._epoch, self._done = epoch, 0
                break
            self._epoch, self._done = self._epoch + 1, 0
            self._plan.set_progress(self.key, self._epoch, 0)
            for ids in self._early.pop(self._epoch, []):
                self._mark_read(ids)
        known = self._planned_epochs.get(self._epoch)
        if known is None or self._epoch > epoch:
            return passed
        done = known.duty.reads_before(progress)
        if done > self._done:
            passed.append((self._epoch, known.duty.blocks[self._done : done]))
            self._done = done
        self._plan.set_progress(self.key, self._epoch, self._done, rate * len(known.duty.blocks))
        return passed

    def note_handed_over(self, ids: Ids, reader: int) -> list[tuple[int, Ids]]:
        """Record that node number *reader* has got some blocks, which it reads soon: shape (n,), int32. Returns those
        that it was to read here, by epoch."""
        found = []
        for epoch in (self._epoch, self._epoch + 1):
            known = self._planned_epochs.get(epoch)
            if known is None:
                continue
            reads = known.planned.first[ids]
            todo = np.flatnonzero(reads != UNKNOWN_READ)
            if epoch == self._epoch:
                todo = todo[reads[todo] >= self._done]
            todo = todo[known.duty.readers[reads[todo]] == reader]
            if len(todo):
                mine = ids[todo]
                found.append((epoch, mine))
                if epoch == self._epoch:
                    self._mark_read(mine)
                else:
                    # Otherwise the block would be fetched again, at worst from the origin, for a reader that has it.
                    self._plan.note_early_reads(self.key, np.unique(reads[todo]), is_next_epoch=True)
                    self._early.setdefault(epoch, []).append(mine)
            ids = np.delete(ids, todo)
        return found

    def _mark_read(self, ids: Ids) -> None:
        known = self._planned_epochs.get(self._epoch)
        if known is not None:
            reads = known.planned.first[ids]
            self._plan.note_early_reads(self.key, np.unique(reads[reads != UNKNOWN_READ]))
