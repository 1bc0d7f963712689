"""Coordinated MIN: decides which node holds the cluster's copy of each block, from one epoch to the next.

When a node has read a block, two nodes have it: the reader, and the holder from which it came. The copy stays with the
one that reads it sooner according to the published sequences. That is Belady's rule for all caches together: with one
copy of each block on N nodes, a read is local with probability 1 / Q(N) (see
cachefs.planning.cluster.scale.local_share) and not 1 / N. Every node computes the result from the same sequences: there
is no directory, and no message per block.

Nodes have limited room. Moves are checked in windows of 1 % of an epoch, since the blocks that a node gives away in a
window make room for the blocks that it takes: if each move needed free room, full caches would deny all moves, and all
copies would stay at home for ever. Where not all moves of a window fit, the blocks read latest stay in place.

`move_overflow` moves the blocks that exceed a node's room to nodes that have room. Homes are assigned by hashing, so
shares vary: with 500 blocks per node, one node in six has 4 % more than its share. Where caches are full of one
dataset, the node could not keep these blocks.

`second_keepers` chooses the node that keeps the second copy of a block, beside the block's holder. Holders change as
copies move to their readers. The second copy stays at the block's second home, which is in another zone than its home;
where the holder is that node or in its zone, the second copy stays at the home instead. The two copies are therefore
never in one zone, nor on one node, wherever a block is held.

`FirstReads` is the input: one epoch of a job with consumers on several nodes, with which node reads each block first,
and when. `RemoteEpochReads` lists a node's duty in an epoch: the reads by other nodes of blocks that it holds, in
order.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import Ids
from cachefs.planning.cluster.homes import NO_NODE, NodeNumbers, reindex_nodes

# Places in an epoch, from 0 (its start) to 1 (its end): shape (n,), float32.
EpochPositions = npt.NDArray[np.float32]
# Zone number of each member, and of NO_NODE at the end: shape (members + 1,), int32.
Zones = npt.NDArray[np.int32]
# Per node: bytes. Shape (nodes,), int64.
NodeBytes = npt.NDArray[np.int64]

# Windows of an epoch.
WINDOWS: Final = 100
# Part of a node's share that it may hold in addition where the nodes together cannot hold everything. Without it .446
# of all reads are local with 4 nodes and .302 with 8, and with it .451 and .308.
SLACK: Final = 0.01
# Deviations reserved, of sqrt(blocks / nodes) blocks. One node in forty exceeds its share by that when readers choose
# at random.
RESERVED_DEVIATIONS: Final = 2.0
# Future epochs that decide who reads a block sooner: a quarter of the nodes, within these limits. With 4, 8 and 64
# nodes that gives .451, .306 and .102 local reads; the whole future gives .451, .309 and .103. Each takes 2 bytes per
# block.
_MIN_EPOCHS_AHEAD: Final = 4
_MAX_EPOCHS_AHEAD: Final = 16


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

    def reads_from(self, position: float) -> "FirstReads":
        """Return the reads at or after that place of the epoch, from 0 to 1. Raises ValueError where the places are not
        known."""
        if self.positions is None:
            raise ValueError("the positions of these reads are not known")
        early = self.positions < np.float32(position)
        return FirstReads(
            np.where(early, NO_NODE, self.reader).astype(np.uint16), np.where(early, np.float32(2), self.positions)
        )

    def without_positions(self) -> "FirstReads":
        """Return the same without places, as kept for epochs far ahead: 2 bytes per block instead of 6."""
        return replace(self, positions=None)


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


def second_keepers(holders: NodeNumbers, first: NodeNumbers, second: NodeNumbers, zones: Zones) -> NodeNumbers:
    """Return the keeper of each block's second copy, NO_NODE with one replica: shape (n,), uint16. holders: of each
    block; first, second: its homes, all of shape (n,). Takes 8 ms per million blocks."""
    is_there = zones.take(holders, mode="clip") == zones.take(second, mode="clip")
    kept: NodeNumbers = np.where(is_there & (second != NO_NODE), first, second)
    return kept


def next_holders(
    holders: NodeNumbers, epochs: Sequence[FirstReads], rooms: NodeBytes, sizes: npt.NDArray[np.uint32]
) -> NodeNumbers:
    """Return the holder of each block at the start of the next epoch: shape (blocks,), uint16.

    holders: at the start of the current epoch, or NO_NODE; epochs: the current epoch, whose places must be known,
    and the known ones after it (half as many as nodes suffice, a quarter nearly); rooms: bytes that each node may
    hold (see `capacity_by_node`); sizes: bytes of each block, shape (blocks,), uint32.

    A node that holds more than its room takes nothing until it has given enough away. Raises ValueError where the
    places in the current epoch are not known.
    """
    nodes, now, found = len(rooms), epochs[0], holders.copy()
    if now.positions is None:
        raise ValueError("the positions of reads in the current epoch are not known")
    blocks, soon = _desired_moves(holders, epochs, nodes)
    moves = _CopyMoves.of(
        blocks, soon, now.reader[blocks], (now.positions[blocks] * np.float32(WINDOWS)).astype(np.int64), sizes
    )
    sources = np.minimum(holders[moves.blocks], nodes).astype(np.intp)
    free = np.append(rooms - held_bytes(holders, sizes, nodes), 0)  # the last element is for NO_NODE
    starts = np.searchsorted(moves.windows, np.arange(WINDOWS + 1)).tolist()
    for start, end in pairwise([*starts[:-1], len(sources)]):
        fitting = _fitting_moves(moves.part(start, end), sources[start:end], free)
        taken = np.flatnonzero(fitting) + start
        found[moves.blocks[taken]] = moves.targets[taken]
    return found


def epochs_ahead(nodes: int) -> int:
    """Return how many epochs beyond the current one to consider, with *nodes* nodes."""
    return min(max(math.ceil(nodes / 4), _MIN_EPOCHS_AHEAD), _MAX_EPOCHS_AHEAD)


def held_bytes(holders: NodeNumbers, sizes: npt.NDArray[np.uint32], nodes: int) -> NodeBytes:
    """Return the bytes of the blocks that each node holds: shape (nodes,), int64."""
    # Sums of whole numbers below 2 ** 53 are exact in whatever order.
    sums: NodeBytes = np.bincount(np.minimum(holders, nodes), sizes, nodes + 1)[:nodes].astype(np.int64)
    return sums


def capacity_by_node(capacities: NodeBytes, sizes: npt.NDArray[np.uint32], slack: float = SLACK) -> NodeBytes:
    """Return the bytes that each node may hold of a snapshot with blocks of these *sizes*: shape (nodes,), int64.

    capacities: bytes that each node has for the snapshot: shape (nodes,), int64. Where there is enough, some is left
    for blocks on their way. Where all nodes together cannot hold all blocks, no node can keep all that it holds: each
    then holds a share in proportion to its capacity, and its tiers evict the blocks of it that are read last.
    """
    total, blocks, pooled = int(sizes.sum(dtype=np.int64)), len(sizes), int(capacities.sum())
    if not total or not pooled:
        return capacities
    reserved = RESERVED_DEVIATIONS * math.sqrt(blocks / np.count_nonzero(capacities)) * total / blocks
    if pooled >= total:
        slack = min(slack, (pooled / total - 1) / 2)
    parts = (capacities * ((1 + slack) * total / pooled)).astype(np.int64)
    found: NodeBytes = np.maximum(parts, capacities - np.int64(reserved))
    return found


def holders_after_change(
    holders: NodeNumbers,
    before: Sequence[str],
    after: Sequence[str],
    homes: NodeNumbers,
    old_homes: NodeNumbers | None = None,
    second: NodeNumbers | None = None,
) -> NodeNumbers:
    """Return the holders after a change of members, as indices in the new list of members: shape (blocks,), uint16.

    holders: as indices in the old list; before, after: the ids of the members, both sorted; homes: those of the ring
    with the new members, as indices in the new list; old_homes: those of the old ring, as indices in the old list;
    second: the keeper of each second copy, as an index in the old list.

    The blocks of a holder that has left go to the keeper of the second copy, and else to the new home. With
    *old_homes*, blocks whose home is a new member go there, so that a node without readers takes its share too. Other
    blocks stay.
    """
    moved = reindex_nodes(holders, before, after)
    if second is not None:
        moved = np.where(moved == NO_NODE, reindex_nodes(second, before, after), moved)
    gone = moved == NO_NODE
    if old_homes is not None:
        known = set(before)
        came = np.array([name not in known for name in after] + [False])
        gone |= came.take(homes, mode="clip") & (homes != reindex_nodes(old_homes, before, after))
    return np.where(gone, homes, moved).astype(np.uint16)


@dataclass(frozen=True, slots=True, eq=False)
class _CopyMoves:
    """Desired moves of copies, as arrays with one element per move: ordered by window, then by target node, then by the
    time of the next read, soonest first."""

    # Block numbers: intp.
    blocks: npt.NDArray[np.intp]
    # The node that has read the block and will read it sooner than the holder: intp.
    targets: npt.NDArray[np.intp]
    # Window of the read: int64.
    windows: npt.NDArray[np.int64]
    # Bytes: int64.
    sizes: NodeBytes
    # Bytes of this move and of all earlier moves to the same node in the same window: int64.
    needed: NodeBytes

    @classmethod
    def of(
        cls,
        blocks: npt.NDArray[np.intp],
        soon: EpochPositions,
        targets: NodeNumbers,
        windows: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.uint32],
    ) -> "_CopyMoves":
        """soon: when each of the blocks is read next, in epochs; sizes: of all blocks; the rest as the fields, in any
        order. The order of moves with equal times is kept."""
        group = windows << 16 | targets
        # The bit patterns of positive floats sort like the floats.
        order = np.argsort(group << 32 | soon.view(np.uint32), kind="stable")
        blocks, group = blocks[order], group[order]
        size = sizes[blocks].astype(np.int64)
        ends = np.cumsum(size)
        first = np.flatnonzero(np.diff(group, prepend=-1))
        before = np.repeat((ends - size)[first], np.diff(first, append=len(group)))
        return cls(blocks, (group & NO_NODE).astype(np.intp), group >> 16, size, ends - before)

    def part(self, start: int, end: int) -> "_CopyMoves":
        part = slice(start, end)
        return _CopyMoves(
            self.blocks[part], self.targets[part], self.windows[part], self.sizes[part], self.needed[part]
        )


def _desired_moves(
    holders: NodeNumbers, epochs: Sequence[FirstReads], nodes: int
) -> tuple[npt.NDArray[np.intp], EpochPositions]:
    """Return the blocks whose reader in this epoch reads them again sooner than their holder, and when: in epochs after
    the start of the next one."""
    reader = epochs[0].reader
    blocks = np.flatnonzero((reader != holders) & (reader < nodes))
    ours, theirs = holders[blocks], reader[blocks]
    found, soon = [np.zeros(0, np.intp)], [np.zeros(0, np.float32)]
    for ahead, epoch in enumerate(epochs[1:]):
        following = epoch.reader[blocks]
        wins = following == theirs
        found.append(blocks[wins])
        positions = np.zeros(len(found[-1]), np.float32) if epoch.positions is None else epoch.positions[found[-1]]
        soon.append(positions + np.float32(ahead))
        open_ones = ~wins & (following != ours)
        blocks, ours, theirs = blocks[open_ones], ours[open_ones], theirs[open_ones]
    return np.concatenate(found), np.concatenate(soon)


def _fitting_moves(moves: _CopyMoves, sources: npt.NDArray[np.intp], free: NodeBytes) -> npt.NDArray[np.bool_]:
    """Return which moves of one window are made: shape (moves,), bool. Updates *free*, the free bytes of each node.
    sources: the current holders of the blocks.

    A node takes moves in order as long as they fit into its free room and the room of the blocks it gives away. Each
    denied move leaves its source less room, so the check is repeated until all remaining moves fit. The order of nodes
    does not matter, since a denial can only lead to further denials.
    """
    taken = np.ones(len(sources), np.bool_)
    while True:
        # Sums of whole numbers below 2 ** 53 are exact in whatever order.
        freed = np.bincount(sources[taken], moves.sizes[taken], len(free)).astype(np.int64)
        fits = moves.needed <= (free + freed)[moves.targets]
        if (fits == taken).all():
            free += freed - np.bincount(moves.targets[taken], moves.sizes[taken], len(free)).astype(np.int64)
            return taken
        taken = fits


def move_overflow(
    holders: NodeNumbers, rooms: NodeBytes, sizes: "np.ndarray[tuple[int], np.dtype[np.uint32]]"
) -> NodeNumbers:
    """Return *holders*, with the blocks that do not fit on a node moved to nodes with room: shape (blocks,), uint16.

    rooms: bytes that each node may hold: shape (nodes,), int64; sizes: bytes of each block: shape (blocks,), uint32.
    Blocks that fit nowhere stay. All nodes compute the same, minimal moves, in 5 ms per million blocks.
    """
    free = rooms - held_bytes(holders, sizes, len(rooms))
    surplus: list[Ids] = [
        _overflow_blocks(holders, node, -int(free[node]), sizes) for node in np.flatnonzero(free < 0).tolist()
    ]
    if not surplus:
        return holders
    blocks = np.concatenate(surplus)
    takers = np.flatnonzero(free > 0)
    ends = np.cumsum(sizes[blocks], dtype=np.int64)
    chosen = np.searchsorted(np.cumsum(free[takers]), ends)
    fits = chosen < len(takers)
    found = holders.copy()
    found[blocks[fits]] = takers[chosen[fits]]
    return found


def _overflow_blocks(
    holders: NodeNumbers, node: int, size: int, sizes: "np.ndarray[tuple[int], np.dtype[np.uint32]]"
) -> Ids:
    """Return the last blocks of a node that have at least *size* bytes together."""
    blocks = np.flatnonzero(holders == node)[::-1]
    count = int(np.searchsorted(np.cumsum(sizes[blocks], dtype=np.int64), size)) + 1
    return blocks[:count].astype(np.int32)
