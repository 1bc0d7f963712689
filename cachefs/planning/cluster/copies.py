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
