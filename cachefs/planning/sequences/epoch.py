"""The reads of one epoch of one consumer, indexed for the plan."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import BlockSpace, Ids

# Stands for an unknown read.
UNKNOWN_READ: Final = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class PlannedEpoch:
    """The reads of an epoch, counted from its start."""

    # The block of each read, in order of the reads: shape (reads,), int32.
    blocks: Ids
    # The first read of each block of the space, or UNKNOWN_READ: shape (blocks of the space,), int32.
    first: Ids
    # For each read, the next read of the same block in this epoch, or UNKNOWN_READ: shape (reads,), int32. None where
    # each block is read at most once.
    repeats: Ids | None
    # Number of different blocks that are read.
    distinct: int
    # True where no epoch follows.
    is_last: bool

    @classmethod
    def of(cls, blocks: npt.NDArray[np.integer], space: BlockSpace, is_last: bool) -> "PlannedEpoch":
        """Build an epoch. blocks: numbers in *space* in order of the reads, shape (reads,), any integer type.

        Raises ValueError for a block outside *space*.
        """
        order = np.ascontiguousarray(blocks, np.int32)
        if len(order) and (int(order.min()) < 0 or int(order.max()) >= space.count):
            raise ValueError(f"a sequence names blocks beyond the {space.count} of snapshot {space.snapshot}")
        reads = np.arange(len(order), dtype=np.int32)
        first = np.full(space.count, UNKNOWN_READ, np.int32)
        first[order[::-1]] = reads[::-1]
        distinct = int(np.count_nonzero(first != UNKNOWN_READ))
        later = None
        if distinct < len(order):
            by_block = np.argsort(order, kind="stable")
            again = order[by_block[1:]] == order[by_block[:-1]]
            later = np.full(len(order), UNKNOWN_READ, np.int32)
            later[by_block[:-1][again]] = by_block[1:][again]
        return cls(order, first, later, distinct, is_last)

    @property
    def repetition(self) -> float:
        """Reads per block that is read at all. Of consecutive reads of one block, only the first can be observed."""
        return len(self.blocks) / self.distinct if self.distinct else 1.0

    def next_reads_from(self, position: int) -> Ids:
        """Return the next read of each block from read *position* on, or UNKNOWN_READ: shape (blocks of the space,),
        int32."""
        if position <= len(self.blocks) // 2:
            next_read = self.first.copy()
            # Of several reads of one block, numpy keeps its last assignment, which is the latest read.
            next_read[self.blocks[:position]] = UNKNOWN_READ if self.repeats is None else self.repeats[:position]
            return next_read
        next_read = np.full(len(self.first), UNKNOWN_READ, np.int32)
        reads = np.arange(position, len(self.blocks), dtype=np.int32)
        # Of several reads of one block, numpy keeps its last assignment. The reads are assigned backwards, so the
        # first read of the block is kept.
        next_read[self.blocks[position:][::-1]] = reads[::-1]
        return next_read
