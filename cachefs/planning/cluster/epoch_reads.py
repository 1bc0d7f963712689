"""Reads of whole epochs by all consumers of a group: which node reads each block first, and when.

`FirstReads` is one epoch of a group. `ScheduledReads` places it on the clock of the group that leads (see
cachefs.planning.cluster.schedule), so that the epochs of several groups can be compared: a time is a number of the
leader's epochs since the start of one of them. `RemoteEpochReads` lists a node's duty in an epoch: the reads by other
nodes of blocks that it holds, in order.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import Ids
from cachefs.planning.cluster.homes import NO_NODE, NodeNumbers

# Places in an epoch, from 0 (its start) to 1 (its end): shape (n,), float32.
EpochPositions = npt.NDArray[np.float32]
# Epochs of the leader since the start of one of them: shape (n,), float32. Infinite where there is no read.
LeaderTimes = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class FirstReads:
    """The first read of each block in one epoch. All nodes are assumed to progress at about the same pace."""

    # The node that reads the block first, NO_NODE where none does: shape (blocks,), uint16.
    reader: NodeNumbers
    # Place of that read in its consumer's epoch; 2 where there is none: shape (blocks,), float32. None: not kept (see
    # `without_positions`).
    positions: EpochPositions | None

    @classmethod
    def of(cls, blocks: int, orders: Iterable[tuple[int, Ids]]) -> "FirstReads":
        """Build from the orders of all consumers, in 20 ms per million reads.

        blocks: number of blocks in the space; orders: of each consumer its node, and the blocks that it reads, in
        order: shape (reads,), int32. Of two reads at the same place, the smaller node's counts, so that all nodes get
        the same result. Raises ValueError for an impossible node or block.
        """
        reader = np.full(blocks, NO_NODE, np.uint16)
        when = np.full(blocks, 2, np.float32)
        for node, order in sorted(orders, key=lambda one: one[0]):
            if not 0 <= node < NO_NODE or (len(order) and not 0 <= int(order.min()) <= int(order.max()) < blocks):
                raise ValueError(f"node {node} reads blocks beyond the {blocks:,} of the snapshot")
            backwards = order[::-1].astype(np.intp)
            positions = (np.arange(len(order), dtype=np.float32) / np.float32(max(1, len(order))))[::-1]
            sooner = positions < when[backwards]
            # Of several reads of one block, numpy keeps the last assignment, which is the first read.
            when[backwards[sooner]] = positions[sooner]
            reader[backwards[sooner]] = node
        return cls(reader, when)

    def without_positions(self) -> "FirstReads":
        """Return the same without places, as kept for epochs far ahead: 2 bytes per block instead of 6."""
        return replace(self, positions=None)


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledReads:
    """One epoch of a group, on the clock of the leader: it begins at *begin* and lasts *length*. Where the positions of
    its reads are not known, all of them count as read at its start."""

    reads: FirstReads
    begin: float
    length: float

    def times(self, blocks: "npt.NDArray[np.intp] | slice") -> LeaderTimes:
        """Return when these blocks are read: shape (n,). Only valid for blocks with a reader."""
        if self.reads.positions is None:
            return np.full(len(self.reads.reader[blocks]), self.begin, np.float32)
        found: LeaderTimes = np.float32(self.begin) + np.float32(self.length) * self.reads.positions[blocks]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class RemoteEpochReads:
    """The reads as arrays, one element per read. Each further read of a block is a further element."""

    # Block numbers: shape (reads,), int32.
    blocks: Ids
    # Place of each read in the epoch: shape (reads,), float32.
    positions: EpochPositions
    # Reading nodes: shape (reads,), uint16.
    readers: NodeNumbers

    @classmethod
    def of(cls, orders: Iterable[tuple[int, Ids]], kept: npt.NDArray[np.bool_], me: int) -> "RemoteEpochReads":
        """Return the duty of node *me*. Takes 20 ms per million reads.

        orders: of each consumer its node, and the blocks that it reads in the epoch, in order: shape (reads,), int32;
        kept: which blocks *me* keeps until they are read: shape (blocks,), bool.
        """
        blocks, when, readers = [np.zeros(0, np.int32)], [np.zeros(0, np.float32)], [np.zeros(0, np.uint16)]
        for node, order in sorted(orders, key=lambda one: one[0]):
            if node == me:
                continue
            reads = np.flatnonzero(kept[order])
            blocks.append(order[reads])
            when.append(reads.astype(np.float32) / np.float32(max(1, len(order))))
            readers.append(np.full(len(reads), node, np.uint16))
        positions = np.concatenate(when)
        sorted_by = np.argsort(positions, kind="stable")
        return cls(np.concatenate(blocks)[sorted_by], positions[sorted_by], np.concatenate(readers)[sorted_by])

    def reads_before(self, position: float) -> int:
        """Return how many of the reads come before *position*."""
        return int(np.searchsorted(self.positions, np.float32(position)))
