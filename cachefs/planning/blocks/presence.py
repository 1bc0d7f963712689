"""Which blocks of a snapshot are on this node, as one byte each, kept up to date by the store for whoever plans."""

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import NO_BLOCK, BlockSpace, Ids

ABSENT: Final = 0
IN_MEMORY: Final = 1
IN_SSD: Final = 2


States = Mapping[str, npt.NDArray[np.uint8]]


def state_in(tier: int | None) -> int:
    """The state of a block that is in that tier; None: in none."""
    return ABSENT if tier is None else tier + 1


class Presence:
    """Changed under the store's lock."""

    def __init__(self) -> None:
        # Snapshot id -> state of each block of its space, uint8. To be read by anyone at any time, and never written
        # to: the mapping is replaced, not changed, and each entry of an array is right by itself.
        self.states: dict[str, npt.NDArray[np.uint8]] = {}
        self._spaces: dict[str, BlockSpace] = {}

    def watch(self, space: BlockSpace) -> None:
        """Every block counts as absent until `set` says otherwise."""
        self._spaces = {**self._spaces, space.snapshot: space}
        self.states = {**self.states, space.snapshot: np.zeros(space.count, np.uint8)}

    def unwatch(self, snapshot: str) -> None:
        self._spaces = {known: space for known, space in self._spaces.items() if known != snapshot}
        self.states = {known: states for known, states in self.states.items() if known != snapshot}

    def set(self, key: bytes, state: int) -> None:
        for snapshot, space in self._spaces.items():
            number = space.find(key)
            if number != NO_BLOCK:
                self.states[snapshot][number] = state

    def set_all(self, snapshot: str, ids: Ids, states: list[int]) -> None:
        self.states[snapshot][ids] = states
