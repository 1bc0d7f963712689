"""Keeps cachefs.planning.blocks.presence up to date with the locations of a snapshot's blocks in the index."""

from collections.abc import Collection
from typing import Final

import numpy as np

from cachefs.planning.blocks.presence import Presence, state_in_tier
from cachefs.planning.blocks.space import NO_BLOCK, BlockSpace
from cachefs.planning.eviction.tiering import Tiering
from cachefs_daemon.runtime.locked import Locked
from cachefs_daemon.store.index_writer import IndexWriter

# Blocks that are looked up under the lock at once: 2 ms.
_KEYS_PER_BATCH: Final = 1024


class PresenceWatch:
    """Watches snapshots. Thread-safe and blocking. Presence changes under the lock of *tiering* only."""

    def __init__(self, presence: Presence, index: IndexWriter, tiering: Locked[Tiering]) -> None:
        self._presence = presence
        self._index = index
        self._tiering = tiering

    @property
    def watched(self) -> Collection[str]:
        """Ids of the snapshots that are watched."""
        return self._presence.states.keys()

    def watch(self, space: BlockSpace) -> None:
        """Keep the states of all blocks of *space* up to date until `unwatch`. It takes 3 us per block on this node, so
        call it in a thread; until it returns, some present blocks count as absent."""
        with self._tiering:
            self._presence.add_space(space)
        for batch in self._index.key_batches(_KEYS_PER_BATCH):
            ids = space.ids(batch)
            here = np.flatnonzero(ids != NO_BLOCK)
            with self._tiering:
                if space.snapshot in self._presence.states:
                    states = [self._state(batch[index]) for index in here.tolist()]
                    self._presence.set_states(space.snapshot, ids[here], states)

    def unwatch(self, snapshot: str) -> None:
        with self._tiering:
            self._presence.remove_snapshot(snapshot)

    def _state(self, key: bytes) -> int:
        location = self._index.get(key)
        return state_in_tier(location.tier if location is not None else None)
