"""Records which blocks of a snapshot are on this node: one byte per block, updated by the store and read by planning.

`ShardBytes` sums the bytes by tier and shard, updated change by change. A shard is one of 256 parts of a snapshot: a
range of block numbers. A node's report to a scheduler thus fits into a few hundred bytes, however many blocks there
are.
"""

from collections.abc import Mapping, Sequence
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
SHARDS: Final = 256
# The number for a complete shard.
WHOLE: Final = 255


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


class ShardBytes:
    """The bytes of one snapshot. 1,000 changes take 0.2 ms, however many blocks the snapshot has."""

    def __init__(self, space: BlockSpace) -> None:
        """Takes a byte per block, besides the space."""
        self.space = space
        # By state (see cachefs.planning.blocks.presence) and shard: bytes, of shape (3, SHARDS), int64.
        self.bytes = np.zeros((3, SHARDS), np.int64)
        self._states = np.zeros(space.count, np.uint8)
        self._total = np.zeros(SHARDS, np.int64)
        numbers = np.arange(space.count, dtype=np.int64)
        np.add.at(self._total, shards_of_blocks(numbers, space.count), space.sizes.astype(np.int64))

    def apply_changes(self, keys: Sequence[bytes], states: npt.NDArray[np.uint8]) -> bool:
        """Set the *states* (shape (keys,)) of these blocks, each named once. Keys of other snapshots are ignored.
        Returns whether anything has changed."""
        ids = self.space.ids(keys)
        here = np.flatnonzero(ids != NO_BLOCK)
        ids, new = ids[here], states[here]
        old = self._states[ids]
        changed = np.flatnonzero(old != new)
        if not len(changed):
            return False
        ids, old, new = ids[changed], old[changed], new[changed]
        sizes = self.space.sizes[ids].astype(np.int64)
        shards = shards_of_blocks(ids.astype(np.int64), self.space.count)
        np.subtract.at(self.bytes, (old, shards), sizes)
        np.add.at(self.bytes, (new, shards), sizes)
        self._states[ids] = new
        self.bytes[0] = 0
        return True

    @property
    def is_empty(self) -> bool:
        """True where no byte of the snapshot is on this node."""
        return not self.bytes.any()

    def shard_parts(self) -> npt.NDArray[np.uint8]:
        """Return the part of each shard that is on this node in any tier: 0 (nothing) to WHOLE, rounded down; shape
        (SHARDS,), uint8. In a snapshot with fewer blocks than shards, a block belongs to several of them."""
        return self._parts(self._states != ABSENT, self.bytes[1:].sum(axis=0))

    def shard_parts_in(self, state: int) -> npt.NDArray[np.uint8]:
        """Return the parts for the blocks in *state* (see cachefs.planning.blocks.presence)."""
        return self._parts(self._states == state, self.bytes[state])

    def _parts(self, there: npt.NDArray[np.bool_], shard_bytes: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """there: which blocks count, shape (blocks,); shard_bytes: their bytes by shard, shape (SHARDS,)."""
        count = self.space.count
        if 0 < count < SHARDS:
            few: npt.NDArray[np.uint8] = np.where(there[np.arange(SHARDS) * count // SHARDS], WHOLE, 0).astype(np.uint8)
            return few
        part = np.divide(shard_bytes * WHOLE, self._total, out=np.full(SHARDS, float(WHOLE)), where=self._total > 0)
        found: npt.NDArray[np.uint8] = np.floor(part).astype(np.uint8)
        return found


def shards_of_blocks(numbers: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Return the shard of each of these blocks (shape (n,), int64) of a snapshot with *count* blocks."""
    found: npt.NDArray[np.int64] = numbers * SHARDS // max(count, 1)
    return found
