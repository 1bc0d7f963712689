"""Readahead in areas: a file, or the files of a directory, that seem to be wanted as a whole.

A reader that has read a part of an area at random may read the rest or stop; nothing tells which. Nothing is therefore
fetched before WANTED_SHARE of the area was read, and then all of it within a few reads: for a random reader that stops
early no byte was wasted, and one that reads all of it waits for a third. Reads that lie close together, or go through
files from their beginnings, are evidence of an order. A credit bounds what is fetched for these at first.
"""

import math
from dataclasses import dataclass, field
from typing import Final

from cachefs.planning.prefetch.readahead_budget import ReadaheadRule

# Factor on the read bytes, times the part of the area that was read: most bytes that may be fetched and unread.
READAHEAD_FACTOR: Final = 5
# Part of an area that must be read at random before any of it is fetched.
WANTED_SHARE: Final = 0.3
# A directory counts as read for itself where its read part is this many times that of the set around it.
FOCUS_FACTOR: Final = 2
# Distinct unexplained reads before any fetch: of blocks of a file, other than its first two; of large files begun with
# these two; of files of a directory, or of a quarter of its files where these are fewer, but at least
# MIN_READS_IN_SMALL_SET.
MIN_READS_IN_FILE: Final = 4
MIN_SHARDS: Final = 2
MIN_READS_IN_SET: Final = 16
MIN_READS_IN_SMALL_SET: Final = 6
# Directories with reads before all directories of the same depth count as one set.
MIN_DIRECTORIES: Final = 4
# Most reads of a candidate that are kept. A set that is read in too few directories may have millions.
MAX_READS: Final = 256
# Seconds without a read after which no more is fetched; and after which unread guesses count as wrong.
ACTIVE_SECONDS: Final = 20.0
IDLE_SECONDS: Final = 600.0
# Most readers of an area that are followed; a read up to _NEAR_POSITIONS positions after a reader's last one is taken
# as its next.
_MAX_HEADS: Final = 8
_NEAR_POSITIONS: Final = 8
# Most places of an area, which takes a byte for each.
MAX_POSITIONS: Final = 1 << 24
# Repeated reads, or guesses evicted unread, that may be chance.
_CHANCE_READS: Final = 4

_UNKNOWN, _EXAMINED, _READ = range(3)


@dataclass(frozen=True, slots=True)
class Area:
    """Blocks of one file (REST), or entries with consecutive numbers: those of a directory (SHARDS, SET), or all of
    equal depth below one (SET)."""

    rule: ReadaheadRule
    snapshot: str
    # REST: the entry of the file. SHARDS, SET: the first entry.
    first: int
    # Number of places: blocks of the file; entries.
    count: int

    def is_covering(self, other: "Area") -> bool:
        """Return whether the files of the *other* directory are among these."""
        if (
            self.rule is not ReadaheadRule.SET
            or other.rule is ReadaheadRule.REST
            or self.snapshot != other.snapshot
            or self == other
        ):
            return False
        return self.first <= other.first and other.first + other.count <= self.first + self.count

    @property
    def reads_to_begin(self) -> int:
        """Reads before any fetch."""
        if self.rule is ReadaheadRule.REST:
            return MIN_READS_IN_FILE
        if self.rule is ReadaheadRule.SHARDS:
            return MIN_SHARDS
        return max(MIN_READS_IN_SMALL_SET, min(MIN_READS_IN_SET, self.count // 4))


@dataclass(slots=True, eq=False)
class CandidateArea:
    """An area of which little was read so far."""

    area: Area
    # Place of each read -> its bytes.
    reads: dict[int, int] = field(default_factory=dict)
    # Reads of all areas (see AreaReadahead) at the first of these reads.
    reads_at_start: int = 0
    # Directories below the area that were read (in a SET, files directly in the area count as directories).
    directories: set[int] = field(default_factory=set)

    def note_read(self, position: int, size: int, directory: int) -> bool:
        """Record a read at *position* that waited. Returns whether the reads suffice to begin."""
        if len(self.reads) < MAX_READS:
            self.reads[position] = size
        if len(self.directories) < MIN_DIRECTORIES:
            self.directories.add(directory)
        if self.is_from_beginning:
            return True
        enough = MIN_DIRECTORIES if self.area.rule is ReadaheadRule.SET else 1
        return len(self.reads) >= self.area.reads_to_begin and len(self.directories) >= enough

    @property
    def is_in_order(self) -> bool:
        """True where the reads show an order that random reads do not: files from their beginnings, or close places."""
        if self.is_from_beginning or self.area.rule is ReadaheadRule.SHARDS:
            return True
        return max(self.reads) - min(self.reads) < 2 * len(self.reads)

    @property
    def is_from_beginning(self) -> bool:
        """True where exactly the first two blocks of a file were read."""
        return self.area.rule is ReadaheadRule.REST and self.reads.keys() == {0, 1}


class ActiveArea:
    """An area that is fetched while it is read. Sizes are bytes."""

    __slots__ = (
        "_evicted_blocks",
        "_examined_positions",
        "_failed_blocks",
        "_heads",
        "_missing_positions",
        "_read_positions",
        "_repeated_waits",
        "_right_blocks",
        "_states",
        "_unexamined",
        "area",
        "is_in_order",
        "is_searching",
        "last_read_at",
        "read_bytes",
        "unread_bytes",
    )  # fmt: skip

    def __init__(self, area: Area, now: float, *, is_in_order: bool) -> None:
        """now: seconds, as in all calls; is_in_order: whether the reads that began the sweep show an order."""
        self.area = area
        self.is_in_order = is_in_order
        self.last_read_at = now  # time of the last read
        self.is_searching = False  # whether a search for missing blocks is under way
        self.read_bytes = 0  # of all places that were read
        self.unread_bytes = 0  # of unread blocks that were fetched on the area's allowance
        self._heads: list[int] = []  # last read place of each reader, most recent last
        self._states = bytearray(area.count)  # state by place
        self._unexamined = area.count  # places in the state _UNKNOWN
        self._read_positions = 0  # places that were read
        self._repeated_waits = 0  # reads that waited at a place that was read before
        self._examined_positions = self._missing_positions = (
            0  # places that were examined, and those with missing blocks
        )
        self._failed_blocks = 0  # blocks that could not be fetched
        self._evicted_blocks = 0  # blocks that were fetched, and evicted unread
        self._right_blocks = 0  # blocks that were fetched and read

    def note_read(self, position: int, size: int, now: float) -> None:
        """Record a read of a place for which *size* bytes had to be fetched."""
        self.last_read_at = now
        self._move_head(position)
        before = self._states[position]
        if before == _READ:
            return
        self._states[position] = _READ
        self._unexamined -= before == _UNKNOWN
        self._read_positions += 1
        self.read_bytes += size

    def note_repeated_wait(self, position: int) -> None:
        """Record that a reader waits at a place; counts only where the place was read before, and so was evicted."""
        self._repeated_waits += self._states[position] == _READ

    def note_failed(self) -> None:
        """Record that a block could not be fetched."""
        self._failed_blocks += 1

    def note_evicted(self) -> None:
        """Record that a block was evicted unread."""
        self._evicted_blocks += 1

    def note_right(self) -> None:
        """Record a read of a block that had been fetched."""
        self._right_blocks += 1

    @property
    def has_failed(self) -> bool:
        """True where fetched blocks do not stay on the node."""
        by_chance = max(_CHANCE_READS, self._read_positions // 8)
        return max(self._repeated_waits, self._failed_blocks) > by_chance or self._evicted_blocks > max(
            _CHANCE_READS, self._right_blocks // 4
        )

    @property
    def allowance(self) -> float:
        """Bytes that may be fetched now for the area's reads, if the area is wanted."""
        return READAHEAD_FACTOR * self.share * self.read_bytes - self.unread_bytes

    @property
    def share(self) -> float:
        """The part of the area that was read."""
        return self._read_positions / self.area.count

    def is_wanted(self, around: "ActiveArea | None") -> bool:
        """Return whether the reads show that all of the area is wanted. around: a sweep of a set that contains the
        area.

        Where a random reader reads in all of a set, some directory is always ahead of the others by chance.
        """
        if self.is_in_order:
            return True
        by_chance = around is not None and around.share < WANTED_SHARE and self.share < FOCUS_FACTOR * around.share
        # A small area is ahead by chance sooner: by a standard deviation of its random reads.
        enough = WANTED_SHARE * self.area.count + math.sqrt(self.area.count) / 2
        return self._read_positions >= enough and not by_chance

    @property
    def remaining_bytes(self) -> float:
        """Estimated bytes still to be fetched: unexamined places are assumed to miss as many blocks as examined
        ones."""
        mean = self.read_bytes / max(1, self._read_positions)
        return self._unexamined * mean * (self._missing_positions + 1) / (self._examined_positions + 1)

    def next_positions(self, most: int) -> list[int]:
        """Return up to *most* unexamined places: those after the last reads, in turns."""
        heads = self._heads[::-1] or [0]
        found: dict[int, None] = {}
        share = max(1, most // len(heads))
        for head in heads:
            found.update(dict.fromkeys(self._unexamined_after(head, min(share, most - len(found)))))
        return list(found)

    def _unexamined_after(self, head: int, most: int) -> list[int]:
        """Return up to *most* unexamined places after *head*, and then from the beginning."""
        found: list[int] = []
        for first, end in ((head, self.area.count), (0, head)):
            position = first
            while len(found) < most and (position := self._states.find(_UNKNOWN, position, end)) >= 0:
                found.append(position)
                position += 1
        return found

    def _move_head(self, position: int) -> None:
        for number, head in enumerate(self._heads):
            if 0 <= position - head <= _NEAR_POSITIONS:
                del self._heads[number]
                break
        self._heads.append(position)
        del self._heads[:-_MAX_HEADS]

    def note_examined(self, position: int, *, is_missing: bool) -> None:
        """Record that a place was examined; its missing blocks are being fetched."""
        self._examined_positions += 1
        self._missing_positions += is_missing
        if self._states[position] == _UNKNOWN:
            self._states[position] = _EXAMINED
            self._unexamined -= 1

    def forget_position(self, position: int) -> None:
        """Mark a place as unexamined again, since its blocks could not be fetched."""
        if self._states[position] == _EXAMINED:
            self._states[position] = _UNKNOWN
            self._unexamined += 1
