"""Maps a job's samples to blocks: turns orders of samples into orders of reads."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import BlockSpace, Ids, check_block_count, expand_runs


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Samples:
    """The blocks of each sample of a dataset: sample s has the blocks ids[starts[s]:starts[s + 1]] of *space*."""

    space: BlockSpace
    # Shape (samples + 1,), int64.
    starts: npt.NDArray[np.int64]
    # Numbers of blocks, one sample after the other: one dimension, int32.
    ids: Ids

    def __len__(self) -> int:
        return len(self.starts) - 1

    def block_mask(self) -> npt.NDArray[np.bool_] | None:
        """Return which blocks of the space the samples have, shape (blocks of the space,), bool. None: all."""
        own = np.zeros(self.space.count, np.bool_)
        own[self.ids] = True
        return None if own.all() else own

    def reads_in_order(self, order: npt.NDArray[np.uint32]) -> "EpochReads":
        """Return the reads of an epoch with samples in this *order*: sample numbers, shape (samples of the epoch,),
        uint32. Samples that do not exist are left out, and counted. Raises ConfigError for more than
        cachefs.planning.blocks.space.MAX_BLOCKS reads."""
        known = order if not len(order) or int(order.max()) < len(self) else order[order < len(self)]
        unknown = len(order) - len(known)
        if len(self.ids) == len(self):  # one block each
            return EpochReads(self.ids[known], None, len(known), unknown)
        first = self.starts[known]
        counts = self.starts[known.astype(np.int64) + 1] - first
        ends = np.zeros(len(counts), np.int64)
        np.cumsum(counts, out=ends)
        check_block_count(int(ends[-1]) if len(ends) else 0)
        return EpochReads(self.ids[expand_runs(first, ends, np.int64)], ends, len(known), unknown)


@dataclass(frozen=True, slots=True)
class EpochReads:
    """The reads of one epoch of a consumer, and the samples that they make up."""

    # The block of each read, in order: shape (reads,), int32.
    blocks: Ids
    # Per sample, the read after its last one: shape (samples,), int64. None where each sample is one read.
    ends: npt.NDArray[np.int64] | None
    # Samples of the epoch that exist.
    samples: int
    # Samples of the published order that do not exist.
    unknown: int

    def reads_after(self, samples: int) -> int:
        """Return how many reads are done when the first *samples* samples are."""
        samples = max(0, min(samples, self.samples))
        if self.ends is None:
            return samples
        return int(self.ends[samples - 1]) if samples else 0

    def samples_after(self, reads: int) -> int:
        """Return how many samples are complete after *reads* reads."""
        return reads if self.ends is None else int(np.searchsorted(self.ends, reads, side="right"))
