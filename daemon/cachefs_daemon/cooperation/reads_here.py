"""What other nodes read here of one snapshot, group by group, as this node's plan has it."""

import itertools
from collections.abc import Awaitable, Callable, Sequence

from cachefs.planning.blocks.space import BlockSpace
from cachefs.planning.cluster.duties import Duty
from cachefs.planning.cluster.homes import NOBODY
from cachefs.planning.cluster.standing import Mine
from cachefs.planning.sequences.epoch import Epoch
from cachefs_daemon.cooperation.groups import Group, Key
from cachefs_daemon.cooperation.orders import Orders, is_last, knows
from cachefs_daemon.cooperation.peer_reads import PeerReads
from cachefs_daemon.cooperation.surroundings import Surroundings

# Gives of a group in an epoch which blocks this node keeps until they are read, and what all members read; None where
# that is not known yet. Raises CachefsError.
Kept = Callable[[Group, int], Awaitable[tuple[Mine, Orders] | None]]


class ReadsHere:
    """Used on the event loop; computes in threads."""

    def __init__(self, snapshot: str, around: Surroundings, current: Callable[[Group], int]) -> None:
        """current: the epoch that the slowest consumer of a group is in."""
        self._snapshot = snapshot
        self._around = around
        self._current = current
        self._readers: dict[Key, PeerReads] = {}  # by key of the group
        self._serial = itertools.count()  # of readers: groups come and go, and change places

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def of(self, group: Group) -> PeerReads | None:
        """None where nothing is planned of it yet."""
        return self._readers.get(group.key)

    @property
    def names(self) -> list[str]:
        """In the plan."""
        return [reader.key for reader in self._readers.values()]

    @property
    def count(self) -> int:
        """Reads of the longest epoch of each group, together."""
        return sum(reader.longest for reader in self._readers.values())

    def outdate(self) -> None:
        """All is to be planned anew, as others hold the blocks."""
        for reader in self._readers.values():
            reader.outdate()

    async def plan(self, groups: Sequence[Group], space: BlockSpace, ids: tuple[str, ...], kept: Kept) -> None:
        """Of each group the current epoch and the next, as far as others read here then. ids: of the nodes in the ring.
        Raises CachefsError."""
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
        """Where another sampler has taken the place of a group that is gone, that counts until it is known what the new
        one reads here: what no plan has read again goes before all else, and nobody else may have it."""
        readers, keys = self._readers, {group.key for group in groups}
        silent = self._silent(groups)
        silent |= {group.loads for group in groups if not readers[group.key].knows(self._current(group))}
        for key in [key for key in readers if key not in keys and key[:3] not in silent]:
            readers.pop(key).close()

    def _silent(self, groups: Sequence[Group]) -> set[tuple[str, str, str]]:
        """Of which it is not known yet what some of their members read: ranks with another sampler say so one after the
        other, and publish a moment later. What is known of such a loader holds until then."""
        return {group.loads for group in groups if not knows(group, self._current(group))}


def _duty(
    kept: Mine, orders: Orders, ids: tuple[str, ...], me: str, space: BlockSpace, last: bool
) -> tuple[Duty, Epoch]:
    numbers = {node: number for number, node in enumerate(ids)}
    by_number = [(numbers.get(node, NOBODY), order) for node, order in orders if node != me]
    duty = Duty.of(by_number, kept, -1)
    return duty, Epoch.of(duty.blocks, space, last)
