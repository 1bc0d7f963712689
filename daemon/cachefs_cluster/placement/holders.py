"""Computes the holders of each block of one snapshot: homes, and from them the holders of one epoch after the other.

Every node computes them for itself from the same facts (see `cachefs.planning.cluster.moves`). The holders of the
current epoch are stored on disk and sent to other nodes, since they depend on all epochs before.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import BlockSpace, Ids
from cachefs.planning.cluster.copies import (
    NodeBytes,
    capacity_by_node,
    epochs_ahead,
    holders_after_change,
    move_overflow,
    second_keepers,
)
from cachefs.planning.cluster.epoch_reads import FirstReads, ScheduledReads
from cachefs.planning.cluster.homes import NO_NODE, BlockHomes, NodeNumbers, reindex_nodes
from cachefs.planning.cluster.moves import MAX_EVENTS, NO_EVENT, EpochMoves, next_holders
from cachefs.planning.cluster.rendezvous import RingMember, space_hashes
from cachefs.planning.cluster.schedule import EpochSchedule, ScheduledEpoch, scheduled_epochs
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.segment_writer import span

# Fraction of a node's tiers that counts as room for blocks: the rest is freed ahead, or serves reads of blocks held
# elsewhere.
USABLE_FRACTION: Final = 0.97
# Seconds for which a block may still be at its former holder after the ring changed. By then it has been read, or moved
# by the rebalance.
FORMER_HOLDER_SECONDS: Final = 600.0

# Returns the reads of some epochs of a schedule, by ids of nodes in the ring; None if some are not known yet.
LoadReads = Callable[[EpochSchedule, Sequence[ScheduledEpoch], tuple[str, ...]], Awaitable[Sequence[FirstReads] | None]]


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
    # Keepers of second copies, each of the same shape. They hand nothing on: their copies are not needed.
    second_holders: tuple[NodeNumbers, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class HolderState:
    """The holders at the start of one epoch, as stored and sent."""

    # Number of epochs decided since blocks were at home: the higher count knows better.
    count: int
    # The job and loader that lead, and their epoch that begins; empty and 0 where none leads any more.
    job: str
    epoch: int
    # Ids of the nodes to which the numbers in *holders* refer.
    ids: tuple[str, ...]
    # Per block: shape (blocks,), uint16.
    holders: NodeNumbers
    # Holders at the start of the next epoch: nodes that have already read a block have it then. None if undecided.
    next_holders: NodeNumbers | None = None
    # The holders before the ring changed: a node that comes back shortly after finds its blocks there. Sent, and not
    # stored.
    former: FormerHolders | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EpochDecision:
    """The moves of one epoch of the leader, and the schedule by which they were decided."""

    schedule: EpochSchedule
    # The epochs that `moves.events` numbers.
    epochs: tuple[ScheduledEpoch, ...]
    moves: EpochMoves

    def takes_over(self, group: str, epoch: int, blocks: Ids) -> npt.NDArray[np.bool_]:
        """Return which of these blocks change hands at the read by *group* (its digest) in its *epoch*: shape (n,)."""
        number = next((at for at, one in enumerate(self.epochs) if (one.group, one.epoch) == (group, epoch)), NO_EVENT)
        if number == NO_EVENT:
            return np.zeros(len(blocks), np.bool_)
        found: npt.NDArray[np.bool_] = self.moves.events[blocks] == number
        return found


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
        # Holders by epoch of the leader, at its start, for consecutive epochs. Empty if blocks are at home; a single
        # entry if no group leads.
        self.by_epoch: dict[int, NodeNumbers] = {}
        # The moves of these epochs except the last, and how they were decided; None: nothing moves in that epoch.
        self.decisions: dict[int, EpochDecision | None] = {}
        self.leader = ""  # name of the job and loader
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
        """Return the keepers of the second copies of these blocks in *epoch*, if the snapshot is hot. There are two per
        block if it changes hands in the epoch, as the copy must be there by then. Each of shape (n,), uint16; empty if
        the cluster keeps one copy of all blocks."""
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
        """Return which of these blocks *node* keeps as *epoch* begins; by homes if the epoch is undecided. Shape (n,),
        bool."""
        if node == NO_NODE:
            return np.zeros(len(self.homes[blocks]), np.bool_)
        kept: npt.NDArray[np.bool_] = self.by_epoch.get(epoch, self.homes)[blocks] == node
        return kept

    def kept_until_read(self, group: str, epoch: int, reads: FirstReads, node: int) -> npt.NDArray[np.bool_]:
        """Return which blocks *node* keeps when *group* (its digest) reads them in its *epoch*: shape (blocks,), bool.
        Beyond the decided epochs of the leader, the last decided holders count."""
        kept: npt.NDArray[np.bool_] = self.by_epoch[max(self.by_epoch)] == node
        for number in sorted(self.by_epoch, reverse=True):
            decision = self.decisions.get(number)
            at = (
                next((one for one in decision.epochs if (one.group, one.epoch) == (group, epoch)), None)
                if decision
                else None
            )
            if decision is None or at is None:
                continue
            times = ScheduledReads(reads, at.begin, at.length).times(_ALL)
            holders = np.where(decision.moves.times < times, decision.moves.following, self.by_epoch[number])
            kept = np.where(times < 1, holders == node, kept)
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
                before,
                holders if holders is not None else old_homes,
                _now(),
                second_holders=tuple(seconds[current]),
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
        self.ring, self.by_epoch, self._placement = ring, found, placed
        # The moves follow from the holders that remain decided.
        self.decisions = {}
        return True

    def current_holders(self, epoch: int, done: float) -> NodeNumbers | None:
        """Return the holders in the middle of an epoch; None if unknown."""
        at, decision = self.by_epoch.get(epoch), self.decisions.get(epoch)
        if at is None:
            return self.by_epoch[max(self.by_epoch)] if self.by_epoch else None
        if decision is None:
            return at
        return decision.moves.holders_at(done, at)

    def remember_holders(self, epoch: int, done: float) -> None:
        """Remember the present holders as former ones, as some moves of the leader's *epoch* will not happen."""
        holders = self.current_holders(epoch, done)
        if holders is not None:
            besides = (self.by_epoch.get(one) for one in (epoch, epoch + 1, epoch - 1))
            others = tuple(one for one in besides if one is not None)
            self.former = FormerHolders(self.ring.ids, holders, _now(), others)

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
        """Return the room for held blocks; second copies take what is left."""
        return capacity_by_node((np.array(ring.capacities, np.int64) * USABLE_FRACTION).astype(np.int64), self._sizes)

    def _compute_placement(self, ring: PlacementRing) -> _Placement:
        if self._homes is None:
            self._homes = BlockHomes(space_hashes(self._space), self._replicas)
            self._sizes = block_spans(self._space.sizes)
        self._homes.set_members(ring.members)
        return _Placement(self._homes.first, self._homes.second, self._homes.zones)

    def stop_coordination(self, epoch: int = 0, done: float = 0.0) -> None:
        """Leave copies where they are, as no group leads any more. epoch, done: epoch and progress of the one that did:
        some copies may still be where they were at the start of its epoch, or have gone where they were to be next."""
        holders = self.current_holders(epoch, done)
        if holders is not None:
            self.remember_holders(epoch, done)
            self._count += max(0, epoch - self._first_decided)
            self.by_epoch = {0: holders}
        self.leader, self.decisions, self._first_decided = "", {}, 0

    async def start_coordination(self, leader: str, epoch: int, furthest: int, known: HolderState | None) -> None:
        """Let *leader*, the name of a job and loader, lead from now on. epoch, furthest: epochs of its slowest and
        fastest consumer. known: holders from before; None: those that this node has, else the homes."""
        start, holders, following, count = epoch, self.homes, None, 0
        if known is not None and len(known.holders) == self._space.count:
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
            if known.job == leader and known.epoch <= furthest + 1:
                start = known.epoch
        elif self.by_epoch:
            count, holders = self._count, self.by_epoch[max(self.by_epoch)]
        else:
            holders = await self._threads.planning(self._fit_into_rooms, holders, self.ring)
        self.leader, self._count, self._first_decided, self.decisions = leader, count, start, {}
        self.by_epoch = {start: holders}
        if following is not None and known is not None and start == known.epoch and known.job == leader:
            self.by_epoch[start + 1] = following  # as decided by the others, who are already applying it

    async def decide_epochs(
        self, epoch: int, schedule_of: Callable[[int], EpochSchedule | None], load_reads: LoadReads
    ) -> bool:
        """Decide the moves of the leader's *epoch* and of the next one, as far as schedules and orders are known, and
        decide anew where a schedule has changed. Keeps the last epoch that is over. Returns whether anything is new."""
        is_new = False
        if self.by_epoch and epoch > max(self.by_epoch) + 1:  # no reader reads the epochs between
            latest = self.by_epoch[max(self.by_epoch)]
            self.by_epoch, self.decisions = {epoch: latest}, {}
        for number in range(min(self.by_epoch, default=epoch), epoch + 2):
            schedule, before = schedule_of(number), self.decisions.get(number)
            is_decided = number + 1 in self.by_epoch
            if number not in self.by_epoch or not self.ring.is_known:
                break
            if schedule is None:
                if is_decided:
                    continue
                if number >= epoch:
                    break
                self.by_epoch[number + 1], self.decisions[number] = self.by_epoch[number], None
                continue
            if is_decided and before is not None and before.schedule == schedule:
                continue
            decision = await self._decide(number, schedule, load_reads)
            if decision is None:
                break
            if is_decided and before is not None:
                # What was to be decided from these holders is open again.
                self.by_epoch = {one: holders for one, holders in self.by_epoch.items() if one <= number}
                self.decisions = {one: known for one, known in self.decisions.items() if one < number}
            self.by_epoch[number + 1], self.decisions[number] = decision.moves.following, decision
            is_new = True
        for old in [one for one in self.by_epoch if one < epoch - 1 and epoch in self.by_epoch]:
            del self.by_epoch[old]
            self.decisions.pop(old, None)
        return is_new

    async def _decide(self, number: int, schedule: EpochSchedule, load_reads: LoadReads) -> EpochDecision | None:
        """Return the moves of one epoch; None if orders are not known yet, or the members changed meanwhile. Where its
        end is decided already without moves, as by another node or before members changed, the moves follow from it."""
        ring, holders, following = self.ring, self.by_epoch[number], self.by_epoch.get(number + 1)
        before = self.decisions.get(number)
        epochs = tuple(scheduled_epochs(schedule, epochs_ahead(len(ring.ids))))
        reads = await load_reads(schedule, epochs, ring.ids)
        if reads is None:
            return None
        scheduled = [ScheduledReads(one, at.begin, at.length) for at, one in zip(epochs, reads, strict=True)]
        if following is not None and before is None:
            moves = await self._threads.planning(EpochMoves.between, holders, following, scheduled, schedule.since)
        else:
            rooms = self._rooms_of_members(ring)
            moves = await self._threads.planning(
                _decide_moves, holders, before, epochs, scheduled, rooms, self._sizes, schedule.since
            )
        if self.ring is not ring or self.by_epoch.get(number) is not holders:
            return None
        return EpochDecision(schedule, epochs, moves)

    def state_at(self, epoch: int) -> HolderState | None:
        """Return the holders at the start of *epoch*, for other nodes."""
        holders = self.by_epoch.get(epoch)
        if holders is None:
            return None
        count = self._count + epoch - self._first_decided
        former = self.former
        if former is not None and _now() - former.changed_at > FORMER_HOLDER_SECONDS:
            former = None
        return HolderState(count, self.leader, epoch, self.ring.ids, holders, self.by_epoch.get(epoch + 1), former)


def _decide_moves(  # noqa: PLR0913 - runs in a thread, with all that it needs
    holders: NodeNumbers,
    before: EpochDecision | None,
    epochs: Sequence[ScheduledEpoch],
    reads: Sequence[ScheduledReads],
    rooms: NodeBytes,
    sizes: npt.NDArray[np.uint32],
    since: float,
) -> EpochMoves:
    """Decide the moves of an epoch, also anew in its midst: *before* is what was decided, and holds for reads before
    *since*. reads: of each of the *epochs*."""
    if before is None:
        return next_holders(holders, reads, rooms, sizes, since)
    names = [(one.group, one.epoch) for one in epochs]
    numbers = np.full(MAX_EVENTS + 1, NO_EVENT, np.uint8)
    for number, one in enumerate(before.epochs):
        if (one.group, one.epoch) in names:
            numbers[number] = names.index((one.group, one.epoch))
    earlier = before.moves.rescheduled(numbers, reads)
    return next_holders(earlier.holders_at(since, holders), reads, rooms, sizes, since).keep_earlier(earlier, since)


def _now() -> float:
    return asyncio.get_running_loop().time()


def block_spans(sizes: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Return the bytes that blocks of these sizes take in a tier: shape (n,), uint32. Most blocks have one of few
    sizes."""
    different, which = np.unique(sizes, return_inverse=True)
    return np.array([span(int(size)) for size in different.tolist()], np.uint32)[which]
