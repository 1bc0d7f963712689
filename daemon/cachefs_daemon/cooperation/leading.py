"""Which consumers decide where the copies of a snapshot go."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.samples import Samples
from cachefs_daemon.cooperation.groups import Group, Key

# Which blocks of a snapshot a group may read: shape (blocks,), bool.
Extent = npt.NDArray[np.bool_]


def leading(groups: Sequence[Group], extents: Mapping[tuple[str, ...], Extent], go_on: Collection[Key]) -> Group | None:
    """The group that decides, as all nodes see it that know the same: the one that may read the most blocks, if nobody
    else reads any of them, as the loader of a validation does not. None: copies stay at home.

    extents: by `Group.maps`. go_on: of groups that have decided before, whole or not. 1 ms per million blocks and
    group."""
    able = [group for group in groups if group.is_whole or group.key in go_on]
    if not able:
        return None
    sizes = {maps: int(np.count_nonzero(extent)) for maps, extent in extents.items()}
    found = max(able, key=lambda group: (sizes[group.maps], group.key in go_on))
    mine = extents[found.maps]
    others = [group for group in groups if group.key != found.key]
    return None if any((mine & extents[other.maps]).any() for other in others) else found


def extent_of(parts: Sequence[Samples]) -> Extent:
    """Which blocks the samples of several maps have. To be called in a thread."""
    extent = np.zeros(parts[0].space.count, np.bool_)
    for samples in parts:
        extent[samples.ids] = True
    return extent
