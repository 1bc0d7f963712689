"""Chooses the group of consumers that decides where copies of a snapshot go."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import Samples
from cachefs_cluster.placement.groups import ConsumerGroup, GroupKey

# Blocks of a snapshot that a group may read: shape (blocks,), bool.
Extent = npt.NDArray[np.bool_]


def choose_coordinator(
    groups: Sequence[ConsumerGroup],
    extents: Mapping[tuple[str, ...], Extent],
    last_coordinator: GroupKey | None,
    elsewhere: Collection[GroupKey],
) -> ConsumerGroup | None:
    """Return the group that decides: the one that may read the most blocks, if no other group reads any of them, as a
    validation loader does not. None: copies stay at home. All nodes with the same facts agree.

    extents: by `ConsumerGroup.maps`. last_coordinator: the group that decided last. elsewhere: groups that decide on
    other nodes. These may go on when they are not whole any more. Takes 1 ms per million blocks and group.
    """
    able = [group for group in groups if group.is_whole or group.key == last_coordinator or group.key in elsewhere]
    if not able:
        return None
    sizes = {maps: int(np.count_nonzero(extent)) for maps, extent in extents.items()}

    def rank(group: ConsumerGroup) -> tuple[int, bool, bool, bool]:
        return sizes[group.maps], group.is_whole, group.key == last_coordinator, group.key in elsewhere

    found = max(able, key=rank)
    mine = extents[found.maps]
    # When a loader's sampler changes, its ranks publish the new sampler at different moments.
    others = [group for group in groups if group.name != found.name]
    return None if any((mine & extents[other.maps]).any() for other in others) else found


def extent_of(parts: Sequence[Samples]) -> Extent:
    """Return the blocks of the samples of several maps. Call in a thread."""
    extent = np.zeros(parts[0].space.count, np.bool_)
    for samples in parts:
        extent[samples.ids] = True
    return extent
