"""Pages that an earlier daemon had pushed, of snapshots that are in no plan so far."""

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from cachefs.planning.blocks.space import BlockSpace, Ids
from cachefs.planning.pagecache.orders import FileBlocks
from cachefs.planning.pagecache.states import Blocks


class Leftovers:
    """They are kept for a while, since a job that goes on after a restart of the daemon soon has a plan again, and are
    to be dropped afterwards. How many bytes they are nobody knows, as sizes are in the plan's spaces."""

    def __init__(self) -> None:
        self._files: dict[str, FileBlocks] = {}  # by snapshot
        self._until = math.inf  # seconds until which a plan may claim them

    def __bool__(self) -> bool:
        return bool(self._files)

    def begin(self, held: Iterable[FileBlocks], until: float) -> None:
        """A pusher says what is there. until: seconds; afterwards it is to be dropped."""
        self._files = {files.snapshot: files for files in held}
        self._until = until

    def claim(self, spaces: Mapping[str, BlockSpace]) -> Iterator[Blocks]:
        """Those of snapshots that have a space, by block numbers. They are no leftovers any more."""
        for snapshot in self._files.keys() & spaces.keys():
            yield Blocks(snapshot, _numbered(self._files.pop(snapshot), spaces[snapshot]))

    def take(self, count: int, now: float) -> FileBlocks | None:
        """At most *count* blocks of one snapshot whose time is over, to be dropped; None where there are none."""
        if not self._files or now <= self._until:
            return None
        snapshot, files = self._files.popitem()
        first, rest = files.split(count)
        if len(rest):
            self._files[snapshot] = rest
        return first


def _numbered(files: FileBlocks, space: BlockSpace) -> Ids:
    """Numbers of the blocks in *space*, in ascending order; those that it does not have are left out."""
    starts, ids = space.blocks_of(files.entries)
    wanted = starts[:-1] + files.numbers
    return np.unique(ids[wanted[wanted < starts[1:]]])
