"""Plans the reads of other nodes on this one for one snapshot, group by group."""

import itertools
from collections.abc import Awaitable, Callable, Sequence

from cachefs.planning.blocks.space import BlockSpace
from cachefs.planning.cluster.duties import Duty
from cachefs.planning.cluster.homes import NO_NODE
from cachefs.planning.cluster.standing import Mine
from cachefs.planning.sequences.epoch import Epoch
from cachefs_daemon.cooperation.groups import Group, Key
from cachefs_daemon.cooperation.orders import Orders, is_last, knows
from cachefs_daemon.cooperation.peer_reads import PeerReads
from cachefs_daemon.cooperation.surroundings import Surroundings

# Returns the blocks that this node keeps in an epoch until a group reads them, and the orders of all members; None if
# unknown. Raises CachefsError.
Kept = Callable[[Group, int], Awaitable[tuple[Mine, Orders] | None]]


class ReadsHere:
    """Remote reads by group. Used on the event loop; computes in threads."""

    def __init__(self, snapshot: str, around: Surroundings, current: Callable[[Group], int]) -> None:
        """current: returns the epoch of the slowest consumer of a group."""
        self._snapshot = snapshot
        self._around = around
        self._current = current
        self._readers: dict[Key, PeerReads] = {}  # by key of the group
        self._serial = itertools.count()  # for reader names: groups come and go, and change places

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def of(self, group: Group) -> PeerReads | None:
        """Return the planned reads of a group; None if there are none yet."""
        return self._readers.get(group.key)

    @property
    def names(self) -> list[str]:
        """Names in the plan."""
        return [reader.key for reader in self._readers.values()]

    @property
    def count(self) -> int:
        """Reads of the longest epoch of each group, in total."""
        return sum(reader.longest for reader in self._readers.values())

    def outdate(self) -> None:
        """Mark all plans as outdated, as the holders have changed."""
        for reader in self._readers.values():
            reader.outdate()

    async def plan(self, groups: Sequence[Group], space: BlockSpace, ids: tuple[str, ...], kept: Kept) -> None:
        """Plan the remote reads of each group in its current epoch and the next. ids: of the nodes in the ring. Raises
        CachefsError."""
        around, silent = self._around, self._silent(groups)
        for group in groups:
            reader = self._readers.get(group.key)
            if reader is None:
                name = f"{group.job}/peers#{self._snapshot}#{next(self._serial)}"
                reader = self._readers[group.key] = PeerReads(around.plan, self._snapshot, name)
            reader.of(group.members)
            first = self._current(group)
            for epoch in (first, first + 1):
                if reader.knows(epoch) or (reader.has(epoch) and group.loads in silent):
                    continue
                known = await kept(group, epoch)
                if known is not None:
                    last = is_last(group, epoch)
                    duty, planned = await around.threads.planning(_duty, *known, ids, around.me, space, last)
                    reader.set(epoch, duty, planned)
        self._close_gone(groups)

    def _close_gone(self, groups: Sequence[Group]) -> None:
        """Remove the plans of groups that are gone. If a loader only changed its sampler, its old plan stays until the
        new reads are known: unplanned blocks are evicted first, and may be the only copies."""
        readers, keys = self._readers, {group.key for group in groups}
        silent = self._silent(groups)
        silent |= {group.loads for group in groups if not readers[group.key].knows(self._current(group))}
        for key in [key for key in readers if key not in keys and key[:3] not in silent]:
            readers.pop(key).close()

    def _silent(self, groups: Sequence[Group]) -> set[tuple[str, str, str]]:
        """Return the loaders with members whose reads are not known yet: ranks with a new sampler register one after
        the other, and publish a moment later. What is known of such a loader holds until then."""
        return {group.loads for group in groups if not knows(group, self._current(group))}


def _duty(
    kept: Mine, orders: Orders, ids: tuple[str, ...], me: str, space: BlockSpace, last: bool
) -> tuple[Duty, Epoch]:
    numbers = {node: number for number, node in enumerate(ids)}
    by_number = [(numbers.get(node, NO_NODE), order) for node, order in orders if node != me]
    duty = Duty.of(by_number, kept, -1)
    return duty, Epoch.of(duty.blocks, space, last)
