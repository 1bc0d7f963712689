"""Pages pushed under an earlier daemon, of snapshots that are in no plan yet."""

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from cachefs.planning.blocks.space import BlockSpace, Ids
from cachefs.planning.pagecache.page_commands import FileBlocks
from cachefs.planning.pagecache.states import Blocks


class UnplannedPages:
    """The pages are kept for a while, since a job that continues after a restart of the daemon soon has a plan again,
    and then dropped. Their bytes are unknown, as sizes are in the plan's spaces."""

    def __init__(self) -> None:
        self._files: dict[str, FileBlocks] = {}  # by snapshot
        self._until = math.inf  # seconds until which a plan may claim the pages

    def __bool__(self) -> bool:
        return bool(self._files)

    def replace_pages(self, held: Iterable[FileBlocks], until: float) -> None:
        """Replace the leftovers by the pages that a pusher reports. until: seconds, after which they are dropped."""
        self._files = {files.snapshot: files for files in held}
        self._until = until

    def claim_planned(self, spaces: Mapping[str, BlockSpace]) -> Iterator[Blocks]:
        """Yield and remove the leftovers of snapshots that have a space, by block numbers."""
        for snapshot in self._files.keys() & spaces.keys():
            yield Blocks(snapshot, _block_numbers(self._files.pop(snapshot), spaces[snapshot]))

    def take_overdue(self, count: int, now: float) -> FileBlocks | None:
        """Return and remove at most *count* overdue blocks of one snapshot, to be dropped; None where there are
        none."""
        if not self._files or now <= self._until:
            return None
        snapshot, files = self._files.popitem()
        first, rest = files.split(count)
        if len(rest):
            self._files[snapshot] = rest
        return first


def _block_numbers(files: FileBlocks, space: BlockSpace) -> Ids:
    """Return the numbers of the blocks in *space*, in ascending order, without those that it does not have."""
    starts, ids = space.blocks_of(files.entries)
    wanted = starts[:-1] + files.numbers
    return np.unique(ids[wanted[wanted < starts[1:]]])
