"""Which blocks of a snapshot are on this node, one byte per block. The store keeps it up to date; planning reads it."""

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import NO_BLOCK, BlockSpace, Ids

# States of a block: in no tier, or in which one.
ABSENT: Final = 0
IN_MEMORY: Final = 1
IN_SSD: Final = 2

# Changes that are kept for who takes them: 100 MB. In a second there are some thousands.
MOST_CHANGES: Final = 1 << 20

# By snapshot, the state of each block of its space, one of the three above: shape (blocks of the space,), uint8.
TierStates = Mapping[str, npt.NDArray[np.uint8]]


def state_in(tier: int | None) -> int:
    """The state of a block that is in tier number *tier*, or in none (None)."""
    return ABSENT if tier is None else tier + 1


class Presence:
    """States of the blocks of all snapshots that are watched. The store changes them, under its lock."""

    def __init__(self) -> None:
        # By snapshot id, see TierStates. Anyone may read it at any time, and only the methods here write to it: the
        # mapping is replaced, not changed, and each entry of an array is right by itself.
        self.states: dict[str, npt.NDArray[np.uint8]] = {}
        # The latest state of each block that has changed, for who takes them from time to time; None: nobody does.
        self.changes: dict[bytes, int] | None = None
        self._spaces: dict[str, BlockSpace] = {}

    def watch(self, space: BlockSpace) -> None:
        """From now on there are states for *space*. Every block counts as absent until `set` says otherwise."""
        self._spaces = {**self._spaces, space.snapshot: space}
        self.states = {**self.states, space.snapshot: np.zeros(space.count, np.uint8)}

    def unwatch(self, snapshot: str) -> None:
        """There are no states for *snapshot* any more."""
        self._spaces = {known: space for known, space in self._spaces.items() if known != snapshot}
        self.states = {known: states for known, states in self.states.items() if known != snapshot}

    def set(self, key: bytes, state: int) -> None:
        """The block is in *state* now, in every snapshot that has it."""
        if self.changes is not None:
            self.changes[key] = state
            if len(self.changes) > MOST_CHANGES:
                self.changes = None  # whoever took them does so no more, or has to look at everything anew
        for snapshot, space in self._spaces.items():
            number = space.find(key)
            if number != NO_BLOCK:
                self.states[snapshot][number] = state

    def set_all(self, snapshot: str, ids: Ids, states: list[int]) -> None:
        """The blocks *ids* (shape (n,), int32) of *snapshot* are in *states*, one for each."""
        self.states[snapshot][ids] = states
