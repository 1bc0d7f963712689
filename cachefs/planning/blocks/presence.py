"""Which blocks of a snapshot are on this node, as one byte each, kept up to date by the store for whoever plans."""

from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.block import Location
from cachefs.planning.blocks.space import NO_BLOCK, BlockSpace, Ids

ABSENT: Final = 0
IN_MEMORY: Final = 1
IN_SSD: Final = 2


def state_of(location: Location | None) -> int:
    return ABSENT if location is None else location.tier + 1


class Presence:
    """Changed under the store's lock. states: per watched snapshot, the state of each block of its space; to be read
    by anyone at any time, and never written to. The mapping is replaced, not changed."""

    def __init__(self) -> None:
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
