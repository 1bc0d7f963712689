"""The timeline of one consumer: its position in its epochs, and the next read of each block according to them.

Changed only by its plan (see cachefs.planning.sequences.plan), on the event loop. `PlannedEpoch` has the reads of one
epoch, indexed for the plan.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import BlockSpace, Ids, Numbers

# Stands for an unknown read.
UNKNOWN_READ: Final = np.iinfo(np.int32).max
# Assumed reads per second of a consumer without a measured rate.
ASSUMED_RATE: Final = 1000.0

# Seconds per block or read; inf where never or unknown.
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PlannedEpoch:
    """The reads of an epoch, counted from its start."""

    # The block of each read, in order of the reads: shape (reads,), int32.
    blocks: Ids
    # The first read of each block of the space, or UNKNOWN_READ: shape (blocks of the space,), int32.
    first: Ids
    # For each read, the next read of the same block in this epoch, or UNKNOWN_READ: shape (reads,), int32. None where
    # each block is read at most once.
    repeats: Ids | None
    # Number of different blocks that are read.
    distinct: int
    # True where no epoch follows.
    is_last: bool

    @classmethod
    def of(cls, blocks: npt.NDArray[np.integer], space: BlockSpace, is_last: bool) -> "PlannedEpoch":
        """Build an epoch. blocks: numbers in *space* in order of the reads, shape (reads,), any integer type.

        Raises ValueError for a block outside *space*.
        """
        order = np.ascontiguousarray(blocks, np.int32)
        if len(order) and (int(order.min()) < 0 or int(order.max()) >= space.count):
            raise ValueError(f"a sequence names blocks beyond the {space.count} of snapshot {space.snapshot}")
        reads = np.arange(len(order), dtype=np.int32)
        first = np.full(space.count, UNKNOWN_READ, np.int32)
        first[order[::-1]] = reads[::-1]
        distinct = int(np.count_nonzero(first != UNKNOWN_READ))
        later = None
        if distinct < len(order):
            by_block = np.argsort(order, kind="stable")
            again = order[by_block[1:]] == order[by_block[:-1]]
            later = np.full(len(order), UNKNOWN_READ, np.int32)
            later[by_block[:-1][again]] = by_block[1:][again]
        return cls(order, first, later, distinct, is_last)

    @property
    def repetition(self) -> float:
        """Reads per block that is read at all. Of consecutive reads of one block, only the first can be observed."""
        return len(self.blocks) / self.distinct if self.distinct else 1.0

    def next_reads_from(self, position: int) -> Ids:
        """Return the next read of each block from read *position* on, or UNKNOWN_READ: shape (blocks of the space,),
        int32."""
        if position <= len(self.blocks) // 2:
            next_read = self.first.copy()
            # Of several reads of one block, numpy keeps its last assignment, which is the latest read.
            next_read[self.blocks[:position]] = UNKNOWN_READ if self.repeats is None else self.repeats[:position]
            return next_read
        next_read = np.full(len(self.first), UNKNOWN_READ, np.int32)
        reads = np.arange(position, len(self.blocks), dtype=np.int32)
        # Of several reads of one block, numpy keeps its last assignment. The reads are assigned backwards, so the
        # first read of the block is kept.
        next_read[self.blocks[position:][::-1]] = reads[::-1]
        return next_read


@dataclass(frozen=True, slots=True)
class KnownFuture:
    """The known future of a consumer. Reads are counted from the start of its current epoch."""

    # Next read of each block of the space, or UNKNOWN_READ. Shape (blocks of the space,), int32.
    next_read: Ids
    # Reads of the current epoch that are done.
    position: int
    # Reads of the current epoch; 0: unknown.
    length: int
    # Expected next read of an UNKNOWN_READ block.
    beyond: float
    # Reads per second.
    rate: float

    def seconds(self, ids: Numbers) -> Seconds:
        """Return the seconds until each of the blocks *ids* (shape (n,)) is read next: shape (n,), float64."""
        reads = self.next_read[ids.astype(np.intp, copy=False)]
        if self.beyond < UNKNOWN_READ:
            # A known read comes before every merely expected one.
            np.minimum(reads, np.int32(self.beyond), out=reads)
        seconds: Seconds = np.subtract(reads, self.position, dtype=np.float64)
        seconds /= self.rate
        if self.beyond >= UNKNOWN_READ:
            seconds[reads == UNKNOWN_READ] = np.inf
        return seconds


@dataclass(frozen=True, slots=True)
class ReadWindow:
    """Consecutive reads of a consumer."""

    # The first read, counting all reads since the consumer was first seen.
    start: int
    # The block of each read: shape (reads,), int32.
    blocks: Ids
    # Seconds until the first read.
    seconds: float
    # Seconds per read.
    period: float


@dataclass(slots=True, eq=False)
class ConsumerTimeline:
    """One consumer of a plan."""

    space: BlockSpace
    # Number of the epoch that the consumer is in.
    epoch_number: int
    # The known future. Replaced as a whole, since other threads read it.
    future: KnownFuture
    # True while the plan ignores the consumer.
    is_suspended: bool = False
    # Reads before the current epoch, since the consumer was first seen.
    origin: int = 0
    # Changes whenever the consumer does anything but read on.
    generation: int = 0
    # Published epochs, by number, from the current one on.
    epochs: dict[int, PlannedEpoch] = field(default_factory=dict)

    @classmethod
    def at_epoch(cls, space: BlockSpace, epoch: int) -> "ConsumerTimeline":
        """Return the timeline of a consumer of which only its first epoch's number is known."""
        return cls(space, epoch, KnownFuture(np.zeros(0, np.int32), 0, 0, np.inf, ASSUMED_RATE))

    @property
    def current_epoch(self) -> PlannedEpoch | None:
        """The current epoch; None where it was not published."""
        return self.epochs.get(self.epoch_number)

    def epoch_starts(self) -> Iterator[tuple[int, PlannedEpoch]]:
        """Yield the known epochs from the current one on, each with the read at which it starts.

        An unpublished epoch counts as long as the one before it, or else as the first known one. Epochs with reads
        beyond an int32 are too far ahead to be known, as between an old position and a late epoch with which a job
        resumes.
        """
        known = sorted(self.epochs)
        start, number = 0, self.epoch_number
        length = len(self.epochs[known[0]].blocks) if known else 0
        for following in known:
            epoch = self.epochs[following]
            start += length * (following - number)
            if start + len(epoch.blocks) >= UNKNOWN_READ:
                return
            yield start, epoch
            number, length = following, len(epoch.blocks)

    def window(self, start: int, count: int) -> ReadWindow | None:
        """Return reads of the consumer, as `Plan.window`. start: the first one, counting all reads since the consumer
        was first seen; count: most reads."""
        position = self.future.position
        index = max(start - self.origin, position)
        for first, epoch in self.epoch_starts():
            if index < first + len(epoch.blocks):
                index = max(index, first)
                blocks = epoch.blocks[index - first : index - first + count]
                period = 1.0 / self.future.rate
                return ReadWindow(self.origin + index, blocks, (index - position) * period, period)
        return None

    def is_coming(self, reads: npt.NDArray[np.int64], blocks: Ids) -> npt.NDArray[np.bool_]:
        """Return which reads, numbered as in `window`, are still to come: shape (n,), bool. Even reads beyond the
        position may be done. reads: shape (n,), int64; blocks: the block of each, shape (n,), int32."""
        coming: npt.NDArray[np.bool_] = self.future.next_read[blocks] <= reads - self.origin
        return coming

    def set_rate(self, rate: float) -> None:
        """Set the rate in reads per second; 0: unchanged."""
        if rate > 0 and rate != self.future.rate:
            self.future = replace(self.future, rate=rate)

    def advance(self, position: int) -> Ids:
        """Mark the first *position* reads of the current epoch, which must be known, as done. Returns the blocks of the
        newly done reads, in order: shape (n,), int32."""
        before = self.future.position
        position = min(position, self.future.length)
        if position <= before:
            return self.future.next_read[:0]
        blocks = self.mark_done(slice(before, position))
        self.future = replace(self.future, position=position)
        return blocks

    def mark_done(self, reads: "slice | npt.NDArray[np.integer]") -> Ids:
        """Mark some reads of the current epoch, which must be known, as done. The next read of their blocks becomes a
        later one, or UNKNOWN_READ.

        reads: their numbers, counted from the start of the epoch: a slice, or shape (n,) of any integer type. Returns
        the block of each, shape (n,), int32.
        """
        epoch = self.epochs[self.epoch_number]
        blocks = epoch.blocks[reads]
        next_read = np.full(len(blocks), UNKNOWN_READ, np.int32) if epoch.repeats is None else epoch.repeats[reads]
        for start, following in self.epoch_starts():
            if following is not epoch:
                first = following.first[blocks]
                next_read = np.where((next_read == UNKNOWN_READ) & (first != UNKNOWN_READ), start + first, next_read)
        # Where a block is read twice here its last read counts, which is numpy's last assignment.
        self.future.next_read[blocks] = next_read
        return blocks

    def mark_done_ahead(self, reads: npt.NDArray[np.integer]) -> Ids:
        """Mark some reads of the next epoch as done, except where their blocks are read before.

        reads: their numbers, counted from the start of that epoch: shape (n,), any integer type. Returns the block of
        each marked read, shape (n,), int32: none where the epoch is not known.
        """
        starts = [
            (start, epoch) for start, epoch in self.epoch_starts() if epoch is self.epochs.get(self.epoch_number + 1)
        ]
        if not starts:
            return self.future.next_read[:0]
        start, epoch = starts[0]
        reads = reads[(reads >= 0) & (reads < len(epoch.blocks))]
        reads = reads[self.future.next_read[epoch.blocks[reads]] == start + reads]
        blocks: Ids = epoch.blocks[reads]
        next_read = np.full(len(blocks), UNKNOWN_READ, np.int32) if epoch.repeats is None else epoch.repeats[reads]
        next_read = np.where(next_read == UNKNOWN_READ, next_read, next_read + np.int32(start))
        for beyond, following in self.epoch_starts():
            if beyond > start:
                first = following.first[blocks]
                next_read = np.where((next_read == UNKNOWN_READ) & (first != UNKNOWN_READ), beyond + first, next_read)
        self.future.next_read[blocks] = next_read
        return blocks

    def begin_next_epoch(self) -> None:
        """Move from the end of the current epoch to the start of the next, which must be known."""
        length = len(self.epochs[self.epoch_number].blocks)
        next_read = self.future.next_read
        shifted = np.where(next_read == UNKNOWN_READ, next_read, next_read - np.int32(length))
        self.epoch_number += 1
        self.origin += length
        self.epochs = {number: one for number, one in self.epochs.items() if number >= self.epoch_number}
        self.future = KnownFuture(
            shifted, 0, len(self.epochs[self.epoch_number].blocks), self._expected_beyond(), self.future.rate
        )

    def extend_future(self) -> None:
        """Use an epoch that was published after all others for the reads that these leave unknown."""
        newest = self.epochs[max(self.epochs)]
        for start, epoch in self.epoch_starts():
            if epoch is newest:
                _fill_unknown(self.future.next_read, start, epoch)
        self.future = replace(self.future, beyond=self._expected_beyond())

    def replan(self, current: int, position: int) -> None:
        """Recompute the future for *position* of epoch *current*, whatever was assumed before."""
        self.epochs = {number: one for number, one in self.epochs.items() if number >= current}
        if (current, position) != (self.epoch_number, self.future.position):
            self.generation += 1
            self.origin = 0
        self.epoch_number = current
        here = self.current_epoch
        if here is None:
            next_read, length = np.full(self.space.count, UNKNOWN_READ, np.int32), 0
            position = min([position, *(start for start, _ in self.epoch_starts())])
        else:
            length = len(here.blocks)
            position = min(position, length)
            next_read = here.next_reads_from(position)
        for start, epoch in self.epoch_starts():
            if epoch is not here:
                _fill_unknown(next_read, start, epoch)
        self.future = KnownFuture(next_read, position, length, self._expected_beyond(), self.future.rate)

    def _expected_beyond(self) -> float:
        """Return the expected next read of a block that no known epoch reads any more.

        If each later epoch of n reads reads the block with probability q, the first that does is the (1/q)-th on
        average, half-way through; that is (1/q - 1/2) n reads after the end of the known epochs.
        """
        known = list(self.epoch_starts())
        if not known or known[-1][1].is_last or not known[-1][1].distinct:
            return np.inf
        start, epoch = known[-1]
        length = len(epoch.blocks)
        return math.ceil(start + length + (self.space.count / epoch.distinct - 0.5) * length)


def _fill_unknown(next_read: Ids, start: int, epoch: PlannedEpoch) -> None:
    """Fill in the unknown next reads from an epoch that starts at read *start*."""
    if 2 * len(epoch.blocks) < len(next_read):
        blocks = epoch.blocks[next_read[epoch.blocks] == UNKNOWN_READ]
    else:  # quicker: examines all blocks in the order of memory
        blocks = np.flatnonzero((next_read == UNKNOWN_READ) & (epoch.first != UNKNOWN_READ)).astype(np.int32)
    next_read[blocks] = epoch.first[blocks] + np.int32(start)
