"""What a job calls a sample, in blocks: turns orders of samples into orders of reads."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import BlockSpace, Ids


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Samples:
    """Sample s has the blocks ids[starts[s]:starts[s + 1]] of *space*."""

    space: BlockSpace
    starts: npt.NDArray[np.int64]
    ids: Ids

    def __len__(self) -> int:
        return len(self.starts) - 1

    def reads(self, order: npt.NDArray[np.uint32]) -> "Reads":
        """The reads of an epoch. Samples that do not exist are left out, and counted."""
        known = order if not len(order) or int(order.max()) < len(self) else order[order < len(self)]
        unknown = len(order) - len(known)
        if len(self.ids) == len(self):  # one block each
            return Reads(self.ids[known], None, len(known), unknown)
        first = self.starts[known]
        counts = self.starts[known.astype(np.int64) + 1] - first
        ends = np.cumsum(counts)
        places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - (ends - counts), counts)
        return Reads(self.ids[places], ends, len(known), unknown)


@dataclass(frozen=True, slots=True)
class Reads:
    """One epoch of a consumer. blocks: in reading order; ends: per sample of the epoch, the read after its last (None:
    one read each); samples: in the epoch; unknown: samples of the published order that do not exist."""

    blocks: Ids
    ends: npt.NDArray[np.int64] | None
    samples: int
    unknown: int

    def after_samples(self, samples: int) -> int:
        """Reads that are done when the first *samples* samples are."""
        samples = max(0, min(samples, self.samples))
        if self.ends is None:
            return samples
        return int(self.ends[samples - 1]) if samples else 0

    def samples_after(self, reads: int) -> int:
        """Samples of which all blocks are read after that many reads."""
        return reads if self.ends is None else int(np.searchsorted(self.ends, reads, side="right"))
