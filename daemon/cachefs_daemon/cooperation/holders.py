"""Who holds what of one snapshot: homes, and from them the holders of one epoch after the other.

Every node computes them for itself from the same facts (see `cachefs.planning.cluster.copies`). The holders of the
current epoch are kept on disk and given to other nodes, since what is where depends on all that was before.
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
from cachefs.planning.cluster.homes import NOBODY, Homes, Nodes, reindexed
from cachefs.planning.cluster.reads import Reads
from cachefs.planning.cluster.rendezvous import Member, space_hashes
from cachefs.planning.cluster.second_copies import second_keepers
from cachefs_daemon.cooperation.timeliness import LATE, NOTHING_SETTLED, Settled, extended
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.segment_writer import span

# The part of its tiers that a node is taken to have for blocks: some is room that is made ahead, and some is for what
# is read here and held elsewhere.
USABLE: Final = 0.97
# Epochs from the current one on of whose reads the places are kept: 6 bytes per block each in place of 2.
PLACED: Final = 2

# Seconds for which a block may still be with who held it before the ring became another one. By then it was read, or
# filling has moved it.
FORMER_SECONDS: Final = 600.0

# Gives the reads of an epoch, by ids of nodes in the ring; None where they are not known.
ReadsOf = Callable[[int, tuple[str, ...]], Awaitable[Reads | None]]
# Says of an epoch whether copies change hands in it: None: that is not settled yet.
Verdict = Callable[[int], bool | None]


@dataclass(frozen=True, slots=True)
class Ring:
    """The members that count for placement, in order of their ids."""

    # The ring epoch.
    epoch: int
    members: tuple[Member, ...]
    # Bytes of the tiers of each; 0: not known yet.
    capacities: tuple[int, ...]

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(member.id for member in self.members)

    @property
    def is_known(self) -> bool:
        """Is it known how much room each has?"""
        return bool(self.members) and all(self.capacities)


@dataclass(frozen=True, slots=True, eq=False)
class Former:
    """Who held what before other members came to count."""

    # Ids of the nodes that the numbers in *holders* stand for.
    ids: tuple[str, ...]
    # Of each block: shape (blocks,), uint16.
    holders: Nodes
    # Loop time at which that ended.
    until: float
    # Who may have had each besides: each the same.
    besides: tuple[Nodes, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """The holders at the start of one epoch, as they are kept and told."""

    # How often holders were decided since blocks were at home: who has seen more knows better.
    count: int
    # The job that reads, and which of its epochs begins.
    job: str
    epoch: int
    # Ids of the nodes that the numbers in *holders* stand for.
    ids: tuple[str, ...]
    # Of each block: shape (blocks,), uint16.
    holders: Nodes
    # The same at the start of the next epoch: who has read a block by now has it then. None where that is not decided.
    following: Nodes | None = None
    # See cachefs_daemon.cooperation.timeliness. It is told, and not kept.
    settled: Settled = NOTHING_SETTLED
    # Who held what before other members came to count: whoever comes back a moment later has to look there for what is
    # its own from now on. It is told, and not kept.
    former: Former | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """Of the members that count, see `after_change`."""

    before: tuple[str, ...]
    ring: Ring
    # Of the ring, and of the one before; who had second copies: shape (blocks,), uint16.
    homes: Nodes
    old_homes: Nodes | None
    second: Nodes | None


_ALL: Final = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """Of one ring."""

    # Homes and second homes, as places in it: shape (blocks,), uint16.
    first: Nodes
    second: Nodes
    # Of each member, and of NOBODY at the end: shape (members + 1,), int32.
    zones: npt.NDArray[np.int32]


class Holders:
    """Of one snapshot. Used on the event loop; what it computes in threads is then put in place at once."""

    def __init__(self, space: BlockSpace, replicas: int, threads: Threads) -> None:
        self.ring = Ring(0, (), ())
        # By epoch of the job, at its start, for some epochs in a row; the only one where no job coordinates copies.
        self.at: dict[int, Nodes] = {}
        self.reads: dict[int, Reads] = {}  # of the same epochs, and of those ahead
        self.job = ""
        self.settled = NOTHING_SETTLED
        self.former: Former | None = None  # what they have not handed on yet may still be there
        self._space = space
        self._replicas = replicas
        self._threads = threads
        self._count = 0  # of the epoch with which it began, see Known
        self._began = 0  # that epoch
        self._homes: Homes | None = None  # of the newest ring, which is not in place yet while that is followed
        nobody = np.full(space.count, NOBODY, np.uint16)
        self._placed = _Placed(nobody, nobody, np.array([-1], np.int32))
        self._sizes = np.zeros(0, np.uint32)

    @property
    def homes(self) -> Nodes:
        """Places in the ring, per block: shape (blocks,), uint16."""
        return self._placed.first

    def seconds(self, epoch: int, blocks: "Ids | slice" = _ALL) -> list[Nodes]:
        """Who keeps the second copies of these blocks in *epoch*: one of two nodes for each, where the block changes
        hands in it, as the copy is to be there by then. Each of shape (n,), uint16; none where one copy is enough."""
        if self._replicas < 2 or not self.ring.ids:
            return []
        first, second = self._placed.first[blocks], self._placed.second[blocks]
        decided = [at[blocks] for number in (epoch, epoch + 1) if (at := self.at.get(number)) is not None]
        return [second_keepers(at, first, second, self._placed.zones) for at in decided or [first]]

    def keeps_second(self, epoch: int, node: int, blocks: "Ids | slice" = _ALL) -> npt.NDArray[np.bool_]:
        """Of which of these blocks *node* (a place in the ring, or NOBODY) keeps the second copy: shape (n,), bool."""
        kept = np.zeros(len(self.homes[blocks]), np.bool_)
        for nodes in self.seconds(epoch, blocks) if node != NOBODY else ():
            kept |= nodes == node
        return kept

    def kept(self, epoch: int, node: int, blocks: "Ids | slice" = _ALL) -> npt.NDArray[np.bool_]:
        """Which of these blocks *node* keeps as *epoch* begins, second copies too; where that is not decided, as its
        homes have it. Shape (n,), bool."""
        kept = self.keeps_second(epoch, node, blocks)
        if node != NOBODY:
            kept |= self.at.get(epoch, self.homes)[blocks] == node
        return kept

    async def follow(self, ring: Ring, current: int = 0, done: float = 0.0) -> bool:
        """These are the members now. Returns whether anything has changed. What somebody has held who has left is
        with its new home, and what has its home on somebody who has come goes there. current, done: the epoch in which
        the job is, and how far: what was read in it has changed hands as it was decided, and stays there."""
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
        # What lies beyond the next epoch is decided anew. Of readers that have just come back it may not be known yet
        # where they are; others go on from the epochs that they have.
        last = max(current, min(self.at, default=0)) + 1
        for epoch in sorted(epoch for epoch in self.at if epoch <= last):
            second = seconds[epoch][0] if seconds[epoch] else None
            change = _Change(before, ring, homes, old_homes if before else None, second)
            latest = found[epoch] = await self._threads.planning(self._changed, self.at[epoch], change, latest)
        # All at once: these are numbers of places in that ring, and mean somebody else, or nobody, in another one.
        self.ring, self.at, self.reads, self._placed = ring, found, {}, placed
        return True

    def now_held(self, epoch: int, done: float) -> Nodes | None:
        """Who holds each block in the middle of an epoch; None where that is not known."""
        at, following, reads = self.at.get(epoch), self.at.get(epoch + 1), self.reads.get(epoch)
        if at is None:
            return self.at[max(self.at)] if self.at else None
        if following is None or reads is None or reads.when is None:
            return at
        found: Nodes = np.where(reads.when < np.float32(done), following, at)
        return found

    def _changed(self, holders: Nodes, change: "_Change", until_then: Nodes | None = None) -> Nodes:
        """until_then: who holds each block an epoch earlier, as places in the new ring: with whom that stays which
        somebody was to take who has left."""
        before, ids = change.before, change.ring.ids
        found = after_change(holders, before, ids, change.homes, change.old_homes, change.second)
        if until_then is not None:
            found = np.where(reindexed(holders, before, ids) == NOBODY, until_then, found)
        return self._fitted(found, change.ring)

    def _fitted(self, holders: Nodes, ring: Ring) -> Nodes:
        return fitted(holders, self._rooms(ring), self._sizes) if ring.is_known else holders

    def _rooms(self, ring: Ring) -> Bytes:
        """For what a node holds; as much again is for second copies."""
        return rooms((np.array(ring.capacities, np.int64) * (USABLE / self._replicas)).astype(np.int64), self._sizes)

    def _rehome(self, ring: Ring) -> _Placed:
        if self._homes is None:
            self._homes = Homes(space_hashes(self._space), self._replicas)
            self._sizes = _spans(self._space.sizes)
        self._homes.set_members(ring.members)
        return _Placed(self._homes.first, self._homes.second, self._homes.zones)

    def stay_home(self, epoch: int = 0, done: float = 0.0) -> None:
        """No job coordinates copies any more: they belong at home, and may still be where they were last. epoch, done:
        the epoch in which the job is that has done so, and how far."""
        held = self.now_held(epoch, done)
        if held is not None:
            besides = (self.at.get(epoch), self.at.get(epoch + 1))
            self.former = Former(self.ring.ids, held, _now(), tuple(one for one in besides if one is not None))
        self.job, self.at, self.reads = "", {}, {}

    async def begin(self, job: str, epoch: int, furthest: int, known: Known | None) -> None:
        """From now on *job* coordinates copies. epoch, furthest: in which its slowest and its fastest consumer are.
        known: what is known from before."""
        start, holders, following, count = epoch, self.homes, None, 0
        if known is None or len(known.holders) != self._space.count:
            holders = await self._threads.planning(self._fitted, holders, self.ring)
        else:
            count = known.count
            # Where this node has come meanwhile, it gets what is at home here, as all others see it.
            change = _Change(known.ids, self.ring, self.homes, self.homes, None)
            holders = await self._threads.planning(self._changed, known.holders, change)
            if known.following is not None:
                following = await self._threads.planning(self._changed, known.following, change, holders)
            if known.ids != self.ring.ids:
                besides = (known.following,) if known.following is not None else ()
                self.former = Former(known.ids, known.holders, _now(), besides)
            elif known.former is not None and self.former is None:
                self.former = known.former
            # A node that has just started may know the others' places before its own readers'. A job that begins anew
            # under the same name has the copies where it has left them.
            if known.job == job and known.epoch <= furthest + 1:
                start = known.epoch
        self.job, self._count, self._began, self.reads = job, count, start, {}
        self.settled = NOTHING_SETTLED
        self.at = {start: holders}
        if following is not None and known is not None and start == known.epoch and known.job == job:
            self.at[start + 1] = following  # as the others have it, for whom it is under way

    def decide_anew(self, epoch: int) -> None:
        """From *epoch* on: other nodes read than was thought."""
        self.at = {number: one for number, one in self.at.items() if number <= epoch}
        self.reads = {}

    async def advance(self, epoch: int, reads_of: ReadsOf, verdict: Verdict | None = None) -> bool:
        """Decide who holds what at the starts of *epoch* and of the two that follow, as far as is known what is read
        until then. Returns whether anything is new. Of epochs that are over, the last one is kept.

        verdict: where orders are published one by one. Who holds what after an epoch then follows from that one and the
        next, and from nothing else, as nodes may know different ones besides."""
        is_new = False
        if self.at and epoch > max(self.at) + 1:  # nobody has read what lies between
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
                # Whatever a node happens to know besides, all decide by the same.
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
        """What others may learn of the start of that epoch."""
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
    """Bytes that blocks of these sizes take in a tier: shape (n,), uint32. Most blocks have one of few sizes."""
    different, which = np.unique(sizes, return_inverse=True)
    return np.array([span(int(size)) for size in different.tolist()], np.uint32)[which]
