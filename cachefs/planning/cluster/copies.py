"""Places the copies of blocks: how much each node may hold, what happens as members come and go, and which node
keeps the second copy of a block.

Which node holds the cluster's copy of each block follows from the published sequences (see
cachefs.planning.cluster.moves).

`move_overflow` moves the blocks that exceed a node's room to nodes that have room. Homes are assigned by hashing, so
shares vary: with 500 blocks per node, one node in six has 4 % more than its share. Where caches are full of one
dataset, the node could not keep these blocks.

`second_keepers` chooses the node that keeps the second copy of a block, beside the block's holder. Holders change as
copies move to their readers. The second copy stays at the block's second home, which is in another zone than its home;
where the holder is that node or in its zone, the second copy stays at the home instead. The two copies are therefore
never in one zone, nor on one node, wherever a block is held.

Only hot snapshots have second copies. If a node is lost, its part of the blocks has to be read from the origin again,
and a second copy saves the reads that come before the node is back or replaced. `is_hot` decides by how often each
block is read, as all nodes are told by the node that announces schedules. Second copies get the room that is left: a
node fetches them from other nodes (`missing_second_copies`) once it has all blocks that it holds, and evicts them
before these.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import Ids
from cachefs.planning.cluster.homes import NO_NODE, NodeNumbers, reindex_nodes

# Zone number of each member, and of NO_NODE at the end: shape (members + 1,), int32.
Zones = npt.NDArray[np.int32]
# Per node: bytes. Shape (nodes,), int64.
NodeBytes = npt.NDArray[np.int64]

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
# Seconds until a lost node is back, or another one has taken its place.
AWAY_SECONDS: Final = 3600.0
# Part of the lost blocks that must be read within that time for second copies to pay, and below which they do no more.
HOT_PART: Final = 0.5
COLD_PART: Final = 0.25


def is_hot(block_reads: float | None, was_hot: bool) -> bool:
    """Return whether a snapshot is to have second copies. block_reads: reads of each block per second, by all jobs
    together; None: unknown, and nothing changes.

    In shuffled epochs all blocks are read equally often, so of the blocks of a lost node the part `block_reads x
    AWAY_SECONDS` is read while the node is away, 1 at most: as much of its share the origin would have to give again.
    """
    if block_reads is None:
        return was_hot
    return block_reads * AWAY_SECONDS >= (COLD_PART if was_hot else HOT_PART)


def missing_second_copies(
    second: npt.NDArray[np.bool_],
    present: npt.NDArray[np.bool_],
    sizes: "np.ndarray[tuple[int], np.dtype[np.uint32]]",
    room: int,
) -> Ids:
    """Return the second copies that a node lacks and has room for: shape (n,), int32. second, present: which blocks it
    keeps the second copy of, and has; of shape (blocks,); sizes: bytes of each block; room: bytes that they may take in
    all (see `second_copy_room`)."""
    ids = np.flatnonzero(second & ~present).astype(np.int32)
    fits: Ids = ids[: int(np.searchsorted(np.cumsum(sizes[ids], dtype=np.int64), room, "right"))]
    return fits


def second_copy_room(
    owned: npt.NDArray[np.bool_],
    second: npt.NDArray[np.bool_] | None,
    present: npt.NDArray[np.bool_],
    soon: npt.NDArray[np.bool_],
    sizes: npt.NDArray[np.uint32],
) -> int:
    """Return the bytes that one snapshot leaves for second copies, beside what is free; below 0 where it needs more
    than it has. owned, second, present: which blocks a node keeps, keeps the second copy of, and has; soon: which are
    about to be read there; all of shape (blocks,).

    Copies that were read leave their room. Blocks that the node keeps and lacks need room, and so do the next copies
    that it fetches to read them, as many as there are now: otherwise they would displace second copies, which would be
    fetched again.
    """
    copies = present & ~owned
    if second is not None:
        copies &= ~second
    spare, needed = copies & ~soon, copies & soon
    needed |= owned & ~present
    return int(sizes[spare].sum(dtype=np.int64)) - int(sizes[needed].sum(dtype=np.int64))


def second_keepers(holders: NodeNumbers, first: NodeNumbers, second: NodeNumbers, zones: Zones) -> NodeNumbers:
    """Return the keeper of each block's second copy, NO_NODE with one replica: shape (n,), uint16. holders: of each
    block; first, second: its homes, all of shape (n,). Takes 8 ms per million blocks."""
    is_there = zones.take(holders, mode="clip") == zones.take(second, mode="clip")
    kept: NodeNumbers = np.where(is_there & (second != NO_NODE), first, second)
    return kept


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


def move_overflow(
    holders: NodeNumbers, rooms: NodeBytes, sizes: "np.ndarray[tuple[int], np.dtype[np.uint32]]"
) -> NodeNumbers:
    """Return *holders*, with the blocks that do not fit on a node moved to nodes with room: shape (blocks,), uint16.

    rooms: bytes that each node may hold: shape (nodes,), int64; sizes: bytes of each block: shape (blocks,), uint32.
    Blocks that fit nowhere stay. All nodes compute the same, minimal moves, in 5 ms per million blocks. A node that
    gets holders that fit from another one, and fits them again, changes nothing.
    """
    found = holders
    while True:
        free = rooms - held_bytes(found, sizes, len(rooms))
        surplus = [_overflow_blocks(found, node, -int(free[node]), sizes) for node in np.flatnonzero(free < 0).tolist()]
        if not surplus:
            return found
        blocks, moved = np.concatenate(surplus), 0
        ends = np.cumsum(sizes[blocks], dtype=np.int64)
        found = found.copy()
        for taker in np.flatnonzero(free > 0).tolist():
            begin = int(ends[moved - 1]) if moved else 0
            last = int(np.searchsorted(ends, begin + free[taker], side="right"))
            found[blocks[moved:last]], moved = taker, last
        if not moved:
            return found


def _overflow_blocks(
    holders: NodeNumbers, node: int, size: int, sizes: "np.ndarray[tuple[int], np.dtype[np.uint32]]"
) -> Ids:
    """Return the last blocks of a node that have at least *size* bytes together."""
    blocks = np.flatnonzero(holders == node)[::-1]
    count = int(np.searchsorted(np.cumsum(sizes[blocks], dtype=np.int64), size)) + 1
    return blocks[:count].astype(np.int32)
