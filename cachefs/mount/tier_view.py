"""The index and the tiers of this node, as last described by its daemon, also after the daemon's restart."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from cachefs.block import TIER_NAMES, BlockLocation
from cachefs.errors import CachefsError
from cachefs.index import IndexReader
from cachefs.messages import NodeView

log = logging.getLogger(__name__)


class _MissingIndex(IndexReader):
    """Replaces an index that cannot be opened yet: finds no block, and accepts no segment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_open = False
        self.owner = -1  # no user has this number

    def get(self, key: bytes) -> BlockLocation | None:
        return None

    def blocks_of(self, content: bytes) -> Iterator[tuple[bytes, BlockLocation]]:
        return iter(())

    def close(self) -> None:
        pass


class TierView:
    """The index (location of each block) and the directories of the tiers (bytes of the blocks)."""

    def __init__(self, view: NodeView, *, needs_index: bool = True) -> None:
        """needs_index: raise CachefsError where the index cannot be read. Otherwise no block is found until
        `adopt_view` succeeds."""
        try:
            self.index = IndexReader(Path(view.index))
        except CachefsError as error:
            if needs_index:
                raise
            log.warning("%s; until then, each block is requested from the daemon", error)
            self.index = _MissingIndex(Path(view.index))
        self.directories = _tier_directories(view)  # tier number -> directory of its segments

    def adopt_view(self, view: NodeView) -> bool:
        """Adopt the view of a daemon that may have restarted. Returns whether a tier has another directory or owner.

        Raises CachefsError where a new index cannot be read. With another path than before, the old state is kept. With
        the same path, no block is found until a later call succeeds, and each is requested from the daemon.
        """
        owner = self.index.owner
        if view.index != str(self.index.path):
            fresh = IndexReader(Path(view.index))
            self.index.close()
            self.index = fresh
        elif not self.index.is_current():
            # LMDB does not open a path twice in a process.
            self.index.close()
            self.index = IndexReader(Path(view.index))
        directories = _tier_directories(view)
        moved = directories != self.directories or owner != self.index.owner
        self.directories = directories
        return moved


def _tier_directories(view: NodeView) -> Mapping[int, Path]:
    return {TIER_NAMES.index(name): Path(path) for name, path in view.tiers.items()}
