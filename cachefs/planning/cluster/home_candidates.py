"""Finds the blocks that have their home on a node, and the other nodes that may have blocks this node lacks.

Works in parts of a million blocks, so that intermediate results take some 40 MB however many blocks there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.cluster.homes import NO_NODE, BlockHomes, NodeNumbers
from cachefs.planning.cluster.rendezvous import Hashes, RingMember

_BLOCKS_PER_PART: Final = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class NodeCandidates:
    """One candidate node for each of some blocks."""

    # Ids of the nodes that the numbers stand for.
    ids: tuple[str, ...]
    # Indices in *ids*, NO_NODE where there is none: shape (n,), uint16.
    nodes: NodeNumbers

    def select(self, indices: npt.NDArray[np.integer]) -> "NodeCandidates":
        """Return the candidates of some of the blocks. indices: shape (m,)."""
        return NodeCandidates(self.ids, self.nodes[indices])

    def are_among(self, ids: "set[str] | frozenset[str]") -> npt.NDArray[np.bool_]:
        """Return for each block whether its candidate is one of these nodes: shape (n,), bool."""
        marks = np.array([one in ids for one in self.ids] + [False])
        found: npt.NDArray[np.bool_] = marks.take(self.nodes, mode="clip")
        return found


def blocks_at_home(hashes: Hashes, members: Sequence[RingMember], me: str, replicas: int) -> npt.NDArray[np.bool_]:
    """Return which blocks have their home, or that of their second copy, on member *me*: shape (blocks,), bool.

    hashes: of all blocks, see cachefs.planning.cluster.rendezvous; replicas: 1 or 2. All False where *me* is no member.
    """
    found = np.zeros(len(hashes), np.bool_)
    for start in range(0, len(hashes) if any(one.id == me for one in members) else 0, _BLOCKS_PER_PART):
        homes = BlockHomes(hashes[start : start + _BLOCKS_PER_PART], replicas)
        homes.set_members(members)
        number = [one.id for one in homes.members].index(me)
        found[start : start + _BLOCKS_PER_PART] = (homes.first == number) | (homes.second == number)
    return found


def candidate_nodes(hashes: Hashes, rings: Sequence[Sequence[RingMember]], replicas: int) -> list[NodeCandidates]:
    """Return for each ring the home of each block, and with two *replicas* also that of its second copy, in the order
    of the rings. Rings without members are left out. hashes: shape (blocks,), uint64."""
    rings = [sorted(ring, key=lambda one: one.id) for ring in rings if ring]
    copies = min(replicas, 2)
    found = [np.full((copies, len(hashes)), NO_NODE, np.uint16) for _ in rings]
    for start in range(0, len(hashes), _BLOCKS_PER_PART):
        homes = BlockHomes(hashes[start : start + _BLOCKS_PER_PART], replicas)
        for ring, nodes in zip(rings, found, strict=True):
            homes.set_members(ring)
            for row, chosen in zip(nodes, (homes.first, homes.second), strict=False):
                row[start : start + _BLOCKS_PER_PART] = chosen
    return [
        NodeCandidates(tuple(one.id for one in ring), row)
        for ring, nodes in zip(rings, found, strict=True)
        for row in nodes
    ]
