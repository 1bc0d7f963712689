"""The timeline of one consumer: its position in its epochs, and the next read of each block according to them.

Changed only by its plan (see cachefs.planning.sequences.plan), on the event loop.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import BlockSpace, Ids, Numbers
from cachefs.planning.sequences.epoch import UNKNOWN, Epoch

# Assumed reads per second of a consumer without a measured rate.
FIRST_RATE: Final = 1000.0

# Seconds per block or read; inf where never or unknown.
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Future:
    """The known future of a consumer. Reads are counted from the start of its current epoch."""

    # Next read of each block of the space, or UNKNOWN. Shape (blocks of the space,), int32.
    next_read: Ids
    # Reads of the current epoch that are done.
    position: int
    # Reads of the current epoch; 0: unknown.
    length: int
    # Expected next read of an UNKNOWN block.
    beyond: float
    # Reads per second.
    rate: float

    def seconds(self, ids: Numbers) -> Seconds:
        """Return the seconds until each of the blocks *ids* (shape (n,)) is read next: shape (n,), float64."""
        reads = self.next_read[ids.astype(np.intp, copy=False)]
        if self.beyond < UNKNOWN:
            # A known read comes before every merely expected one.
            np.minimum(reads, np.int32(self.beyond), out=reads)
        seconds: Seconds = np.subtract(reads, self.position, dtype=np.float64)
        seconds /= self.rate
        if self.beyond >= UNKNOWN:
            seconds[reads == UNKNOWN] = np.inf
        return seconds


@dataclass(frozen=True, slots=True)
class Window:
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
class Course:
    """One consumer of a plan."""

    space: BlockSpace
    # Number of the epoch that the consumer is in.
    current: int
    # The known future. Replaced as a whole, since other threads read it.
    now: Future
    # True while the plan ignores the consumer.
    suspended: bool = False
    # Reads before the current epoch, since the consumer was first seen.
    origin: int = 0
    # Changes whenever the consumer does anything but read on.
    generation: int = 0
    # Published epochs, by number, from the current one on.
    epochs: dict[int, Epoch] = field(default_factory=dict)

    @classmethod
    def starting(cls, space: BlockSpace, epoch: int) -> "Course":
        """Return the timeline of a consumer of which only its first epoch's number is known."""
        return cls(space, epoch, Future(np.zeros(0, np.int32), 0, 0, np.inf, FIRST_RATE))

    @property
    def here(self) -> Epoch | None:
        """The current epoch; None where it was not published."""
        return self.epochs.get(self.current)

    def starts(self) -> Iterator[tuple[int, Epoch]]:
        """Yield the known epochs from the current one on, each with the read at which it starts.

        An unpublished epoch counts as long as the one before it, or else as the first known one. Epochs with reads
        beyond an int32 are too far ahead to be known, as between an old position and a late epoch with which a job
        resumes.
        """
        known = sorted(self.epochs)
        start, number = 0, self.current
        length = len(self.epochs[known[0]].blocks) if known else 0
        for following in known:
            epoch = self.epochs[following]
            start += length * (following - number)
            if start + len(epoch.blocks) >= UNKNOWN:
                return
            yield start, epoch
            number, length = following, len(epoch.blocks)

    def window(self, start: int, count: int) -> Window | None:
        """Return reads of the consumer, as `Plan.window`. start: the first one, counting all reads since the consumer
        was first seen; count: most reads."""
        position = self.now.position
        index = max(start - self.origin, position)
        for first, epoch in self.starts():
            if index < first + len(epoch.blocks):
                index = max(index, first)
                blocks = epoch.blocks[index - first : index - first + count]
                period = 1.0 / self.now.rate
                return Window(self.origin + index, blocks, (index - position) * period, period)
        return None

    def is_coming(self, reads: npt.NDArray[np.int64], blocks: Ids) -> npt.NDArray[np.bool_]:
        """Return which reads, numbered as in `window`, are still to come: shape (n,), bool. Even reads beyond the
        position may be done. reads: shape (n,), int64; blocks: the block of each, shape (n,), int32."""
        coming: npt.NDArray[np.bool_] = self.now.next_read[blocks] <= reads - self.origin
        return coming

    def set_rate(self, rate: float) -> None:
        """Set the rate in reads per second; 0: unchanged."""
        if rate > 0 and rate != self.now.rate:
            self.now = replace(self.now, rate=rate)

    def read_on(self, position: int) -> Ids:
        """Mark the first *position* reads of the current epoch, which must be known, as done. Returns the blocks of the
        newly done reads, in order: shape (n,), int32."""
        before = self.now.position
        position = min(position, self.now.length)
        if position <= before:
            return self.now.next_read[:0]
        blocks = self.done(slice(before, position))
        self.now = replace(self.now, position=position)
        return blocks

    def done(self, reads: "slice | npt.NDArray[np.integer]") -> Ids:
        """Mark some reads of the current epoch, which must be known, as done. The next read of their blocks becomes a
        later one, or UNKNOWN.

        reads: their numbers, counted from the start of the epoch: a slice, or shape (n,) of any integer type. Returns
        the block of each, shape (n,), int32.
        """
        epoch = self.epochs[self.current]
        blocks = epoch.blocks[reads]
        next_read = np.full(len(blocks), UNKNOWN, np.int32) if epoch.later is None else epoch.later[reads]
        for start, following in self.starts():
            if following is not epoch:
                first = following.first[blocks]
                next_read = np.where((next_read == UNKNOWN) & (first != UNKNOWN), start + first, next_read)
        # Where a block is read twice here its last read counts, which is numpy's last assignment.
        self.now.next_read[blocks] = next_read
        return blocks

    def done_ahead(self, reads: npt.NDArray[np.integer]) -> Ids:
        """Mark some reads of the next epoch as done, except where their blocks are read before.

        reads: their numbers, counted from the start of that epoch: shape (n,), any integer type. Returns the block of
        each marked read, shape (n,), int32: none where the epoch is not known.
        """
        starts = [(start, epoch) for start, epoch in self.starts() if epoch is self.epochs.get(self.current + 1)]
        if not starts:
            return self.now.next_read[:0]
        start, epoch = starts[0]
        reads = reads[(reads >= 0) & (reads < len(epoch.blocks))]
        reads = reads[self.now.next_read[epoch.blocks[reads]] == start + reads]
        blocks: Ids = epoch.blocks[reads]
        next_read = np.full(len(blocks), UNKNOWN, np.int32) if epoch.later is None else epoch.later[reads]
        next_read = np.where(next_read == UNKNOWN, next_read, next_read + np.int32(start))
        for beyond, following in self.starts():
            if beyond > start:
                first = following.first[blocks]
                next_read = np.where((next_read == UNKNOWN) & (first != UNKNOWN), beyond + first, next_read)
        self.now.next_read[blocks] = next_read
        return blocks

    def begin_next_epoch(self) -> None:
        """Move from the end of the current epoch to the start of the next, which must be known."""
        length = len(self.epochs[self.current].blocks)
        next_read = self.now.next_read
        shifted = np.where(next_read == UNKNOWN, next_read, next_read - np.int32(length))
        self.current += 1
        self.origin += length
        self.epochs = {number: one for number, one in self.epochs.items() if number >= self.current}
        self.now = Future(shifted, 0, len(self.epochs[self.current].blocks), self._beyond(), self.now.rate)

    def extend(self) -> None:
        """Use an epoch that was published after all others for the reads that these leave unknown."""
        newest = self.epochs[max(self.epochs)]
        for start, epoch in self.starts():
            if epoch is newest:
                _fill(self.now.next_read, start, epoch)
        self.now = replace(self.now, beyond=self._beyond())

    def replan(self, current: int, position: int) -> None:
        """Recompute the future for *position* of epoch *current*, whatever was assumed before."""
        self.epochs = {number: one for number, one in self.epochs.items() if number >= current}
        if (current, position) != (self.current, self.now.position):
            self.generation += 1
            self.origin = 0
        self.current = current
        here = self.here
        if here is None:
            next_read, length = np.full(self.space.count, UNKNOWN, np.int32), 0
            position = min([position, *(start for start, _ in self.starts())])
        else:
            length = len(here.blocks)
            position = min(position, length)
            next_read = here.next_reads_from(position)
        for start, epoch in self.starts():
            if epoch is not here:
                _fill(next_read, start, epoch)
        self.now = Future(next_read, position, length, self._beyond(), self.now.rate)

    def _beyond(self) -> float:
        """Return the expected next read of a block that no known epoch reads any more.

        If each later epoch of n reads reads the block with probability q, the first that does is the (1/q)-th on
        average, half-way through; that is (1/q - 1/2) n reads after the end of the known epochs.
        """
        known = list(self.starts())
        if not known or known[-1][1].last or not known[-1][1].distinct:
            return np.inf
        start, epoch = known[-1]
        length = len(epoch.blocks)
        return math.ceil(start + length + (self.space.count / epoch.distinct - 0.5) * length)


def _fill(next_read: Ids, start: int, epoch: Epoch) -> None:
    """Fill in the unknown next reads from an epoch that starts at read *start*."""
    if 2 * len(epoch.blocks) < len(next_read):
        blocks = epoch.blocks[next_read[epoch.blocks] == UNKNOWN]
    else:  # quicker: examines all blocks in the order of memory
        blocks = np.flatnonzero((next_read == UNKNOWN) & (epoch.first != UNKNOWN)).astype(np.int32)
    next_read[blocks] = epoch.first[blocks] + np.int32(start)
