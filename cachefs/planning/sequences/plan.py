"""The plan: what the published sequences say about when each block of this node is read next.

Time is counted in *reads*: a consumer reads one block after the other, `blocks[0]`, `blocks[1]`, ..., so many a second.
For every block the plan keeps at which of its reads each consumer comes to it next; dividing by the consumer's rate
gives seconds, and the minimum over consumers is the block's next use. Beyond the last published epoch there are only
expectations.

Only the event loop changes a plan. Policies read it from other threads without a lock: what they see of a consumer is
one `Future`, which is replaced as a whole, but for the entries of its array, each of which is right by itself, before
or after the last progress.

Measured with 1.3 million blocks and 8 consumers (processor time, 2 busy cores). Ranks that share the dataset: an epoch
of all 8 takes 20 to 55 ms and 47 MB to publish; 8 jobs that each read all of it: 90 to 160 ms, 12 to 20 ms each, and
83 MB. 5 MB more per consumer for its next reads. Progress of 100 reads takes 14 us, the next use of 256 keys 0.15 ms
and of all blocks 40 to 55 ms, a jump 1 to 8 ms.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.ma  # the first np.unique imports it: 7 to 40 ms in which a job waits
import numpy.typing as npt

from cachefs.planning.blocks.space import BlockSpace, Ids

# Reads per second of a consumer nobody has measured yet.
FIRST_RATE: Final = 1000.0

UNKNOWN: Final = np.iinfo(np.int32).max

Seconds = npt.NDArray[np.float64]

# Blocks whose intermediate results stay in a processor's cache: twice as fast as a million at once.
_IN_CACHE: Final = 1 << 14

# Progress reports that are remembered for policies that look at the plan now and then.
_REMEMBERED: Final = 1024


@dataclass(frozen=True, slots=True)
class Epoch:
    """The reads of one epoch. blocks: in order; first: per block of the space, its first read, or UNKNOWN; later: per
    read, the next read of the same block in this epoch, or UNKNOWN; None where no block is read twice; distinct:
    blocks in it; last: no epoch follows."""

    blocks: Ids
    first: Ids
    later: Ids | None
    distinct: int
    last: bool

    @classmethod
    def of(cls, blocks: npt.NDArray[np.integer], space: BlockSpace, last: bool) -> "Epoch":
        """Raises ValueError for a block that is not of *space*."""
        order = np.ascontiguousarray(blocks, np.int32)
        if len(order) and (int(order.min()) < 0 or int(order.max()) >= space.count):
            raise ValueError(f"a sequence names blocks beyond the {space.count} of snapshot {space.snapshot}")
        reads = np.arange(len(order), dtype=np.int32)
        first = np.full(space.count, UNKNOWN, np.int32)
        first[order[::-1]] = reads[::-1]
        distinct = int(np.count_nonzero(first != UNKNOWN))
        later = None
        if distinct < len(order):
            by_block = np.argsort(order, kind="stable")
            again = order[by_block[1:]] == order[by_block[:-1]]
            later = np.full(len(order), UNKNOWN, np.int32)
            later[by_block[:-1][again]] = by_block[1:][again]
        return cls(order, first, later, distinct, last)


@dataclass(frozen=True, slots=True)
class Future:
    """What is known of a consumer's future. next_read: per block, counted from the start of the current epoch, or
    UNKNOWN; position: reads of that epoch that are done; length: reads of that epoch (0: nobody knows); beyond:
    expected next read of an UNKNOWN block; rate: reads per second."""

    next_read: Ids
    position: int
    length: int
    beyond: float
    rate: float

    def seconds(self, ids: Ids) -> Seconds:
        """Until each block is read next."""
        reads = self.next_read[ids]
        if self.beyond < UNKNOWN:
            # What is known comes before.
            np.minimum(reads, np.int32(self.beyond), out=reads)
        seconds: Seconds = np.subtract(reads, self.position, dtype=np.float64)
        seconds /= self.rate
        if self.beyond >= UNKNOWN:
            seconds[reads == UNKNOWN] = np.inf
        return seconds


@dataclass(slots=True, eq=False)
class _Consumer:
    """current: number of its epoch; origin: reads before that epoch, since it was first seen; generation: changes
    whenever it does not simply read on."""

    space: BlockSpace
    current: int
    now: Future
    suspended: bool = False
    origin: int = 0
    generation: int = 0
    epochs: dict[int, Epoch] = field(default_factory=dict)

    def starts(self) -> Iterator[tuple[int, Epoch]]:
        """The known epochs from the current one on, and the read at which each starts. One that nobody published
        counts as long as the one before it, or else the first that is known."""
        known = sorted(self.epochs)
        start, number = 0, self.current
        length = len(self.epochs[known[0]].blocks) if known else 0
        for following in known:
            epoch = self.epochs[following]
            start += length * (following - number)
            yield start, epoch
            number, length = following, len(epoch.blocks)


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive reads of a consumer: start counts all its reads; seconds until the first of them, and per read."""

    start: int
    blocks: Ids
    seconds: float
    period: float


class Plan:
    """version: counts changes other than a consumer reading on in its epoch; what one knew before is void then."""

    def __init__(self) -> None:
        self.version = 0
        # Replaced, never changed: other threads iterate over them.
        self._spaces: dict[str, BlockSpace] = {}
        # (snapshot, other snapshot): what the blocks of the one are called in the other.
        self._counterparts: dict[tuple[str, str], Ids] = {}
        self._consumers: dict[str, _Consumer] = {}
        self._active: dict[str, tuple[_Consumer, ...]] = {}
        self._consumed: deque[tuple[int, str, Ids]] = deque(maxlen=_REMEMBERED)
        self._progresses = 0

    # --- what happens -----------------------------------------------------------------------------------------------

    def add_space(self, space: BlockSpace) -> None:
        """Sequences can be set that read blocks of *space*; by its snapshot's id, here as elsewhere.

        Where other spaces are there, it takes 0.3 s per million blocks to see what they have in common.
        """
        counterparts = dict(self._counterparts)
        for snapshot, other in self._spaces.items():
            for one, two in ((space, other), (other, space)):
                common = one.counterparts(two) if snapshot != space.snapshot else None
                if common is not None:
                    counterparts[one.snapshot, two.snapshot] = common
        self._counterparts = counterparts
        self._spaces = {**self._spaces, space.snapshot: space}
        self._changed()

    def remove_space(self, snapshot: str) -> None:
        """And every consumer that reads it."""
        self._spaces = {known: one for known, one in self._spaces.items() if known != snapshot}
        self._counterparts = {pair: common for pair, common in self._counterparts.items() if snapshot not in pair}
        self._consumers = {name: one for name, one in self._consumers.items() if one.space.snapshot != snapshot}
        self._changed()

    def set_epoch(
        self, consumer: str, snapshot: str, epoch: int, blocks: npt.NDArray[np.integer], *, last: bool = False
    ) -> None:
        """The order in which *consumer* reads blocks in *epoch*; last: no epoch follows. Publish the current epoch and
        the next: each costs 4 bytes per read and per block of the space. A new consumer starts with its first one.

        Raises KeyError for an unknown snapshot, ValueError for blocks it does not have.
        """
        space = self._spaces[snapshot]
        published = Epoch.of(blocks, space, last)
        known = self._consumers.get(consumer)
        if known is None or known.space is not space:
            nothing = Future(np.zeros(0, np.int32), 0, 0, np.inf, FIRST_RATE)
            known = _Consumer(space, epoch, nothing)
            self._consumers = {**self._consumers, consumer: known}
        follows = epoch > max(known.epochs, default=epoch)
        known.epochs = {**known.epochs, epoch: published}
        if follows and known.current in known.epochs:
            self._extend(known)
        else:
            self._replan(known, known.current, known.now.position)

    def set_progress(self, consumer: str, epoch: int, position: int, rate: float = 0.0) -> None:
        """*consumer* has done *position* reads of *epoch*, at *rate* reads per second (0: as before). Reading on costs
        microseconds; anything else plans its future anew. Unknown consumers are ignored."""
        known = self._consumers.get(consumer)
        if known is None:
            return
        if rate > 0 and rate != known.now.rate:
            known.now = replace(known.now, rate=rate)
        if epoch == known.current and epoch in known.epochs and position >= known.now.position:
            self._read_on(known, position)
        elif epoch == known.current + 1 and epoch in known.epochs and known.current in known.epochs:
            self._read_on(known, len(known.epochs[known.current].blocks))
            self._next_epoch(known)
            self._read_on(known, position)
        else:
            self._replan(known, epoch, max(0, position))

    def read_early(self, consumer: str, reads: npt.NDArray[np.integer]) -> None:
        """These reads of *consumer*'s current epoch, in ascending order, are done although they lie beyond its
        position. Unknown consumers and reads are ignored."""
        known = self._consumers.get(consumer)
        if known is not None and known.current in known.epochs:
            self._done(known, reads[(reads >= known.now.position) & (reads < known.now.length)])

    def suspend(self, consumer: str, suspended: bool) -> None:
        """A suspended consumer has no part in the plan until it is taken back."""
        known = self._consumers.get(consumer)
        if known is not None and known.suspended != suspended:
            known.suspended = suspended
            self._changed()

    def remove(self, consumer: str) -> None:
        if consumer in self._consumers:
            self._consumers = {name: one for name, one in self._consumers.items() if name != consumer}
            self._changed()

    # --- what follows from it -----------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Nobody's future is known."""
        return not self._active

    @property
    def spaces(self) -> dict[str, BlockSpace]:
        """By snapshot. Not to be changed."""
        return self._spaces

    def next_use(self, keys: Sequence[bytes]) -> Seconds:
        """Seconds until each block is read next, as of the last progress; inf: never, or nobody knows."""
        soonest = np.full(len(keys), np.inf)
        for snapshot in self._active:
            space = self._spaces.get(snapshot)
            if space is not None:
                ids = space.ids(keys)
                here = np.flatnonzero(ids >= 0)
                soonest[here] = np.minimum(soonest[here], self.next_use_of(snapshot, ids[here]))
        return soonest

    def next_use_of(self, snapshot: str, ids: Ids) -> Seconds:
        """`next_use` of blocks of one snapshot, whichever snapshots' readers come to them."""
        soonest = np.full(len(ids), np.inf)
        for start in range(0, len(ids), _IN_CACHE):
            part = soonest[start : start + _IN_CACHE]
            for future, where, theirs in self.futures(snapshot, ids[start : start + _IN_CACHE]):
                part[where] = np.minimum(part[where], future.seconds(theirs))
        return soonest

    def futures(self, snapshot: str, ids: Ids) -> Iterator[tuple[Future, "slice | npt.NDArray[np.int64]", Ids]]:
        """Everybody who may read some of *ids*: (future, which of *ids*, what they are called in that future)."""
        for other, consumers in self._active.items():
            where: slice | npt.NDArray[np.int64] = slice(None)
            theirs = ids
            if other != snapshot:
                counterparts = self._counterparts.get((snapshot, other))
                if counterparts is None:
                    continue
                theirs = counterparts[ids]
                where = np.flatnonzero(theirs >= 0)
                theirs = theirs[where]
            for consumer in consumers:
                yield consumer.now, where, theirs

    def consumed_since(self, mark: int) -> tuple[int, list[tuple[str, Ids]] | None]:
        """The next mark, and (snapshot, blocks) that were read since *mark*; None: too long ago to say."""
        remembered = list(self._consumed)
        end = remembered[-1][0] + 1 if remembered else mark
        if remembered and remembered[0][0] > mark:
            return end, None
        return end, [(snapshot, ids) for number, snapshot, ids in remembered if number >= mark]

    # --- one consumer -------------------------------------------------------------------------------------------------

    def consumers(self) -> list[str]:
        """Those that are not suspended."""
        return [name for name, one in self._consumers.items() if not one.suspended]

    def place(self, consumer: str) -> tuple[int, int]:
        """(epoch, reads of it that are done). Raises KeyError."""
        known = self._consumers[consumer]
        return known.current, known.now.position

    def epoch(self, consumer: str, epoch: int) -> Epoch | None:
        """What was published of an epoch that is not over yet."""
        known = self._consumers.get(consumer)
        return known.epochs.get(epoch) if known is not None else None

    def expected(self, consumer: str, ids: Ids) -> npt.NDArray[np.int64]:
        """Next read of each block, counted from the start of the current epoch; UNKNOWN where none is. KeyError."""
        return self._consumers[consumer].now.next_read[ids].astype(np.int64)

    def window(self, consumer: str, start: int, count: int) -> Window | None:
        """At most *count* reads from read *start* on (or from the consumer's position, if that is later), none of two
        epochs; None where no more are known. Positions count all reads since the consumer was first seen."""
        known = self._consumers.get(consumer)
        if known is None or known.suspended:
            return None
        position = known.now.position
        index = max(start - known.origin, position)
        for first, epoch in known.starts():
            if index < first + len(epoch.blocks):
                index = max(index, first)
                blocks = epoch.blocks[index - first : index - first + count]
                period = 1.0 / known.now.rate
                return Window(known.origin + index, blocks, (index - position) * period, period)
        return None

    def generation(self, consumer: str) -> tuple[str, int]:
        """Snapshot and a number that changes when the consumer does not simply read on: read positions that were
        looked at before mean nothing then. Raises KeyError."""
        known = self._consumers[consumer]
        return known.space.snapshot, known.generation

    def _read_on(self, consumer: _Consumer, position: int) -> None:
        before = consumer.now.position
        position = min(position, consumer.now.length)
        if position > before:
            self._done(consumer, slice(before, position))
            consumer.now = replace(consumer.now, position=position)

    def _done(self, consumer: _Consumer, reads: "slice | npt.NDArray[np.integer]") -> None:
        """These reads of the current epoch are done: their blocks are read again later, or nobody knows."""
        epoch = consumer.epochs[consumer.current]
        blocks = epoch.blocks[reads]
        next_read = np.full(len(blocks), UNKNOWN, np.int32) if epoch.later is None else epoch.later[reads]
        for start, following in consumer.starts():
            if following is not epoch:
                first = following.first[blocks]
                next_read = np.where((next_read == UNKNOWN) & (first != UNKNOWN), start + first, next_read)
        # Of a block that is read twice here the last read counts, which is the one that numpy assigns.
        consumer.now.next_read[blocks] = next_read
        self._consumed.append((self._progresses, consumer.space.snapshot, blocks.copy()))
        self._progresses += 1

    def _next_epoch(self, consumer: _Consumer) -> None:
        """From the end of the current epoch to the start of the next, which is known."""
        length = len(consumer.epochs[consumer.current].blocks)
        next_read = consumer.now.next_read
        shifted = np.where(next_read == UNKNOWN, next_read, next_read - np.int32(length))
        consumer.current += 1
        consumer.origin += length
        consumer.epochs = {number: one for number, one in consumer.epochs.items() if number >= consumer.current}
        length = len(consumer.epochs[consumer.current].blocks)
        consumer.now = Future(shifted, 0, length, _beyond(consumer), consumer.now.rate)
        self.version += 1

    def _extend(self, consumer: _Consumer) -> None:
        """An epoch was published that follows all the others: it decides what they leave open."""
        start, epoch = list(consumer.starts())[-1]
        _fill(consumer.now.next_read, start, epoch)
        consumer.now = replace(consumer.now, beyond=_beyond(consumer))
        self._changed()

    def _replan(self, consumer: _Consumer, current: int, position: int) -> None:
        """The consumer is at *position* of epoch *current*, whatever was thought before."""
        consumer.epochs = {number: one for number, one in consumer.epochs.items() if number >= current}
        if (current, position) != (consumer.current, consumer.now.position):
            consumer.generation += 1
            consumer.origin = 0
        consumer.current = current
        here = consumer.epochs.get(current)
        if here is None:
            next_read, length = np.full(consumer.space.count, UNKNOWN, np.int32), 0
            position = min([position, *(start for start, _ in consumer.starts())])
        else:
            length = len(here.blocks)
            position = min(position, length)
            next_read = here.first.copy() if position == 0 else _ahead(here, position)
        for start, epoch in consumer.starts():
            if epoch is not here:
                _fill(next_read, start, epoch)
        consumer.now = Future(next_read, position, length, _beyond(consumer), consumer.now.rate)
        self._changed()

    def _changed(self) -> None:
        active: dict[str, tuple[_Consumer, ...]] = {}
        for consumer in self._consumers.values():
            if not consumer.suspended and consumer.epochs:
                snapshot = consumer.space.snapshot
                active[snapshot] = (*active.get(snapshot, ()), consumer)
        self._active = active
        self.version += 1


def _ahead(epoch: Epoch, position: int) -> Ids:
    """Next read of each block from *position* on."""
    next_read = np.full(len(epoch.first), UNKNOWN, np.int32)
    reads = np.arange(position, len(epoch.blocks), dtype=np.int32)
    # Of several reads of a block numpy assigns the last, which is the first.
    next_read[epoch.blocks[position:][::-1]] = reads[::-1]
    return next_read


def _fill(next_read: Ids, start: int, epoch: Epoch) -> None:
    """Where nothing is known yet, say what this epoch, which starts at read *start*, reads."""
    if 2 * len(epoch.blocks) < len(next_read):
        blocks = epoch.blocks[next_read[epoch.blocks] == UNKNOWN]
    else:  # In order of memory, a look at all blocks is quicker.
        blocks = np.flatnonzero((next_read == UNKNOWN) & (epoch.first != UNKNOWN)).astype(np.int32)
    next_read[blocks] = epoch.first[blocks] + np.int32(start)


def _beyond(consumer: _Consumer) -> float:
    """Expected next read of a block that no known epoch reads any more.

    Were each later epoch of n reads to read it with probability q, the first that does would be the (1/q)-th on
    average, half-way through; so (1/q - 1/2) n reads after the end of what is known.
    """
    known = list(consumer.starts())
    if not known or known[-1][1].last or not known[-1][1].distinct:
        return np.inf
    start, epoch = known[-1]
    length = len(epoch.blocks)
    return math.ceil(start + length + (consumer.space.count / epoch.distinct - 0.5) * length)
