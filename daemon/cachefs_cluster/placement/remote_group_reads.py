"""Plans the reads of other nodes on this one, as one more consumer of this node's plan.

So remote reads count like local ones: their blocks are fetched in time, kept as long, and promoted to memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import Ids
from cachefs.planning.cluster.epoch_reads import RemoteEpochReads
from cachefs.planning.cluster.homes import NodeNumbers
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.timeline import UNKNOWN_READ, PlannedEpoch


@dataclass(frozen=True, slots=True, eq=False)
class _PlannedEpoch:
    duty: RemoteEpochReads
    planned: PlannedEpoch  # the duty, arranged for the plan


class PassedReads(NamedTuple):
    """Reads of one epoch that are done."""

    epoch: int
    # Their blocks, and the nodes that read them: shape (n,), int32 and uint16.
    blocks: Ids
    readers: NodeNumbers


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
        self._handed_over: dict[int, list[Ids]] = {}  # by epoch: blocks handed over ahead of their reads in it
        self._epoch = -1  # the current epoch
        self._progress = 0.0  # part of it that is done
        self._rate = 0.0  # epochs per second; 0: unknown
        self._done = 0  # reads done in it

    def close(self) -> None:
        self._plan.remove_consumer(self.key)
        self._planned_epochs, self._handed_over = {}, {}

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
            # What was read or handed over before stays so: its blocks would be fetched for reads that are done.
            self._done = duty.reads_before(self._progress)
            self._plan.set_progress(self.key, epoch, self._done)
        for known, parts in self._handed_over.items():
            parts[:] = [np.concatenate(parts)]
            self._mark_read(known, parts[0])

    def set_members(self, members: Sequence[object]) -> None:
        """Set the consumers of the group. If they changed, all epochs are outdated: ranks of a job publish one after
        the other, and at first only the reads of the first rank were planned."""
        if members != self._members:
            self._members = members
            self.mark_outdated()

    def mark_outdated(self) -> None:
        """Mark all epochs as to be set anew, as the holders have changed."""
        self._outdated = set(self._planned_epochs)

    def follow_reader(self, epoch: int, progress: float, rate: float) -> list[PassedReads]:
        """Follow the slowest reader to *progress* (0 to 1) of *epoch*; rate: epochs per second, 0 if unknown. Returns
        the passed reads, by epoch."""
        passed: list[PassedReads] = []
        self._rate = rate
        while 0 <= self._epoch < epoch:
            known = self._planned_epochs.pop(self._epoch, None)
            if known is not None:
                passed.append(self._passed(known.duty, len(known.duty.blocks)))
                self._plan.set_progress(self.key, self._epoch, len(known.duty.blocks))
            self._handed_over.pop(self._epoch, None)
            self._progress = 0.0
            if not self._planned_epochs:
                self._epoch, self._done = epoch, 0
                break
            self._epoch, self._done = self._epoch + 1, 0
            self._plan.set_progress(self.key, self._epoch, 0)
            for ids in self._handed_over.get(self._epoch, []):
                self._mark_read(self._epoch, ids)
        known = self._planned_epochs.get(self._epoch)
        if known is None or self._epoch > epoch:
            return passed
        self._progress = max(self._progress, progress)
        done = known.duty.reads_before(progress)
        if done > self._done:
            passed.append(self._passed(known.duty, done))
            self._done = done
        self._plan.set_progress(self.key, self._epoch, self._done, rate * len(known.duty.blocks))
        return passed

    def _passed(self, duty: RemoteEpochReads, done: int) -> PassedReads:
        return PassedReads(self._epoch, duty.blocks[self._done : done], duty.readers[self._done : done])

    def find_reads(self, ids: Ids, reader: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return the epoch in which node number *reader* is to read each block here next, and the seconds until then:
        both of shape (n,); infinite seconds where it is to read it in neither the current epoch nor the next. ids:
        shape (n,), int32."""
        epochs, seconds = np.full(len(ids), self._epoch), np.full(len(ids), np.inf)
        for epoch in (self._epoch + 1, self._epoch):
            known = self._planned_epochs.get(epoch)
            if known is None:
                continue
            reads = known.planned.first[ids]
            todo = np.flatnonzero(reads != UNKNOWN_READ)
            if epoch == self._epoch:
                todo = todo[reads[todo] >= self._done]
            todo = todo[known.duty.readers[reads[todo]] == reader]
            distance = epoch - self._epoch + known.duty.positions[reads[todo]] - self._progress
            epochs[todo] = epoch
            seconds[todo] = distance / (self._rate or 1.0)
        return epochs, seconds

    def note_handed_over(self, epoch: int, ids: Ids) -> None:
        """Record that blocks have been given to the node that is to read them in *epoch*, the current or the next:
        shape (n,), int32. Otherwise they would be fetched again, at worst from the origin, for a reader that has
        them."""
        self._handed_over.setdefault(epoch, []).append(ids)
        self._mark_read(epoch, ids)

    def _mark_read(self, epoch: int, ids: Ids) -> None:
        known = self._planned_epochs.get(epoch)
        if known is not None:
            reads = known.planned.first[ids]
            reads = np.unique(reads[reads != UNKNOWN_READ])
            self._plan.note_early_reads(self.key, reads, is_next_epoch=epoch != self._epoch)
