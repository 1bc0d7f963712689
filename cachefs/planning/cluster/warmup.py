"""Plans the part of a warm-up that a node fetches, and forecasts how much of a warm-up a cluster can hold."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import Ids
from cachefs.planning.cluster.homes import NO_NODE, BlockHomes
from cachefs.planning.cluster.rendezvous import Hashes, RingMember
from cachefs.planning.sequences.timeline import Seconds

Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PartPlan:
    """The blocks of a warm-up that one node keeps."""

    # Blocks to fetch, in this order: shape (n,), int32.
    ids: Ids
    # All blocks of the part, and their bytes.
    blocks: int
    bytes: int
    # Those that are on the node already.
    blocks_here: int
    bytes_here: int
    # Missing blocks for which there is no room: the last ones in the order.
    without_room: int


def plan_part(
    ids: Ids, sizes: Bytes, spans: Bytes, is_here: npt.NDArray[np.bool_], next_use: Seconds, room: int
) -> PartPlan:
    """Plan the blocks *ids* of a part: shape (n,), as are all arrays.

    sizes: bytes of each block; spans: bytes that it takes in a tier; is_here: whether it is on the node; next_use:
    seconds until its next read, infinite for none; blocks that are read sooner come first, and otherwise the order of
    *ids* stays. room: bytes that the part may take in the tiers, with the blocks that are here. What fits is the
    beginning of the order, so a warm-up evicts nothing that it has fetched itself.
    """
    missing = np.flatnonzero(~is_here)
    missing = missing[np.argsort(next_use[missing], kind="stable")]
    left = room - int(spans[is_here].sum())
    count = int(np.searchsorted(np.cumsum(spans[missing]), left, "right"))
    return PartPlan(
        ids[missing[:count]],
        len(ids),
        int(sizes.sum()),
        int(is_here.sum()),
        int(sizes[is_here].sum()),
        len(missing) - count,
    )


@dataclass(frozen=True, slots=True)
class MemberPart:
    """The part of a warm-up that one member keeps: its bytes, and how many of them its tiers can hold."""

    bytes: int
    holds: int


def member_parts(
    hashes: Hashes, sizes: Bytes, spans: Bytes, members: Sequence[RingMember], capacities: Sequence[int]
) -> list[MemberPart]:
    """Return the part of each member, in the order of their ids.

    hashes, sizes, spans: of each block, shape (blocks,); spans are bytes in a tier. capacities: bytes of the tiers of
    each member; 0 where unknown, which counts as enough.
    """
    homes = BlockHomes(hashes)
    homes.set_members(members)
    is_placed = homes.first != NO_NODE
    totals = np.array([np.bincount(homes.first[is_placed], each[is_placed], len(members)) for each in (sizes, spans)])
    return [
        MemberPart(round(size), round(size * min(1.0, capacity / taken)) if capacity and taken else round(size))
        for size, taken, capacity in zip(*totals.tolist(), capacities, strict=True)
    ]
