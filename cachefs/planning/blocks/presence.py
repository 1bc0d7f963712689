"""Records which blocks of a snapshot are on this node, one byte per block. Updated by the store, read by planning."""

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import NO_BLOCK, BlockSpace, Ids

# States of a block: in no tier, or in one of two.
ABSENT: Final = 0
IN_MEMORY: Final = 1
IN_SSD: Final = 2

# Most changes that are kept for a consumer: 100 MB. In a second there are some thousands.
MAX_CHANGES: Final = 1 << 20

# By snapshot, the state of each block of its space, one of the three above: shape (blocks of the space,), uint8.
TierStates = Mapping[str, npt.NDArray[np.uint8]]


def state_in_tier(tier: int | None) -> int:
    """Return the state of a block in tier number *tier*, or in none (None)."""
    return ABSENT if tier is None else tier + 1


class Presence:
    """The states of the blocks of all watched snapshots. The store changes them, under its lock."""

    def __init__(self) -> None:
        # By snapshot id, see TierStates. May be read at any time, and is written by the methods here only: the mapping
        # is replaced, not changed, and each entry of an array is consistent by itself.
        self.states: dict[str, npt.NDArray[np.uint8]] = {}
        # Latest state of each changed block, taken from time to time by a consumer; None without one.
        self.changes: dict[bytes, int] | None = None
        self._spaces: dict[str, BlockSpace] = {}

    def take_changes(self) -> dict[bytes, int] | None:
        """Return the changes since the last call, and note further ones. None: nothing was noted, or too much."""
        changes, self.changes = self.changes, {}
        return changes

    def stop_noting(self) -> None:
        """Note no more changes."""
        self.changes = None

    def add_space(self, space: BlockSpace) -> None:
        """Add states for *space*. Each block counts as absent until `set_state`."""
        self._spaces = {**self._spaces, space.snapshot: space}
        self.states = {**self.states, space.snapshot: np.zeros(space.count, np.uint8)}

    def remove_snapshot(self, snapshot: str) -> None:
        """Remove the states of *snapshot*."""
        self._spaces = {known: space for known, space in self._spaces.items() if known != snapshot}
        self.states = {known: states for known, states in self.states.items() if known != snapshot}

    def set_state(self, key: bytes, state: int) -> None:
        """Set the state of a block in each snapshot that has it."""
        if self.changes is not None:
            self.changes[key] = state
            if len(self.changes) > MAX_CHANGES:
                self.changes = None  # the consumer has stopped, or must examine everything again
        for snapshot, space in self._spaces.items():
            number = space.find(key)
            if number != NO_BLOCK:
                self.states[snapshot][number] = state

    def set_states(self, snapshot: str, ids: Ids, states: list[int]) -> None:
        """Set the states of the blocks *ids* (shape (n,), int32) of *snapshot*, one for each."""
        self.states[snapshot][ids] = states
