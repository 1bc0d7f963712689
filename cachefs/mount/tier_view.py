"""The index and the tiers of this node, as its daemon last described them, and as it describes them after a restart."""

from collections.abc import Mapping
from pathlib import Path

from cachefs.block import TIER_NAMES
from cachefs.index import IndexReader
from cachefs.messages import NodeView


class TierView:
    """Where to look for a block (the index), and where its bytes are (the directories of the tiers)."""

    def __init__(self, view: NodeView) -> None:
        """Raises CachefsError where the index cannot be read."""
        self.index = IndexReader(Path(view.index))
        self.directories = _directories(view)  # tier number -> directory of its segments

    def follow(self, view: NodeView) -> bool:
        """Use what a daemon, which may have restarted, says now. True where a tier has another directory.

        Raises CachefsError where an index that has taken the place of the one read so far cannot be read. Where it has
        another path, everything is then as it was. Where it has the same path, no block is found until a later call
        succeeds, so that the daemon is asked for each.
        """
        if view.index != str(self.index.path):
            fresh = IndexReader(Path(view.index))
            self.index.close()
            self.index = fresh
        elif not self.index.is_current():
            # LMDB opens no path twice in a process.
            self.index.close()
            self.index = IndexReader(Path(view.index))
        directories = _directories(view)
        moved = directories != self.directories
        self.directories = directories
        return moved


def _directories(view: NodeView) -> Mapping[int, Path]:
    return {TIER_NAMES.index(name): Path(path) for name, path in view.tiers.items()}
