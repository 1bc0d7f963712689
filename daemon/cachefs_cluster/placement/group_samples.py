"""Determines which blocks the groups of a snapshot may read, from their sample maps."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from cachefs.errors import CachefsError
from cachefs.planning.blocks.space import BlockSpace, Samples
from cachefs_cluster.placement.groups import ConsumerGroup
from cachefs_cluster.placement.snapshot_context import SnapshotContext

# Bytes per sample of a sample map.
BYTES_PER_SAMPLE: Final = 12


class GroupSamples:
    """Samples of all groups of a snapshot. Used on the event loop; computes in threads."""

    def __init__(self, context: SnapshotContext) -> None:
        self.space: BlockSpace | None = None  # None until the first samples are known
        self.problem = ""  # why the samples of a group are not known
        self._context = context
        self._samples: dict[str, Samples] = {}  # by digest of the map
        # By the maps of a group: number and bytes of the blocks that they cover.
        self._sizes: dict[tuple[str, ...], tuple[int, int]] = {}

    async def load(self, groups: Sequence[ConsumerGroup]) -> list[ConsumerGroup]:
        """Load the samples of the groups, and drop those of others. Returns the groups whose samples are known."""
        used = {maps for group in groups for maps in group.maps}
        self._samples = {digest: samples for digest, samples in self._samples.items() if digest in used}
        wanted = {group.maps for group in groups}
        self._sizes = {maps: sizes for maps, sizes in self._sizes.items() if maps in wanted}
        self.problem = ""
        return [group for group in groups if await self._load_group(group)]

    async def _load_group(self, group: ConsumerGroup) -> bool:
        for digest in group.maps:
            if digest in self._samples:
                continue
            try:
                samples = await self._context.load_samples(group, digest)
            except CachefsError as error:
                self.problem = f"the reads of other nodes are not known yet: {error}"
                return False
            if samples is None:
                return False
            if self.space is None or not self._samples:  # groups with other maps share it
                self.space = samples.space
            self._samples[digest] = samples
        if group.maps not in self._sizes:
            parts = [self._samples[digest] for digest in group.maps]
            self._sizes[group.maps] = await self._context.threads.planning(_covered, parts)
        return True

    @property
    def by_map(self) -> Mapping[str, Samples]:
        """Samples by digest of the sample map."""
        return self._samples

    def sample_count(self, group: ConsumerGroup) -> int:
        """Return the number of samples of the group."""
        return sum(len(self._samples[digest]) for digest in group.maps)

    def block_count(self, group: ConsumerGroup) -> int:
        """Return the number of blocks that the group may read; 0 if unknown."""
        return self._sizes.get(group.maps, (0, 0))[0]

    def bytes_of_blocks(self, group: ConsumerGroup) -> int:
        """Return the bytes of the blocks that the group may read; 0 if unknown."""
        return self._sizes.get(group.maps, (0, 0))[1]

    @property
    def memory(self) -> int:
        """Bytes of memory in use."""
        return sum(BYTES_PER_SAMPLE * len(samples) for samples in self._samples.values())


def _covered(parts: Sequence[Samples]) -> tuple[int, int]:
    """Return number and bytes of the blocks of the samples of several maps."""
    covered = np.zeros(parts[0].space.count, np.bool_)
    for samples in parts:
        covered[samples.ids] = True
    return int(np.count_nonzero(covered)), int(parts[0].space.sizes[covered].sum(dtype=np.int64))
