"""Chooses the pages to evict from one mount's page cache: those of the blocks that are read last.

The tiers' policies work by keys, one block after the other, at 37 us per victim. Pages come and go at 12,000 blocks a
second, so the same rule (evict the block that is read last) works on whole arrays here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import BlockSpace, Ids, distinct
from cachefs.planning.pagecache.states import DROPPABLE, Blocks
from cachefs.planning.sequences.plan import Plan

# After an examination of all droppable blocks, one in _CANDIDATE_RATIO of them stays a candidate, at least
# _MIN_CANDIDATES: those that are read last.
_CANDIDATE_RATIO: Final = 16
_MIN_CANDIDATES: Final = 1024
# Seconds between fruitless examinations of all blocks: each takes 12 ms with 300,000 held blocks.
EXAMINE_SECONDS: Final = 0.25


@dataclass(slots=True, eq=False)
class _SnapshotCandidates:
    """The candidates among the blocks of one snapshot."""

    space: BlockSpace
    states: npt.NDArray[np.uint8]  # per block, its PageState; the model changes the entries
    left_to_kernel: npt.NDArray[np.bool_]  # per block, whether its pages are left to the kernel instead of dropped
    ids: Ids  # candidates, in ascending order
    fresh: list[Ids] = field(default_factory=list)  # later candidates, in order of arrival
    fresh_count: int = 0  # number of blocks in `fresh`, with repetitions

    def consider(self, ids: Ids) -> None:
        """Add *ids* to the candidates. They are merged only now and then, since they arrive by the dozen and may be as
        many as there are blocks."""
        self.fresh.append(ids)
        self.fresh_count += len(ids)
        if self.fresh_count > max(_MIN_CANDIDATES, self.space.count):
            self.merge_fresh()
        elif len(self.fresh) > _MIN_CANDIDATES:
            self.fresh = [np.concatenate(self.fresh)]

    def merge_fresh(self) -> None:
        """Merge the fresh candidates, and remove those that may no longer be dropped."""
        candidates = distinct(np.concatenate((self.ids, *self.fresh)))
        self.ids = candidates[DROPPABLE[self.states[candidates]] & ~self.left_to_kernel[candidates]]
        self.fresh, self.fresh_count = [], 0

    def consider_all(self) -> None:
        """Make each droppable block a candidate."""
        self.ids = np.flatnonzero(DROPPABLE[self.states] & ~self.left_to_kernel).astype(np.int32)


@dataclass(frozen=True, slots=True)
class _Ranking:
    """All candidates with the time of their next use. The arrays have one entry per candidate."""

    snapshots: list[str]
    whose: npt.NDArray[np.int64]  # index in `snapshots` of the candidate's snapshot
    ids: Ids
    due: npt.NDArray[np.float64]  # seconds until the block is read, inf: never

    def of(self, number: int, chosen: npt.NDArray[np.int64]) -> Ids:
        """Return the chosen candidates of snapshot *number*. chosen: indices, dtype int64."""
        ids: Ids = self.ids[chosen[self.whose[chosen] == number]]
        return ids


class PageCandidates:
    """Blocks that may be evicted from a page cache. A small subset, since an examination of all blocks is slow: those
    read last, and those read just now, whose next use has moved away."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._by_snapshot: dict[str, _SnapshotCandidates] = {}
        self._version = -1  # of the plan, at the last examination of all blocks
        self._examined_at = -EXAMINE_SECONDS  # time of that examination, in seconds

    def add_snapshot(
        self, space: BlockSpace, states: npt.NDArray[np.uint8], left_to_kernel: npt.NDArray[np.bool_]
    ) -> None:
        """Add the blocks of *space*. states: the PageState of each block, shape (space.count,), uint8; left_to_kernel:
        whether its pages are left to the kernel, bool. The caller keeps both up to date."""
        self._by_snapshot[space.snapshot] = _SnapshotCandidates(space, states, left_to_kernel, np.zeros(0, np.int32))

    def remove_snapshot(self, snapshot: str) -> None:
        """Forget the blocks of a snapshot. Raises KeyError for one that was not added."""
        del self._by_snapshot[snapshot]

    def consider(self, blocks: Blocks) -> None:
        """Add blocks that were just read, and may now be the last to be read again."""
        self._by_snapshot[blocks.snapshot].consider(blocks.ids)

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of candidates by snapshot; repeated ones count again."""
        return {snapshot: len(one.ids) + one.fresh_count for snapshot, one in self._by_snapshot.items()}

    def choose_victims(self, size: int, later_than: float, count: int, now: float) -> list[Blocks]:
        """Return droppable blocks that are read later than in *later_than* seconds, those read last: as few as make
        *size* bytes, and at most *count*. now: seconds of any clock.

        Returns one `Blocks` per snapshot that has any, with the block read last first.
        """
        if self._version == self._plan.version:
            found, total = self._furthest(size, later_than, count)
            if total >= size or now - self._examined_at < EXAMINE_SECONDS:
                return found
        self._version, self._examined_at = self._plan.version, now
        for one in self._by_snapshot.values():
            one.consider_all()
        found, _ = self._furthest(size, later_than, count)
        self._keep_furthest()
        return found

    def _furthest(self, size: int, later_than: float, count: int) -> tuple[list[Blocks], int]:
        """Return victims, and their bytes."""
        ranking = self._ranked()
        order = np.argsort(-ranking.due, kind="stable")
        order = order[: np.count_nonzero(ranking.due > later_than)][:count]
        sizes = np.zeros(len(order), np.int64)
        for number, snapshot in enumerate(ranking.snapshots):
            theirs = ranking.whose[order] == number
            sizes[theirs] = self._by_snapshot[snapshot].space.sizes[ranking.ids[order[theirs]]]
        ends = np.cumsum(sizes)
        order = order[: int(np.searchsorted(ends, size)) + 1]
        found = [Blocks(snapshot, ranking.of(number, order)) for number, snapshot in enumerate(ranking.snapshots)]
        return [blocks for blocks in found if len(blocks.ids)], int(ends[len(order) - 1]) if len(order) else 0

    def _ranked(self) -> _Ranking:
        snapshots = list(self._by_snapshot)
        for one in self._by_snapshot.values():
            one.merge_fresh()
        blocks = [self._by_snapshot[snapshot].ids for snapshot in snapshots]
        whose = np.repeat(np.arange(len(blocks)), [len(ids) for ids in blocks])
        due = [self._plan.next_use_of(snapshot, ids) for snapshot, ids in zip(snapshots, blocks, strict=True)]
        return _Ranking(
            snapshots,
            whose,
            np.concatenate([np.zeros(0, np.int32), *blocks]),
            np.concatenate([np.zeros(0, np.float64), *due]),
        )

    def _keep_furthest(self) -> None:
        """Remove all candidates except those read last."""
        ranking = self._ranked()
        wanted = max(_MIN_CANDIDATES, len(ranking.ids) // _CANDIDATE_RATIO)
        if len(ranking.ids) <= wanted:
            return
        kept = np.argpartition(ranking.due, len(ranking.due) - wanted)[-wanted:]
        for number, snapshot in enumerate(ranking.snapshots):
            self._by_snapshot[snapshot].ids = ranking.of(number, kept)
