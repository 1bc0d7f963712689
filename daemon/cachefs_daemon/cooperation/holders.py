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
from cachefs.planning.cluster.copies import Bytes, after_change, epochs_ahead, next_holders, rooms
from cachefs.planning.cluster.fitting import fitted
from cachefs.planning.cluster.homes import NO_NODE, Homes, Nodes, reindexed
from cachefs.planning.cluster.reads import Reads
from cachefs.planning.cluster.rendezvous import Member, space_hashes
from cachefs.planning.cluster.second_copies import second_keepers
from cachefs_daemon.cooperation.timeliness import LATE, NOTHING_SETTLED, Settled, extended
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.segment_writer import span

# Fraction of a node's tiers that counts as room for blocks: the rest is freed ahead, or serves reads of blocks held
# elsewhere.
USABLE: Final = 0.97
# Epochs, from the current one on, whose reads keep their places: 6 bytes per block each instead of 2.
PLACED: Final = 2

# Seconds for which a block may still be at its former holder after the ring changed. By then it has been read, or moved
# by filling.
FORMER_SECONDS: Final = 600.0

# Returns the reads of an epoch, by ids of nodes in the ring; None if unknown.
ReadsOf = Callable[[int, tuple[str, ...]], Awaitable[Reads | None]]
# Returns whether copies change hands in an epoch; None: not settled yet.
Verdict = Callable[[int], bool | None]


@dataclass(frozen=True, slots=True)
class Ring:
    """The members that count for placement, ordered by id."""

    # The ring epoch.
    epoch: int
    members: tuple[Member, ...]
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
class Former:
    """The holders before the ring changed."""

    # Ids of the nodes to which the numbers in *holders* refer.
    ids: tuple[str, ...]
    # Per block: shape (blocks,), uint16.
    holders: Nodes
    # Loop time of the change.
    until: float
    # Other possible holders, each of the same shape.
    besides: tuple[Nodes, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """The holders at the start of one epoch, as stored and sent."""

    # Number of decisions since blocks were at home: the higher count knows better.
    count: int
    # The coordinating job, and the epoch that begins.
    job: str
    epoch: int
    # Ids of the nodes to which the numbers in *holders* refer.
    ids: tuple[str, ...]
    # Per block: shape (blocks,), uint16.
    holders: Nodes
    # Holders at the start of the next epoch: nodes that have already read a block have it then. None if undecided.
    following: Nodes | None = None
    # See cachefs_daemon.cooperation.timeliness. Sent, and not stored.
    settled: Settled = NOTHING_SETTLED
    # The holders before the ring changed: a node that comes back shortly after finds its blocks there. Sent, and not
    # stored.
    former: Former | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """A change of the ring, for `after_change`."""

    before: tuple[str, ...]
    ring: Ring
    # Homes in the new ring and in the one before, and second copies: shape (blocks,), uint16.
    homes: Nodes
    old_homes: Nodes | None
    second: Nodes | None


_ALL: Final = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """Placement of all blocks in one ring."""

    # Homes and second homes, as places in the ring: shape (blocks,), uint16.
    first: Nodes
    second: Nodes
    # Zone of each member, and of NO_NODE at the end: shape (members + 1,), int32.
    zones: npt.NDArray[np.int32]


class Holders:
    """The holders of one snapshot. Used on the event loop; results of threads are then put in place at once."""

    def __init__(self, space: BlockSpace, replicas: int, threads: Threads) -> None:
        self.ring = Ring(0, (), ())
        # Holders by epoch of the job, at its start, for consecutive epochs; a single entry if no job coordinates
        # copies.
        self.at: dict[int, Nodes] = {}
        self.reads: dict[int, Reads] = {}  # for the same epochs, and for those ahead
        self.job = ""
        self.settled = NOTHING_SETTLED
        self.former: Former | None = None  # where blocks that were not handed on yet may still be
        self._space = space
        self._replicas = replicas
        self._threads = threads
        self._count = 0  # see Known: count at epoch _began
        self._began = 0  # the first epoch decided here
        self._homes: Homes | None = None  # for the newest ring, which is not in place while `follow` runs
        no_nodes = np.full(space.count, NO_NODE, np.uint16)
        self._placed = _Placed(no_nodes, no_nodes, np.array([-1], np.int32))
        self._sizes = np.zeros(0, np.uint32)

    @property
    def homes(self) -> Nodes:
        """Home of each block, as places in the ring: shape (blocks,), uint16."""
        return self._placed.first

    def seconds(self, epoch: int, blocks: "Ids | slice" = _ALL) -> list[Nodes]:
        """Return the keepers of the second copies of these blocks in *epoch*. There are two per block if it changes
        hands in the epoch, as the copy must be there by then. Each of shape (n,), uint16; empty if one copy is
        enough."""
        if self._replicas < 2 or not self.ring.ids:
            return []
        first, second = self._placed.first[blocks], self._placed.second[blocks]
        decided = [at[blocks] for number in (epoch, epoch + 1) if (at := self.at.get(number)) is not None]
        return [second_keepers(at, first, second, self._placed.zones) for at in decided or [first]]

    def keeps_second(self, epoch: int, node: int, blocks: "Ids | slice" = _ALL) -> npt.NDArray[np.bool_]:
        """Return which of these blocks have a second copy on *node* (a place in the ring, or NO_NODE). Shape (n,),
        bool."""
        kept = np.zeros(len(self.homes[blocks]), np.bool_)
        for nodes in self.seconds(epoch, blocks) if node != NO_NODE else ():
            kept |= nodes == node
        return kept

    def kept(self, epoch: int, node: int, blocks: "Ids | slice" = _ALL) -> npt.NDArray[np.bool_]:
        """Return which of these blocks *node* keeps as *epoch* begins, including second copies; by homes if the epoch
        is undecided. Shape (n,), bool."""
        kept = self.keeps_second(epoch, node, blocks)
        if node != NO_NODE:
            kept |= self.at.get(epoch, self.homes)[blocks] == node
        return kept

    async def follow(self, ring: Ring, current: int = 0, done: float = 0.0) -> bool:
        """Follow a change of the ring, and return whether there is any. Blocks of a member that left go to their new
        home, and blocks whose home is a new member go there. current, done: epoch and progress of the job; blocks read
        in it have already changed hands as decided, and stay there."""
        if ring == self.ring:
            return False
        before, old_homes = self.ring.ids, self.homes
        seconds = {epoch: self.seconds(epoch) for epoch in (*self.at, current)}
        placed = await self._threads.planning(self._rehome, ring)
        homes = placed.first
        found = {}
        if before:
            held = self.now_held(current, done)
            self.former = Former(before, held if held is not None else old_homes, _now(), tuple(seconds[current]))
        latest: Nodes | None = None
        # Later epochs than the next are decided anew. Readers that just came back may have unknown positions; the
        # others go on from their known epochs.
        last = max(current, min(self.at, default=0)) + 1
        for epoch in sorted(epoch for epoch in self.at if epoch <= last):
            second = seconds[epoch][0] if seconds[epoch] else None
            change = _Change(before, ring, homes, old_homes if before else None, second)
            latest = found[epoch] = await self._threads.planning(self._changed, self.at[epoch], change, latest)
        # All at once: these numbers are places in that ring, and mean other nodes, or none, in another ring.
        self.ring, self.at, self.reads, self._placed = ring, found, {}, placed
        return True

    def now_held(self, epoch: int, done: float) -> Nodes | None:
        """Return the holders in the middle of an epoch; None if unknown."""
        at, following, reads = self.at.get(epoch), self.at.get(epoch + 1), self.reads.get(epoch)
        if at is None:
            return self.at[max(self.at)] if self.at else None
        if following is None or reads is None or reads.when is None:
            return at
        found: Nodes = np.where(reads.when < np.float32(done), following, at)
        return found

    def _changed(self, holders: Nodes, change: "_Change", until_then: Nodes | None = None) -> Nodes:
        """Return the holders after a change. until_then: holders an epoch earlier, as places in the new ring; they keep
        the blocks that a departed node was to take."""
        before, ids = change.before, change.ring.ids
        found = after_change(holders, before, ids, change.homes, change.old_homes, change.second)
        if until_then is not None:
            found = np.where(reindexed(holders, before, ids) == NO_NODE, until_then, found)
        return self._fitted(found, change.ring)

    def _fitted(self, holders: Nodes, ring: Ring) -> Nodes:
        return fitted(holders, self._rooms(ring), self._sizes) if ring.is_known else holders

    def _rooms(self, ring: Ring) -> Bytes:
        """Return the room for held blocks; second copies take as much again."""
        return rooms((np.array(ring.capacities, np.int64) * (USABLE / self._replicas)).astype(np.int64), self._sizes)

    def _rehome(self, ring: Ring) -> _Placed:
        if self._homes is None:
            self._homes = Homes(space_hashes(self._space), self._replicas)
            self._sizes = _spans(self._space.sizes)
        self._homes.set_members(ring.members)
        return _Placed(self._homes.first, self._homes.second, self._homes.zones)

    def stay_home(self, epoch: int = 0, done: float = 0.0) -> None:
        """Return copies to their homes, as no job coordinates them any more; they may still be at their last holders.
        epoch, done: epoch and progress of the job that did."""
        held = self.now_held(epoch, done)
        if held is not None:
            besides = (self.at.get(epoch), self.at.get(epoch + 1))
            self.former = Former(self.ring.ids, held, _now(), tuple(one for one in besides if one is not None))
        self.job, self.at, self.reads = "", {}, {}

    async def begin(self, job: str, epoch: int, furthest: int, known: Known | None) -> None:
        """Let *job* coordinate copies from now on. epoch, furthest: epochs of its slowest and fastest consumer. known:
        holders from before."""
        start, holders, following, count = epoch, self.homes, None, 0
        if known is None or len(known.holders) != self._space.count:
            holders = await self._threads.planning(self._fitted, holders, self.ring)
        else:
            count = known.count
            # If this node joined meanwhile, it gets the blocks whose home it is, as all others compute.
            change = _Change(known.ids, self.ring, self.homes, self.homes, None)
            holders = await self._threads.planning(self._changed, known.holders, change)
            if known.following is not None:
                following = await self._threads.planning(self._changed, known.following, change, holders)
            if known.ids != self.ring.ids:
                besides = (known.following,) if known.following is not None else ()
                self.former = Former(known.ids, known.holders, _now(), besides)
            elif known.former is not None and self.former is None:
                self.former = known.former
            # A node that has just started may know other nodes' progress before its own readers'. A job restarted under
            # the same name finds the copies where it left them.
            if known.job == job and known.epoch <= furthest + 1:
                start = known.epoch
        self.job, self._count, self._began, self.reads = job, count, start, {}
        self.settled = NOTHING_SETTLED
        self.at = {start: holders}
        if following is not None and known is not None and start == known.epoch and known.job == job:
            self.at[start + 1] = following  # as decided by the others, who are already applying it

    def decide_anew(self, epoch: int) -> None:
        """Discard decisions after *epoch*, as the readers have changed."""
        self.at = {number: one for number, one in self.at.items() if number <= epoch}
        self.reads = {}

    async def advance(self, epoch: int, reads_of: ReadsOf, verdict: Verdict | None = None) -> bool:
        """Decide the holders at the starts of *epoch* and of the two that follow, as far as the reads until then are
        known. Keeps the last epoch that is over. Returns whether anything is new.

        verdict: given if orders are published one by one. The holders after an epoch then follow from its own reads and
        the next epoch's alone, as nodes may differ in what else they know.
        """
        is_new = False
        if self.at and epoch > max(self.at) + 1:  # no reader reads the epochs between
            latest = self.at[max(self.at)]
            self.at, self.reads = {epoch: latest}, {}
        if epoch in self.at and epoch not in self.reads and self.ring.is_known:
            ids = self.ring.ids
            reads = await reads_of(epoch, ids)
            if reads is not None and self.ring.ids == ids:
                self.reads[epoch] = reads
        for number in range(min(self.at, default=epoch), epoch + 2):
            if number + 1 in self.at or not self.ring.is_known:
                continue
            settled = verdict(number) if verdict is not None else True
            if settled is None:
                break
            if not settled:
                self.at[number + 1] = self.at[number]
                continue
            ids = self.ring.ids
            ahead = epochs_ahead(len(ids)) if verdict is None else 1
            epochs = []
            for one in range(number, number + ahead + 1):
                has_places = one <= number + 1
                reads = self.reads.get(one)
                if reads is None or (has_places and reads.when is None):
                    reads = await reads_of(one, ids)
                if reads is None:
                    break
                self.reads[one] = reads if one <= epoch + PLACED else reads.without_places()
                # All nodes decide by the same facts, whatever else one happens to know.
                epochs.append(reads if has_places else reads.without_places())
            if self.ring.ids != ids or number not in self.at:
                break
            holders, ring = self.at[number], self.ring
            if len(epochs) < (1 if verdict is None else 2):
                break
            if verdict is not None:
                epochs[0] = await self._threads.planning(epochs[0].after, LATE)
            found = await self._threads.planning(self._next, holders, epochs, ring)
            if self.ring is not ring or self.at.get(number) is not holders:
                break
            self.at[number + 1] = found
            self.settled = extended(self.settled, number)
            is_new = True
        for old in [one for one in self.at if one < epoch - 1 and epoch in self.at]:
            del self.at[old]
        self.reads = {number: one for number, one in self.reads.items() if number >= epoch - 1}
        return is_new

    def _next(self, holders: Nodes, epochs: list[Reads], ring: Ring) -> Nodes:
        return next_holders(holders, epochs, self._rooms(ring), self._sizes)

    def known(self, epoch: int) -> Known | None:
        """Return the holders at the start of *epoch*, for other nodes."""
        holders = self.at.get(epoch)
        if holders is None:
            return None
        count = self._count + epoch - self._began
        former = self.former
        if former is not None and _now() - former.until > FORMER_SECONDS:
            former = None
        return Known(count, self.job, epoch, self.ring.ids, holders, self.at.get(epoch + 1), self.settled, former)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _spans(sizes: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Return the bytes that blocks of these sizes take in a tier: shape (n,), uint32. Most blocks have one of few
    sizes."""
    different, which = np.unique(sizes, return_inverse=True)
    return np.array([span(int(size)) for size in different.tolist()], np.uint32)[which]
