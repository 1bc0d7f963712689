"""Plans the reads of other nodes on this one for one snapshot, group by group."""

import itertools
from collections.abc import Awaitable, Callable, Sequence

from cachefs.planning.blocks.space import BlockSpace
from cachefs.planning.cluster.epoch_reads import RemoteEpochReads
from cachefs.planning.cluster.homes import NO_NODE
from cachefs.planning.cluster.ownership import OwnedMarks
from cachefs.planning.sequences.timeline import PlannedEpoch
from cachefs_cluster.placement.group_orders import Orders, is_epoch_known, is_last
from cachefs_cluster.placement.groups import ConsumerGroup, GroupKey
from cachefs_cluster.placement.remote_group_reads import RemoteGroupReads
from cachefs_cluster.placement.snapshot_context import SnapshotContext

# Returns the blocks that this node keeps in an epoch until a group reads them, and the orders of all members; None if
# unknown. Raises CachefsError.
LoadKeptBlocks = Callable[[ConsumerGroup, int], Awaitable[tuple[OwnedMarks, Orders] | None]]


class RemoteReads:
    """Remote reads by group. Used on the event loop; computes in threads."""

    def __init__(
        self, snapshot: str, context: SnapshotContext, current_epoch_of: Callable[[ConsumerGroup], int]
    ) -> None:
        """current_epoch_of: returns the epoch of the slowest consumer of a group."""
        self._snapshot = snapshot
        self._context = context
        self._current_epoch_of = current_epoch_of
        self._readers: dict[GroupKey, RemoteGroupReads] = {}  # by key of the group
        self._serial = itertools.count()  # for reader names: groups come and go, and change places

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def reads_of(self, group: ConsumerGroup) -> RemoteGroupReads | None:
        """Return the planned reads of a group; None if there are none yet."""
        return self._readers.get(group.key)

    @property
    def plan_names(self) -> list[str]:
        """Names in the plan."""
        return [reader.key for reader in self._readers.values()]

    @property
    def longest_reads(self) -> int:
        """Reads of the longest epoch of each group, in total."""
        return sum(reader.longest_epoch for reader in self._readers.values())

    def mark_outdated(self) -> None:
        """Mark all plans as outdated, as the holders have changed."""
        for reader in self._readers.values():
            reader.mark_outdated()

    async def plan_reads(
        self, groups: Sequence[ConsumerGroup], space: BlockSpace, ids: tuple[str, ...], load_kept_blocks: LoadKeptBlocks
    ) -> None:
        """Plan the remote reads of each group in its current epoch and the next. ids: of the nodes in the ring. Raises
        CachefsError."""
        around, silent = self._context, self._silent_loaders(groups)
        for group in groups:
            reader = self._readers.get(group.key)
            if reader is None:
                name = f"{group.job}/peers#{self._snapshot}#{next(self._serial)}"
                reader = self._readers[group.key] = RemoteGroupReads(around.plan, self._snapshot, name)
            reader.set_members(group.members)
            first = self._current_epoch_of(group)
            for epoch in (first, first + 1):
                if reader.is_current(epoch) or (reader.has_epoch(epoch) and group.loader_key in silent):
                    continue
                known = await load_kept_blocks(group, epoch)
                if known is not None:
                    last = is_last(group, epoch)
                    duty, planned = await around.threads.planning(_remote_demand, *known, ids, around.me, space, last)
                    reader.set_epoch(epoch, duty, planned)
        self._close_ended(groups)

    def _close_ended(self, groups: Sequence[ConsumerGroup]) -> None:
        """Remove the plans of groups that are gone. If a loader only changed its sampler, its old plan stays until the
        new reads are known: unplanned blocks are evicted first, and may be the only copies."""
        readers, keys = self._readers, {group.key for group in groups}
        silent = self._silent_loaders(groups)
        silent |= {
            group.loader_key for group in groups if not readers[group.key].is_current(self._current_epoch_of(group))
        }
        for key in [key for key in readers if key not in keys and key[:3] not in silent]:
            readers.pop(key).close()

    def _silent_loaders(self, groups: Sequence[ConsumerGroup]) -> set[tuple[str, str, str]]:
        """Return the loaders with members whose reads are not known yet: ranks with a new sampler register one after
        the other, and publish a moment later. What is known of such a loader holds until then."""
        return {group.loader_key for group in groups if not is_epoch_known(group, self._current_epoch_of(group))}


def _remote_demand(
    kept: OwnedMarks, orders: Orders, ids: tuple[str, ...], me: str, space: BlockSpace, last: bool
) -> tuple[RemoteEpochReads, PlannedEpoch]:
    numbers = {node: number for number, node in enumerate(ids)}
    by_number = [(numbers.get(node, NO_NODE), order) for node, order in orders if node != me]
    duty = RemoteEpochReads.of(by_number, kept, -1)
    return duty, PlannedEpoch.of(duty.blocks, space, last)
