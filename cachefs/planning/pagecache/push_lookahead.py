"""Finds the blocks whose pages to push next, soonest first, and the tripwires whose pages to drop. Works on arrays."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.presence import ABSENT, TierStates
from cachefs.planning.blocks.space import Ids, distinct
from cachefs.planning.pagecache.states import WANTED, PageStates
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.timeline import ReadWindow
from cachefs.planning.sequences.tripwires import are_tripwires

# Reads of the first window. Each window is twice as long as the one before, up to the longest.
_FIRST_WINDOW: Final = 1024
_MAX_WINDOW: Final = 1 << 15
# Most reads of one consumer that one call examines: 1 ms.
_MAX_EXAMINED: Final = 1 << 16
# Least tripwires ahead of a consumer, if necessary by dropping pages: those of half a second. A report takes up to 0.12
# s, and an order as long on a busy machine. For a consumer that has passed all of them unseen, more are set further
# ahead.
_MIN_TRIPWIRES_AHEAD: Final = 12
# Most additional tripwires ahead of a silent consumer: reads of 3 minutes, in 0.4 ms. All tripwires of two epochs of
# 1.3 million reads took up to 2 s, 20 times a second, for a job that did nothing.
_MAX_SEARCHED_TRIPWIRES: Final = 1 << 12


@dataclass(frozen=True, slots=True)
class PushReader:
    """A consumer, with its parameters for pushing."""

    key: str  # its name in the plan
    snapshot: str  # the one that it reads
    skipped_reads: int  # reads from its place in the plan on that come too soon for their pages to be pushed
    searched_reads: int  # reads from its place in the plan on within which its real position is
    tripwire_interval: int  # reads from one tripwire to the next; 0 where it reports its own position


@dataclass(frozen=True, slots=True)
class DueBlocks:
    """Blocks of one snapshot in the order of their reads."""

    snapshot: str
    ids: Ids  # shape (n,), dtype int32
    seconds: npt.NDArray[np.float64]  # seconds until each is read, shape (n,)


@dataclass(frozen=True, slots=True)
class PushLimits:
    """Limits for a choice of blocks."""

    max_blocks: int  # blocks
    max_bytes: int  # bytes of all of them
    max_block_bytes: int  # bytes of a single one, which may exceed `max_bytes`


def all_tripwires(plan: Plan, readers: Sequence[PushReader]) -> dict[str, npt.NDArray[np.bool_]]:
    """Return by snapshot whether each block is a tripwire of some reader in its current epoch or the next: shape
    (blocks of the space,), bool. Takes 1 ms per million reads."""
    found: dict[str, npt.NDArray[np.bool_]] = {}
    for reader in readers:
        tripwires = found.setdefault(reader.snapshot, np.zeros(plan.spaces[reader.snapshot].count, np.bool_))
        current, _ = plan.progress(reader.key)
        for number in (current, current + 1):
            epoch = plan.epoch(reader.key, number)
            if epoch is not None and reader.tripwire_interval:
                tripwires[epoch.blocks[reader.tripwire_interval - 1 :: reader.tripwire_interval]] = True
    return found


class PushLookahead:
    """Finds blocks to push. Remembers its position in each sequence, as cachefs.planning.prefetch.lookahead does, so
    that each read is examined once."""

    def __init__(self, plan: Plan) -> None:
        # By snapshot, blocks that must not be pushed: shape (n,), int32, in ascending order.
        self.barred: dict[str, Ids] = {}
        self._plan = plan
        # By consumer: its generation in the plan, and the read up to which it was examined.
        self._examined: dict[str, tuple[tuple[str, int], int]] = {}

    def rewind(self) -> None:
        """Restart from the consumers' positions: blocks may have come to the node, or their pages may be gone."""
        self._examined.clear()

    def take_blocks(
        self, readers: Sequence[PushReader], pages: PageStates, presence: TierStates, limits: PushLimits
    ) -> DueBlocks | None:
        """Return blocks of one snapshot that are on the node and not in the page cache, as many as fit into *limits*,
        soonest read first. Assumes that the caller has all of them pushed.

        pages: states of blocks in the page cache; presence: states of blocks on the node.
        """
        count = limits.max_blocks
        before = dict(self._examined)
        found = self._find_due(readers, pages, presence, count)
        due = self._merge_due(found, count)
        if due is None:
            return None
        ends = np.cumsum(self._plan.spaces[due.snapshot].sizes[due.ids], dtype=np.int64)
        fitting = int(np.searchsorted(ends, limits.max_bytes, side="right")) or int(ends[0] <= limits.max_block_bytes)
        if fitting < sum(len(one.ids) for one in found):
            self._examined = before  # some must be found again
        return DueBlocks(due.snapshot, due.ids[:fitting], due.seconds[:fitting]) if fitting else None

    def peek_blocks(
        self, readers: Sequence[PushReader], pages: PageStates, presence: TierStates, count: int
    ) -> DueBlocks | None:
        """Return the blocks that `take_blocks` would return with enough room."""
        before = dict(self._examined)
        due = self._merge_due(self._find_due(readers, pages, presence, count), count)
        self._examined = before
        return due

    def blocks_within(self, reader: PushReader, seconds: float, *, tripwire_interval: int = 0) -> DueBlocks:
        """Return the blocks that *reader* reads within *seconds* seconds, in order. tripwire_interval: leave out its
        tripwires at this distance. Examines at most _MAX_EXAMINED reads, which takes 1 ms."""
        ids = [np.zeros(0, np.int32)]
        due = [np.zeros(0, np.float64)]
        seen = 0
        for first, window in self._windows(reader, 0, _FIRST_WINDOW):
            count = min(len(window.blocks), max(0, math.ceil((seconds - window.seconds) / window.period)))
            indices = np.flatnonzero(~are_tripwires(np.arange(first, first + count), tripwire_interval))
            ids.append(window.blocks[indices])
            due.append(np.asarray(window.seconds + window.period * indices, np.float64))
            seen += count
            if count < len(window.blocks) or seen >= _MAX_EXAMINED:
                break
        return DueBlocks(reader.snapshot, np.concatenate(ids), np.concatenate(due))

    def next_tripwires(self, readers: Sequence[PushReader]) -> dict[str, Ids]:
        """Return by snapshot the blocks of the next few tripwires of its readers: shape (n,), int32, in ascending
        order. Their pages must not be in the page cache, even if other consumers read them."""
        found: dict[str, list[Ids]] = {}
        for reader in readers:
            found.setdefault(reader.snapshot, []).extend(self._tripwires_of(reader))
        return {snapshot: distinct(np.concatenate(blocks)) for snapshot, blocks in found.items() if blocks}

    def _tripwires_of(self, reader: PushReader) -> Iterator[Ids]:
        every = reader.tripwire_interval
        look = (1 + _MIN_TRIPWIRES_AHEAD) * every + min(reader.searched_reads, _MAX_SEARCHED_TRIPWIRES * every)
        now = 1  # the read at the current position: its request may be on the way
        for first, window in self._windows(reader, 0, look) if every else ():
            nearest = ((first + now) | (every - 1)) - first
            yield window.blocks[nearest:look:every]
            look -= len(window.blocks)
            if look <= 0:
                break
            now = 0

    def _find_due(
        self, readers: Sequence[PushReader], pages: PageStates, presence: TierStates, count: int
    ) -> list[DueBlocks]:
        found = (self._examine(reader, pages, presence, count) for reader in readers)
        return [due for due in found if due is not None]

    @staticmethod
    def _merge_due(found: Sequence[DueBlocks], count: int) -> DueBlocks | None:
        """Return the soonest reads of the snapshot that is read soonest, each block once."""
        if not found:
            return None
        snapshot = min(found, key=lambda due: float(due.seconds[0])).snapshot
        ids = np.concatenate([due.ids for due in found if due.snapshot == snapshot])
        seconds = np.concatenate([due.seconds for due in found if due.snapshot == snapshot])
        order = np.argsort(seconds, kind="stable")
        _, first = np.unique(ids[order], return_index=True)
        order = order[np.sort(first)][:count]
        return DueBlocks(snapshot, ids[order], seconds[order])

    def _examine(self, reader: PushReader, pages: PageStates, presence: TierStates, count: int) -> DueBlocks | None:
        snapshot, generation = reader.snapshot, self._plan.generation(reader.key)
        states, here = pages.get(snapshot), presence.get(snapshot)
        if states is None or here is None:
            return None
        before = self._examined.get(reader.key)
        start = before[1] if before is not None and before[0] == generation else 0
        barred = self.barred.get(snapshot)
        ids: list[Ids] = []
        seconds: list[npt.NDArray[np.float64]] = []
        found = seen = 0
        for first, window in self._windows(reader, start, _FIRST_WINDOW):
            blocks = window.blocks
            indices = np.flatnonzero(WANTED[states[blocks]] & (here[blocks] != ABSENT))
            if len(indices):
                indices = indices[~are_tripwires(first + indices, reader.tripwire_interval)]
            if barred is not None and len(barred) and len(indices):
                # Four times as fast as np.isin, which took an eighth of the daemon's time.
                nearest = np.searchsorted(barred[:-1], blocks[indices])
                indices = indices[barred[nearest] != blocks[indices]]
            ended = found + len(indices) >= count
            if len(indices):
                indices = indices[: count - found]
                ids.append(blocks[indices])
                seconds.append(np.asarray(window.seconds + window.period * indices, np.float64))
            found += len(indices)
            seen += len(blocks)
            start = window.start + (int(indices[-1]) + 1 if ended and len(indices) else len(blocks))
            if ended or seen >= _MAX_EXAMINED:
                break
        self._examined[reader.key] = (generation, start)
        return DueBlocks(snapshot, np.concatenate(ids), np.concatenate(seconds)) if found else None

    def _windows(self, reader: PushReader, start: int, look: int) -> Iterator[tuple[int, ReadWindow]]:
        """Yield the reader's future from read *start* on, without the reads that it may be at now. Each window comes
        with the number of its first read, counted from the start of the epoch."""
        now = self._plan.window(reader.key, 0, 1)
        if now is None:
            return
        current, position = self._plan.progress(reader.key)
        epoch = self._plan.epoch(reader.key, current)
        length = len(epoch.blocks) if epoch is not None else 0
        # Where the current epoch is unknown or over, the first known read is one of the next.
        origin = now.start - position if position < length else now.start - length
        start = max(start, now.start + reader.skipped_reads)
        while (window := self._plan.window(reader.key, start, look)) is not None:
            first = window.start - origin
            yield first - (length if first >= length else 0), window
            start = window.start + len(window.blocks)
            look = min(2 * look, max(look, _MAX_WINDOW))
