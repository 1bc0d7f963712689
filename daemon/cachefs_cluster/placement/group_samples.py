"""Determines which blocks the groups of a snapshot may read, from their sample maps."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from cachefs.planning.blocks.space import BlockSpace, Samples
from cachefs_cluster.placement.coordinating_group import Extent, extent_of
from cachefs_cluster.placement.groups import ConsumerGroup
from cachefs_cluster.placement.snapshot_context import SnapshotContext

# Bytes per sample of a sample map.
BYTES_PER_SAMPLE: Final = 12


class GroupSamples:
    """Samples and extents of all groups of a snapshot. Used on the event loop; computes in threads."""

    def __init__(self, context: SnapshotContext) -> None:
        self.space: BlockSpace | None = None  # None until the first samples are known
        self._context = context
        self._samples: dict[str, Samples] = {}  # by digest of the map
        self._extents: dict[tuple[str, ...], Extent] = {}  # by the maps of a group: the blocks they cover
        self._bytes: dict[tuple[str, ...], int] = {}  # by the maps of a group: bytes of these blocks

    async def load(self, groups: Sequence[ConsumerGroup]) -> bool:
        """Load the samples of the groups, and drop those of others. Returns False if they are not known yet. Raises
        CachefsError."""
        threads, used = self._context.threads, {maps for group in groups for maps in group.maps}
        self._samples = {digest: samples for digest, samples in self._samples.items() if digest in used}
        wanted = {group.maps for group in groups}
        self._extents = {maps: extent for maps, extent in self._extents.items() if maps in wanted}
        for group in groups:
            for digest in group.maps:
                if digest not in self._samples:
                    samples = await self._context.load_samples(group, digest)
                    if samples is None:
                        return False
                    self.space = self.space or samples.space  # groups with other maps share it
                    self._samples[digest] = samples
            if group.maps not in self._extents:
                parts = [self._samples[digest] for digest in group.maps]
                self._extents[group.maps] = extent = await threads.planning(extent_of, parts)
                self._bytes[group.maps] = int(parts[0].space.sizes[extent].sum(dtype=np.int64))
        self._bytes = {maps: size for maps, size in self._bytes.items() if maps in wanted}
        return True

    @property
    def by_map(self) -> Mapping[str, Samples]:
        """Samples by digest of the sample map."""
        return self._samples

    @property
    def extents(self) -> Mapping[tuple[str, ...], Extent]:
        """Extents by `ConsumerGroup.maps`."""
        return self._extents

    def sample_count(self, group: ConsumerGroup) -> int:
        """Return the number of samples of the group."""
        return sum(len(self._samples[digest]) for digest in group.maps)

    def bytes_of_blocks(self, group: ConsumerGroup) -> int:
        """Return the bytes of the blocks that the group may read; 0 if unknown."""
        return self._bytes.get(group.maps, 0)

    @property
    def memory(self) -> int:
        """Bytes of memory in use."""
        maps = sum(BYTES_PER_SAMPLE * len(samples) for samples in self._samples.values())
        return maps + len(self._extents) * (self.space.count if self.space is not None else 0)
