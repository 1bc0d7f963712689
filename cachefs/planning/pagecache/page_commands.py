"""The orders of a push plan to its executor: small records over arrays."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import Ids


class PageAction(StrEnum):
    """The action on the pages of an order's blocks."""

    STORE = "store"
    DROP = "drop"
    CHECK = "check"  # after an earlier store: store pages again that the kernel has reclaimed


@dataclass(frozen=True, slots=True, eq=False)
class FileBlocks:
    """Blocks of one snapshot, named by their files. Unlike block numbers these names need no block space."""

    snapshot: str
    entries: npt.NDArray[np.int64]  # entry of the file in the snapshot, shape (n,)
    numbers: npt.NDArray[np.int64]  # number of the block within its file, shape (n,)

    def __len__(self) -> int:
        return len(self.entries)

    def split(self, count: int) -> "tuple[FileBlocks, FileBlocks]":
        """Return the first *count* blocks, and the rest."""
        return (
            FileBlocks(self.snapshot, self.entries[:count], self.numbers[:count]),
            FileBlocks(self.snapshot, self.entries[count:], self.numbers[count:]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PageCommand:
    """An action on the pages of some blocks, in their order."""

    serial: int  # identifies the order in reports
    action: PageAction
    files: FileBlocks  # the blocks
    ids: Ids | None  # the same blocks by their numbers, int32; None where their snapshot is in no plan
    size: int  # bytes that may come into the page cache: 0 unless pages are to be stored
    decided_at: float  # time of the decision, in seconds
