"""Loads the reads of whole epochs of groups, as the decisions about holders compare them, and keeps those in use."""

from collections.abc import Mapping, Sequence
from typing import Final

from cachefs.planning.cluster.epoch_reads import FirstReads
from cachefs.planning.cluster.schedule import EpochSchedule, ScheduledEpoch
from cachefs_cluster.placement.group_orders import Orders, is_epoch_known, is_shared_out
from cachefs_cluster.placement.group_samples import GroupSamples
from cachefs_cluster.placement.groups import ConsumerGroup
from cachefs_cluster.placement.snapshot_context import SnapshotContext

# Bytes per block of the reads of an epoch, and of an epoch far ahead, of which only the readers are kept.
BYTES_PER_BLOCK: Final = 6
_BYTES_FAR_AHEAD: Final = 2


class GroupReads:
    """Reads of the groups of one snapshot. Used on the event loop; computes in threads."""

    def __init__(self, context: SnapshotContext, samples: GroupSamples) -> None:
        self._context = context
        self._samples = samples
        self._ids: tuple[str, ...] = ()  # of the nodes in the ring
        self._known: dict[tuple[str, str, int], FirstReads] = {}  # by digests of group and readers, and epoch
        self._used: set[tuple[str, str, int]] = set()  # by the decision before

    @property
    def memory(self) -> int:
        """Bytes of memory in use."""
        return sum(
            len(one.reader) * (BYTES_PER_BLOCK if one.positions is not None else _BYTES_FAR_AHEAD)
            for one in self._known.values()
        )

    async def load_reads(
        self, groups: Mapping[str, ConsumerGroup], schedule: EpochSchedule, epochs: Sequence[ScheduledEpoch],
        ids: tuple[str, ...],
    ) -> Sequence[FirstReads] | None:  # fmt: skip
        """Return the reads of some scheduled epochs, by numbers in *ids*; None if this node does not know a group, its
        consumers as they were announced, or an order yet. groups: by digest. Raises CachefsError.

        All nodes compute by the same facts: where a single group is scheduled, the positions in its epochs far ahead
        are left out.
        """
        found: list[FirstReads] = []
        used: set[tuple[str, str, int]] = set()
        is_alone = len(schedule.groups) == 1
        for one in epochs:
            group, timing = groups.get(one.group), schedule.timing_of(one.group)
            if group is None or timing is None or group.readers_digest != timing.readers:
                return None
            has_positions = not is_alone or one.begin < 1
            reads = await self.load_epoch(group, one.epoch, ids, has_positions=has_positions)
            if reads is None:
                return None
            used.add((one.group, timing.readers, one.epoch))
            found.append(reads if has_positions else reads.without_positions())
        wanted = used | self._used
        self._known = {key: reads for key, reads in self._known.items() if key in wanted}
        self._used = used
        return found

    async def load_epoch(
        self, group: ConsumerGroup, epoch: int, ids: tuple[str, ...], *, has_positions: bool = True
    ) -> FirstReads | None:
        """Return the reads of one epoch of a group, with positions if asked; None if unknown. Raises CachefsError."""
        if ids != self._ids:
            self._ids, self._known = ids, {}
        key = group.digest, group.readers_digest, epoch
        reads = self._known.get(key)
        if reads is not None and (reads.positions is not None or not has_positions):
            return reads
        orders = await self.load_orders(group, epoch)
        if orders is None:
            return None
        planning = self._context.threads.planning
        is_shared = group.spec is not None or await planning(is_shared_out, orders)
        count = self._samples.by_map[group.maps[0]].space.count
        reads = await planning(_first_reads, count, orders if is_shared else [], ids)
        if ids == self._ids:
            self._known[key] = reads if has_positions else reads.without_positions()
        return reads

    async def load_orders(self, group: ConsumerGroup, epoch: int) -> Orders | None:
        """Return the orders of all consumers of a group; None if these or its samples are unknown. Raises
        CachefsError."""
        if not is_epoch_known(group, epoch) or not all(digest in self._samples.by_map for digest in group.maps):
            return None
        return await self._context.orders.orders_of(group, self._samples.by_map, epoch)


def _first_reads(count: int, orders: Orders, ids: tuple[str, ...]) -> FirstReads:
    numbers: Mapping[str, int] = {node: number for number, node in enumerate(ids)}
    return FirstReads.of(count, [(numbers[node], order) for node, order in orders if node in numbers])
