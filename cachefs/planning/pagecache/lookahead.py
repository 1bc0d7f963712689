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
from cachefs.planning.sequences.course import Window
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.tripwires import are_tripwires

# Reads of the first window. Each window is twice as long as the one before, up to the longest.
_LOOK: Final = 1024
_LONGEST_LOOK: Final = 1 << 15
# Most reads of one consumer that one call examines: 1 ms.
_MOST_LOOKS: Final = 1 << 16
# Least tripwires ahead of a consumer, if necessary by dropping pages: those of half a second. A report takes up to 0.12
# s, and an order as long on a busy machine. For a consumer that has passed all of them unseen, more are set further
# ahead.
_ARMED: Final = 12
# Most additional tripwires ahead of a silent consumer: reads of 3 minutes, in 0.4 ms. All tripwires of two epochs of
# 1.3 million reads took up to 2 s, 20 times a second, for a job that did nothing.
_MOST_SEARCHED: Final = 1 << 12


@dataclass(frozen=True, slots=True)
class Reader:
    """A consumer, with its parameters for pushing."""

    key: str  # its name in the plan
    snapshot: str  # the one that it reads
    skip: int  # reads from its place in the plan on that come too soon for their pages to be pushed
    searched: int  # reads from its place in the plan on within which its real position is
    every: int  # reads from one tripwire to the next; 0 where it reports its own position


@dataclass(frozen=True, slots=True)
class Due:
    """Blocks of one snapshot in the order of their reads."""

    snapshot: str
    ids: Ids  # shape (n,), dtype int32
    seconds: npt.NDArray[np.float64]  # seconds until each is read, shape (n,)


@dataclass(frozen=True, slots=True)
class Room:
    """Limits for a choice of blocks."""

    count: int  # blocks
    size: int  # bytes of all of them
    largest: int  # bytes of a single one, which may exceed `size`


def all_tripwires(plan: Plan, readers: Sequence[Reader]) -> dict[str, npt.NDArray[np.bool_]]:
    """Return by snapshot whether each block is a tripwire of some reader in its current epoch or the next: shape
    (blocks of the space,), bool. Takes 1 ms per million reads."""
    found: dict[str, npt.NDArray[np.bool_]] = {}
    for reader in readers:
        tripwires = found.setdefault(reader.snapshot, np.zeros(plan.spaces[reader.snapshot].count, np.bool_))
        current, _ = plan.place(reader.key)
        for number in (current, current + 1):
            epoch = plan.epoch(reader.key, number)
            if epoch is not None and reader.every:
                tripwires[epoch.blocks[reader.every - 1 :: reader.every]] = True
    return found


class PushLookahead:
    """Finds blocks to push. Remembers its position in each sequence, as cachefs.planning.prefetch.lookahead does, so
    that each read is examined once."""

    def __init__(self, plan: Plan) -> None:
        # By snapshot, blocks that must not be pushed: shape (n,), int32, in ascending order.
        self.barred: dict[str, Ids] = {}
        self._plan = plan
        # By consumer: its generation in the plan, and the read up to which it was examined.
        self._looked: dict[str, tuple[tuple[str, int], int]] = {}

    def rewind(self) -> None:
        """Restart from the consumers' positions: blocks may have come to the node, or their pages may be gone."""
        self._looked.clear()

    def take(self, readers: Sequence[Reader], pages: PageStates, presence: TierStates, room: Room) -> Due | None:
        """Return blocks of one snapshot that are on the node and not in the page cache, as many as fit into *room*,
        soonest read first. Assumes that the caller has all of them pushed.

        pages: states of blocks in the page cache; presence: states of blocks on the node.
        """
        count = room.count
        before = dict(self._looked)
        found = self._find(readers, pages, presence, count)
        due = self._merge(found, count)
        if due is None:
            return None
        ends = np.cumsum(self._plan.spaces[due.snapshot].sizes[due.ids], dtype=np.int64)
        fitting = int(np.searchsorted(ends, room.size, side="right")) or int(ends[0] <= room.largest)
        if fitting < sum(len(one.ids) for one in found):
            self._looked = before  # some must be found again
        return Due(due.snapshot, due.ids[:fitting], due.seconds[:fitting]) if fitting else None

    def peek(self, readers: Sequence[Reader], pages: PageStates, presence: TierStates, count: int) -> Due | None:
        """Return the blocks that `take` would return with enough room."""
        before = dict(self._looked)
        due = self._merge(self._find(readers, pages, presence, count), count)
        self._looked = before
        return due

    def soon(self, reader: Reader, seconds: float, *, every: int = 0) -> Due:
        """Return the blocks that *reader* reads within *seconds* seconds, in order. every: leave out its tripwires at
        this distance. Examines at most _MOST_LOOKS reads, which takes 1 ms."""
        ids = [np.zeros(0, np.int32)]
        due = [np.zeros(0, np.float64)]
        seen = 0
        for first, window in self._windows(reader, 0, _LOOK):
            count = min(len(window.blocks), max(0, math.ceil((seconds - window.seconds) / window.period)))
            places = np.flatnonzero(~are_tripwires(np.arange(first, first + count), every))
            ids.append(window.blocks[places])
            due.append(np.asarray(window.seconds + window.period * places, np.float64))
            seen += count
            if count < len(window.blocks) or seen >= _MOST_LOOKS:
                break
        return Due(reader.snapshot, np.concatenate(ids), np.concatenate(due))

    def tripwires(self, readers: Sequence[Reader]) -> dict[str, Ids]:
        """Return by snapshot the blocks of the next few tripwires of its readers: shape (n,), int32, in ascending
        order. Their pages must not be in the page cache, even if other consumers read them."""
        found: dict[str, list[Ids]] = {}
        for reader in readers:
            found.setdefault(reader.snapshot, []).extend(self._tripwires_of(reader))
        return {snapshot: distinct(np.concatenate(blocks)) for snapshot, blocks in found.items() if blocks}

    def _tripwires_of(self, reader: Reader) -> Iterator[Ids]:
        every = reader.every
        look = (1 + _ARMED) * every + min(reader.searched, _MOST_SEARCHED * every)
        now = 1  # the read at the current position: its request may be on the way
        for first, window in self._windows(reader, 0, look) if every else ():
            nearest = ((first + now) | (every - 1)) - first
            yield window.blocks[nearest:look:every]
            look -= len(window.blocks)
            if look <= 0:
                break
            now = 0

    def _find(self, readers: Sequence[Reader], pages: PageStates, presence: TierStates, count: int) -> list[Due]:
        found = (self._look(reader, pages, presence, count) for reader in readers)
        return [due for due in found if due is not None]

    @staticmethod
    def _merge(found: Sequence[Due], count: int) -> Due | None:
        """Return the soonest reads of the snapshot that is read soonest, each block once."""
        if not found:
            return None
        snapshot = min(found, key=lambda due: float(due.seconds[0])).snapshot
        ids = np.concatenate([due.ids for due in found if due.snapshot == snapshot])
        seconds = np.concatenate([due.seconds for due in found if due.snapshot == snapshot])
        order = np.argsort(seconds, kind="stable")
        _, first = np.unique(ids[order], return_index=True)
        order = order[np.sort(first)][:count]
        return Due(snapshot, ids[order], seconds[order])

    def _look(self, reader: Reader, pages: PageStates, presence: TierStates, count: int) -> Due | None:
        snapshot, generation = reader.snapshot, self._plan.generation(reader.key)
        states, here = pages.get(snapshot), presence.get(snapshot)
        if states is None or here is None:
            return None
        before = self._looked.get(reader.key)
        start = before[1] if before is not None and before[0] == generation else 0
        barred = self.barred.get(snapshot)
        ids: list[Ids] = []
        seconds: list[npt.NDArray[np.float64]] = []
        found = seen = 0
        for first, window in self._windows(reader, start, _LOOK):
            blocks = window.blocks
            places = np.flatnonzero(WANTED[states[blocks]] & (here[blocks] != ABSENT))
            if len(places):
                places = places[~are_tripwires(first + places, reader.every)]
            if barred is not None and len(barred) and len(places):
                # Four times as fast as np.isin, which took an eighth of the daemon's time.
                nearest = np.searchsorted(barred[:-1], blocks[places])
                places = places[barred[nearest] != blocks[places]]
            ended = found + len(places) >= count
            if len(places):
                places = places[: count - found]
                ids.append(blocks[places])
                seconds.append(np.asarray(window.seconds + window.period * places, np.float64))
            found += len(places)
            seen += len(blocks)
            start = window.start + (int(places[-1]) + 1 if ended and len(places) else len(blocks))
            if ended or seen >= _MOST_LOOKS:
                break
        self._looked[reader.key] = (generation, start)
        return Due(snapshot, np.concatenate(ids), np.concatenate(seconds)) if found else None

    def _windows(self, reader: Reader, start: int, look: int) -> Iterator[tuple[int, Window]]:
        """Yield the reader's future from read *start* on, without the reads that it may be at now. Each window comes
        with the number of its first read, counted from the start of the epoch."""
        now = self._plan.window(reader.key, 0, 1)
        if now is None:
            return
        current, position = self._plan.place(reader.key)
        epoch = self._plan.epoch(reader.key, current)
        length = len(epoch.blocks) if epoch is not None else 0
        # Where the current epoch is unknown or over, the first known read is one of the next.
        origin = now.start - position if position < length else now.start - length
        start = max(start, now.start + reader.skip)
        while (window := self._plan.window(reader.key, start, look)) is not None:
            first = window.start - origin
            yield first - (length if first >= length else 0), window
            start = window.start + len(window.blocks)
            look = min(2 * look, max(look, _LONGEST_LOOK))
