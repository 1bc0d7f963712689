"""Computes the holders of each block of one snapshot: homes, and from them the holders of one epoch after the other.

Every node computes them for itself from the same facts (see `cachefs.planning.cluster.copies`). The holders of the
current epoch are stored on disk and sent to other nodes, since they depend on all epochs before.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import BlockSpace, Ids
from cachefs.planning.cluster.copies import (
    FirstReads,
    NodeBytes,
    capacity_by_node,
    epochs_ahead,
    holders_after_change,
    move_overflow,
    next_holders,
    second_keepers,
)
from cachefs.planning.cluster.homes import NO_NODE, BlockHomes, NodeNumbers, reindex_nodes
from cachefs.planning.cluster.rendezvous import RingMember, space_hashes
from cachefs_cluster.placement.timeliness import ANNOUNCED_UNTIL, NOTHING_SETTLED, Settled, extend_settled
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.segment_writer import span

# Fraction of a node's tiers that counts as room for blocks: the rest is freed ahead, or serves reads of blocks held
# elsewhere.
USABLE_FRACTION: Final = 0.97
# Epochs, from the current one on, whose reads keep their places: 6 bytes per block each instead of 2.
EPOCHS_WITH_POSITIONS: Final = 2

# Seconds for which a block may still be at its former holder after the ring changed. By then it has been read, or moved
# by the rebalance.
FORMER_HOLDER_SECONDS: Final = 600.0

# Returns the reads of an epoch, by ids of nodes in the ring; None if unknown.
LoadReads = Callable[[int, tuple[str, ...]], Awaitable[FirstReads | None]]
# Returns whether copies change hands in an epoch; None: not settled yet.
EpochVerdict = Callable[[int], bool | None]


@dataclass(frozen=True, slots=True)
class PlacementRing:
    """The members that count for placement, ordered by id."""

    # The ring epoch.
    epoch: int
    members: tuple[RingMember, ...]
    # Bytes of the tiers of each member; 0: not known yet.
    capacities: tuple[int, ...]

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(member.id for member in self.members)

    @property
    def is_known(self) -> bool:
        """Whether the capacity of each member is known."""
        return bool(self.members) and all(self.capacities)


@dataclass(frozen=True, slots=True, eq=False)
class FormerHolders:
    """The holders before the ring changed."""

    # Ids of the nodes to which the numbers in *holders* refer.
    ids: tuple[str, ...]
    # Per block: shape (blocks,), uint16.
    holders: NodeNumbers
    # Loop time of the change.
    changed_at: float
    # Other possible holders, each of the same shape.
    other_holders: tuple[NodeNumbers, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class HolderState:
    """The holders at the start of one epoch, as stored and sent."""

    # Number of decisions since blocks were at home: the higher count knows better.
    count: int
    # The coordinating job, and the epoch that begins.
    job: str
    epoch: int
    # Ids of the nodes to which the numbers in *holders* refer.
    ids: tuple[str, ...]
    # Per block: shape (blocks,), uint16.
    holders: NodeNumbers
    # Holders at the start of the next epoch: nodes that have already read a block have it then. None if undecided.
    next_holders: NodeNumbers | None = None
    # See cachefs_cluster.placement.timeliness. Sent, and not stored.
    settled: Settled = NOTHING_SETTLED
    # The holders before the ring changed: a node that comes back shortly after finds its blocks there. Sent, and not
    # stored.
    former: FormerHolders | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _HolderChange:
    """A change of the ring, for `holders_after_change`."""

    before: tuple[str, ...]
    ring: PlacementRing
    # Homes in the new ring and in the one before, and second copies: shape (blocks,), uint16.
    homes: NodeNumbers
    old_homes: NodeNumbers | None
    second: NodeNumbers | None


_ALL: Final = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class _Placement:
    """Placement of all blocks in one ring."""

    # Homes and second homes, as places in the ring: shape (blocks,), uint16.
    first: NodeNumbers
    second: NodeNumbers
    # Zone of each member, and of NO_NODE at the end: shape (members + 1,), int32.
    zones: npt.NDArray[np.int32]


class Holders:
    """The holders of one snapshot. Used on the event loop; results of threads are then put in place at once."""

    def __init__(self, space: BlockSpace, replicas: int, threads: Threads) -> None:
        self.ring = PlacementRing(0, (), ())
        # Holders by epoch of the job, at its start, for consecutive epochs; a single entry if no job coordinates
        # copies.
        self.by_epoch: dict[int, NodeNumbers] = {}
        self.reads: dict[int, FirstReads] = {}  # for the same epochs, and for those ahead
        self.job = ""
        self.settled = NOTHING_SETTLED
        self.former: FormerHolders | None = None  # where blocks that were not handed on yet may still be
        self._space = space
        self._replicas = replicas
        self._threads = threads
        self._count = 0  # see HolderState: count at epoch _first_decided
        self._first_decided = 0  # the first epoch decided here
        self._homes: BlockHomes | None = None  # for the newest ring, which is not in place while `follow_ring` runs
        no_nodes = np.full(space.count, NO_NODE, np.uint16)
        self._placement = _Placement(no_nodes, no_nodes, np.array([-1], np.int32))
        self._sizes = np.zeros(0, np.uint32)

    @property
    def homes(self) -> NodeNumbers:
        """Home of each block, as places in the ring: shape (blocks,), uint16."""
        return self._placement.first

    def second_holders(self, epoch: int, blocks: "Ids | slice" = _ALL) -> list[NodeNumbers]:
        """Return the keepers of the second copies of these blocks in *epoch*. There are two per block if it changes
        hands in the epoch, as the copy must be there by then. Each of shape (n,), uint16; empty if one copy is
        enough."""
        if self._replicas < 2 or not self.ring.ids:
            return []
        first, second = self._placement.first[blocks], self._placement.second[blocks]
        decided = [at[blocks] for number in (epoch, epoch + 1) if (at := self.by_epoch.get(number)) is not None]
        return [second_keepers(at, first, second, self._placement.zones) for at in decided or [first]]

    def has_second_copy(self, epoch: int, node: int, blocks: "Ids | slice" = _ALL) -> npt.NDArray[np.bool_]:
        """Return which of these blocks have a second copy on *node* (a place in the ring, or NO_NODE). Shape (n,),
        bool."""
        kept = np.zeros(len(self.homes[blocks]), np.bool_)
        for nodes in self.second_holders(epoch, blocks) if node != NO_NODE else ():
            kept |= nodes == node
        return kept

    def kept_blocks(self, epoch: int, node: int, blocks: "Ids | slice" = _ALL) -> npt.NDArray[np.bool_]:
        """Return which of these blocks *node* keeps as *epoch* begins, including second copies; by homes if the epoch
        is undecided. Shape (n,), bool."""
        kept = self.has_second_copy(epoch, node, blocks)
        if node != NO_NODE:
            kept |= self.by_epoch.get(epoch, self.homes)[blocks] == node
        return kept

    async def follow_ring(self, ring: PlacementRing, current: int = 0, done: float = 0.0) -> bool:
        """Follow a change of the ring, and return whether there is any. Blocks of a member that left go to their new
        home, and blocks whose home is a new member go there. current, done: epoch and progress of the job; blocks read
        in it have already changed hands as decided, and stay there."""
        if ring == self.ring:
            return False
        before, old_homes = self.ring.ids, self.homes
        seconds = {epoch: self.second_holders(epoch) for epoch in (*self.by_epoch, current)}
        placed = await self._threads.planning(self._compute_placement, ring)
        homes = placed.first
        found = {}
        if before:
            holders = self.current_holders(current, done)
            self.former = FormerHolders(
                before, holders if holders is not None else old_homes, _now(), tuple(seconds[current])
            )
        latest: NodeNumbers | None = None
        # Later epochs than the next are decided anew. Readers that just came back may have unknown positions; the
        # others go on from their known epochs.
        last = max(current, min(self.by_epoch, default=0)) + 1
        for epoch in sorted(epoch for epoch in self.by_epoch if epoch <= last):
            second = seconds[epoch][0] if seconds[epoch] else None
            change = _HolderChange(before, ring, homes, old_homes if before else None, second)
            latest = found[epoch] = await self._threads.planning(
                self._holders_after_change, self.by_epoch[epoch], change, latest
            )
        # All at once: these numbers are places in that ring, and mean other nodes, or none, in another ring.
        self.ring, self.by_epoch, self.reads, self._placement = ring, found, {}, placed
        return True

    def current_holders(self, epoch: int, done: float) -> NodeNumbers | None:
        """Return the holders in the middle of an epoch; None if unknown."""
        at, following, reads = self.by_epoch.get(epoch), self.by_epoch.get(epoch + 1), self.reads.get(epoch)
        if at is None:
            return self.by_epoch[max(self.by_epoch)] if self.by_epoch else None
        if following is None or reads is None or reads.positions is None:
            return at
        found: NodeNumbers = np.where(reads.positions < np.float32(done), following, at)
        return found

    def _holders_after_change(
        self, holders: NodeNumbers, change: "_HolderChange", earlier_holders: NodeNumbers | None = None
    ) -> NodeNumbers:
        """Return the holders after a change. earlier_holders: holders an epoch earlier, as places in the new ring; they
        keep the blocks that a departed node was to take."""
        before, ids = change.before, change.ring.ids
        found = holders_after_change(holders, before, ids, change.homes, change.old_homes, change.second)
        if earlier_holders is not None:
            found = np.where(reindex_nodes(holders, before, ids) == NO_NODE, earlier_holders, found)
        return self._fit_into_rooms(found, change.ring)

    def _fit_into_rooms(self, holders: NodeNumbers, ring: PlacementRing) -> NodeNumbers:
        return move_overflow(holders, self._rooms_of_members(ring), self._sizes) if ring.is_known else holders

    def _rooms_of_members(self, ring: PlacementRing) -> NodeBytes:
        """Return the room for held blocks; second copies take as much again."""
        return capacity_by_node(
            (np.array(ring.capacities, np.int64) * (USABLE_FRACTION / self._replicas)).astype(np.int64), self._sizes
        )

    def _compute_placement(self, ring: PlacementRing) -> _Placement:
        if self._homes is None:
            self._homes = BlockHomes(space_hashes(self._space), self._replicas)
            self._sizes = _block_spans(self._space.sizes)
        self._homes.set_members(ring.members)
        return _Placement(self._homes.first, self._homes.second, self._homes.zones)

    def return_home(self, epoch: int = 0, done: float = 0.0) -> None:
        """Return copies to their homes, as no job coordinates them any more; they may still be at their last holders.
        epoch, done: epoch and progress of the job that did."""
        holders = self.current_holders(epoch, done)
        if holders is not None:
            besides = (self.by_epoch.get(epoch), self.by_epoch.get(epoch + 1))
            self.former = FormerHolders(
                self.ring.ids, holders, _now(), tuple(one for one in besides if one is not None)
            )
        self.job, self.by_epoch, self.reads = "", {}, {}

    async def start_coordination(self, job: str, epoch: int, furthest: int, known: HolderState | None) -> None:
        """Let *job* coordinate copies from now on. epoch, furthest: epochs of its slowest and fastest consumer. known:
        holders from before."""
        start, holders, following, count = epoch, self.homes, None, 0
        if known is None or len(known.holders) != self._space.count:
            holders = await self._threads.planning(self._fit_into_rooms, holders, self.ring)
        else:
            count = known.count
            # If this node joined meanwhile, it gets the blocks whose home it is, as all others compute.
            change = _HolderChange(known.ids, self.ring, self.homes, self.homes, None)
            holders = await self._threads.planning(self._holders_after_change, known.holders, change)
            if known.next_holders is not None:
                following = await self._threads.planning(
                    self._holders_after_change, known.next_holders, change, holders
                )
            if known.ids != self.ring.ids:
                besides = (known.next_holders,) if known.next_holders is not None else ()
                self.former = FormerHolders(known.ids, known.holders, _now(), besides)
            elif known.former is not None and self.former is None:
                self.former = known.former
            # A node that has just started may know other nodes' progress before its own readers'. A job restarted under
            # the same name finds the copies where it left them.
            if known.job == job and known.epoch <= furthest + 1:
                start = known.epoch
        self.job, self._count, self._first_decided, self.reads = job, count, start, {}
        self.settled = NOTHING_SETTLED
        self.by_epoch = {start: holders}
        if following is not None and known is not None and start == known.epoch and known.job == job:
            self.by_epoch[start + 1] = following  # as decided by the others, who are already applying it

    def discard_decisions(self, epoch: int) -> None:
        """Discard decisions after *epoch*, as the readers have changed."""
        self.by_epoch = {number: one for number, one in self.by_epoch.items() if number <= epoch}
        self.reads = {}

    async def decide_epochs(self, epoch: int, load_reads: LoadReads, verdict: EpochVerdict | None = None) -> bool:
        """Decide the holders at the starts of *epoch* and of the two that follow, as far as the reads until then are
        known. Keeps the last epoch that is over. Returns whether anything is new.

        verdict: given if orders are published one by one. The holders after an epoch then follow from its own reads and
        the next epoch's alone, as nodes may differ in what else they know.
        """
        is_new = False
        if self.by_epoch and epoch > max(self.by_epoch) + 1:  # no reader reads the epochs between
            latest = self.by_epoch[max(self.by_epoch)]
            self.by_epoch, self.reads = {epoch: latest}, {}
        if epoch in self.by_epoch and epoch not in self.reads and self.ring.is_known:
            ids = self.ring.ids
            reads = await load_reads(epoch, ids)
            if reads is not None and self.ring.ids == ids:
                self.reads[epoch] = reads
        for number in range(min(self.by_epoch, default=epoch), epoch + 2):
            if number + 1 in self.by_epoch or not self.ring.is_known:
                continue
            settled = verdict(number) if verdict is not None else True
            if settled is None:
                break
            if not settled:
                self.by_epoch[number + 1] = self.by_epoch[number]
                continue
            ids = self.ring.ids
            ahead = epochs_ahead(len(ids)) if verdict is None else 1
            epochs = []
            for one in range(number, number + ahead + 1):
                has_positions = one <= number + 1
                reads = self.reads.get(one)
                if reads is None or (has_positions and reads.positions is None):
                    reads = await load_reads(one, ids)
                if reads is None:
                    break
                self.reads[one] = reads if one <= epoch + EPOCHS_WITH_POSITIONS else reads.without_positions()
                # All nodes decide by the same facts, whatever else one happens to know.
                epochs.append(reads if has_positions else reads.without_positions())
            if self.ring.ids != ids or number not in self.by_epoch:
                break
            holders, ring = self.by_epoch[number], self.ring
            if len(epochs) < (1 if verdict is None else 2):
                break
            if verdict is not None:
                epochs[0] = await self._threads.planning(epochs[0].reads_from, ANNOUNCED_UNTIL)
            found = await self._threads.planning(self._decide_next, holders, epochs, ring)
            if self.ring is not ring or self.by_epoch.get(number) is not holders:
                break
            self.by_epoch[number + 1] = found
            self.settled = extend_settled(self.settled, number)
            is_new = True
        for old in [one for one in self.by_epoch if one < epoch - 1 and epoch in self.by_epoch]:
            del self.by_epoch[old]
        self.reads = {number: one for number, one in self.reads.items() if number >= epoch - 1}
        return is_new

    def _decide_next(self, holders: NodeNumbers, epochs: list[FirstReads], ring: PlacementRing) -> NodeNumbers:
        return next_holders(holders, epochs, self._rooms_of_members(ring), self._sizes)

    def state_at(self, epoch: int) -> HolderState | None:
        """Return the holders at the start of *epoch*, for other nodes."""
        holders = self.by_epoch.get(epoch)
        if holders is None:
            return None
        count = self._count + epoch - self._first_decided
        former = self.former
        if former is not None and _now() - former.changed_at > FORMER_HOLDER_SECONDS:
            former = None
        return HolderState(
            count, self.job, epoch, self.ring.ids, holders, self.by_epoch.get(epoch + 1), self.settled, former
        )


def _now() -> float:
    return asyncio.get_running_loop().time()


def _block_spans(sizes: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Return the bytes that blocks of these sizes take in a tier: shape (n,), uint32. Most blocks have one of few
    sizes."""
    different, which = np.unique(sizes, return_inverse=True)
    return np.array([span(int(size)) for size in different.tolist()], np.uint32)[which]
