"""Counts refetched bytes, of blocks that this node had before, by job and epoch, with the capacity of the tiers."""

from collections.abc import Callable, Collection
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.job_messages import RefetchedBytes
from cachefs.planning.blocks.presence import ABSENT, Presence
from cachefs.planning.blocks.space import BlockSpace
from cachefs.planning.sequences.plan import Plan

# Epochs that are kept of a job: the latest.
MAX_EPOCHS: Final = 64
# A fetch that a reader waits for is reported twice within this many seconds.
SAME_FETCH_SECONDS: Final = 5.0


class RefetchLog:
    """Counts the bytes that jobs fetch again. Used from the event loop only."""

    def __init__(self, plan: Plan, presence: Presence, capacity: Callable[[], float]) -> None:
        """capacity: returns the bytes that the node's tiers keep."""
        self._plan = plan
        self._presence = presence
        self._capacity = capacity
        # By snapshot: when each of its blocks was fetched last, in seconds; -inf where it was not. Blocks that were on
        # the node when the snapshot was begun count as fetched then.
        self._fetched: dict[str, npt.NDArray[np.float32]] = {}
        self._of_jobs: dict[str, dict[int, RefetchedBytes]] = {}  # by job and epoch

    def start_snapshot(self, space: BlockSpace, now: float) -> None:
        """Record which blocks of a snapshot are on the node, before any is fetched for a consumer of it: blocks arrive
        in batches, so when the first of a batch is noted, others of the batch are present already."""
        if space.snapshot not in self._fetched:
            states = self._presence.states.get(space.snapshot)
            here = np.zeros(space.count, np.bool_) if states is None else states != ABSENT
            self._fetched[space.snapshot] = np.where(here, np.float32(now), np.float32(-np.inf))

    def count_fetch(self, job: str, epoch: int, snapshot: str, block: int, now: float) -> None:
        """Record that a block was fetched for a job. epoch: as the job counts them; block: its number in the space of
        the snapshot; now: monotonic seconds."""
        space, fetched = self._plan.spaces.get(snapshot), self._fetched.get(snapshot)
        if space is None or fetched is None:
            return
        before_this, fetched[block] = float(fetched[block]), now
        if -np.inf < before_this < now - SAME_FETCH_SECONDS:
            epochs = self._of_jobs.setdefault(job, {})
            before = epochs.get(epoch)
            size = int(space.sizes[block]) + (before.bytes if before is not None else 0)
            total = int(space.sizes.sum(dtype=np.int64)) if before is None else before.dataset
            epochs[epoch] = RefetchedBytes(epoch=epoch, bytes=size, dataset=total, tiers=int(self._capacity()))
            if len(epochs) > MAX_EPOCHS:
                del epochs[min(epochs)]

    def refetches_of(self, job: str) -> list[RefetchedBytes]:
        """Return what a job has fetched again, in order of the epochs."""
        return sorted(self._of_jobs.get(job, {}).values(), key=lambda one: one.epoch)

    def forget(self, job: str) -> None:
        """Forget a job that is no longer shown."""
        self._of_jobs.pop(job, None)

    def keep_snapshots(self, snapshots: Collection[str]) -> None:
        """Forget all snapshots but these."""
        self._fetched = {name: fetched for name, fetched in self._fetched.items() if name in snapshots}
