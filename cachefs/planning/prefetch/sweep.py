"""A file, or the files of a directory, of which all seems to be wanted: what is known of it, and what may be brought.

A reader that has read a part of it at random reads the rest too, or stops: nothing tells which. So nothing is brought
before WANTED of the area was read, and then all of it within a few reads: a random reader that stops early has had
nothing brought for nothing, and one that reads all of it waits for a third. Reads that lie close together, or go
through files from their beginnings, are evidence of an order. What these bring at first is bounded by a credit.
"""

import math
from dataclasses import dataclass, field
from typing import Final

from cachefs.planning.prefetch.guess_counts import Rule

# Of the bytes that were read, times the part of the area that was read, so many may have been brought and be unread.
GAIN: Final = 5
# The part of an area that was read at random before anything is brought of it.
WANTED: Final = 0.3
# A directory is read for itself where so many times the part was read of it that was read of the set around it.
FOCUS: Final = 2
# Distinct reads that nothing else explains before anything is brought: of blocks of a file, where they are not its
# first two; of large files that were begun so; of files of a directory, or of a quarter of its files where these are
# fewer, but no fewer than the last.
BEGIN_IN_FILE: Final = 4
BEGIN_SHARDS: Final = 2
BEGIN_IN_SET: Final = 16
FEWEST_IN_SET: Final = 6
# Directories in which somebody must have read before all of those that are as deep are taken for one set.
BEGIN_DIRECTORIES: Final = 4
# Reads of a candidate that are kept, at most. Of a set that is read in too few directories there may be millions.
MOST_READS: Final = 256
# Seconds without a read after which nothing more is brought; and after which what was not read was wrong.
ACTIVE_SECONDS: Final = 20.0
IDLE_SECONDS: Final = 600.0
# Readers that go forward in an area; each is known by its last read, and by being so many places further at its next.
_HEADS: Final = 8
_NEAR: Final = 8
# Places of an area, at most: it takes a byte for each.
MOST_PLACES: Final = 1 << 24
# Reads of what was read before, or of what was brought and evicted unread, that may be chance.
_CHANCE: Final = 4

_UNKNOWN, _LOOKED_AT, _READ = range(3)


@dataclass(frozen=True, slots=True)
class Area:
    """Blocks of one file (REST), or entries with consecutive numbers: those of a directory (SHARDS, SET), or all that
    are equally deep below one (SET)."""

    rule: Rule
    snapshot: str
    # REST: the entry of the file. SHARDS, SET: the first entry.
    first: int
    # Places: blocks of the file; entries.
    count: int

    def covers(self, other: "Area") -> bool:
        """Are the files of the *other* directory among these?"""
        if self.rule is not Rule.SET or other.rule is Rule.REST or self.snapshot != other.snapshot or self == other:
            return False
        return self.first <= other.first and other.first + other.count <= self.first + self.count

    @property
    def begins_after(self) -> int:
        """Reads before anything is brought."""
        if self.rule is Rule.REST:
            return BEGIN_IN_FILE
        if self.rule is Rule.SHARDS:
            return BEGIN_SHARDS
        return max(FEWEST_IN_SET, min(BEGIN_IN_SET, self.count // 4))


@dataclass(slots=True, eq=False)
class Candidate:
    """An area of which little was read so far."""

    area: Area
    # Where was read, and bytes of each; and in which directories below the area (of SET, files directly in it count).
    reads: dict[int, int] = field(default_factory=dict)
    # Reads of all areas (see Sweeping) when the first of these was made.
    began: int = 0
    directories: set[int] = field(default_factory=set)

    def note(self, place: int, size: int, directory: int) -> bool:
        """A read at *place* that waited. True where that is enough to begin."""
        if len(self.reads) < MOST_READS:
            self.reads[place] = size
        if len(self.directories) < BEGIN_DIRECTORIES:
            self.directories.add(directory)
        if self.is_from_beginning:
            return True
        enough = BEGIN_DIRECTORIES if self.area.rule is Rule.SET else 1
        return len(self.reads) >= self.area.begins_after and len(self.directories) >= enough

    @property
    def is_in_order(self) -> bool:
        """Do the reads show more than a random reader does: files from their beginnings, or places close together?"""
        if self.is_from_beginning or self.area.rule is Rule.SHARDS:
            return True
        return max(self.reads) - min(self.reads) < 2 * len(self.reads)

    @property
    def is_from_beginning(self) -> bool:
        """Were the first two blocks of a file read, and nothing else?"""
        return self.area.rule is Rule.REST and self.reads.keys() == {0, 1}


class Sweep:
    """An area that is brought as it is read. Sizes are bytes."""

    __slots__ = (
        "_again", "_evicted", "_heads", "_known", "_left", "_looked", "_lost", "_missing", "_read", "_right", "area",
        "in_order", "looking", "read_bytes", "seen", "unread_bytes",
    )  # fmt: skip

    def __init__(self, area: Area, now: float, *, in_order: bool) -> None:
        """now: seconds, as in all calls; in_order: the reads that began it show an order."""
        self.area = area
        self.in_order = in_order
        self.seen = now  # when somebody read of it last
        self.looking = False  # somebody looks what is missing
        self.read_bytes = 0  # of all places that were read
        self.unread_bytes = 0  # of blocks that were brought for what was read here, and were not read yet
        self._heads: list[int] = []  # the places of several readers that were read last, most recent last
        self._known = bytearray(area.count)  # by place
        self._left = area.count  # places of which nothing is known
        self._read = 0  # places that were read
        self._again = 0  # reads that waited at a place that was read before
        self._looked = self._missing = 0  # places that were looked at, and those with something missing
        self._lost = 0  # blocks that could not be brought
        self._evicted = 0  # blocks that were brought, and evicted before they were read
        self._right = 0  # blocks that were brought and read

    def note(self, place: int, size: int, now: float) -> None:
        """A place was read for which *size* bytes had to come."""
        self.seen = now
        self._move_head(place)
        before = self._known[place]
        if before == _READ:
            return
        self._known[place] = _READ
        self._left -= before == _UNKNOWN
        self._read += 1
        self.read_bytes += size

    def waited_again(self, place: int) -> None:
        """Somebody waits at a place: has it been read before, and was evicted?"""
        self._again += self._known[place] == _READ

    def lost(self) -> None:
        """A block could not be brought."""
        self._lost += 1

    def evicted(self) -> None:
        """A block was evicted before it was read."""
        self._evicted += 1

    def right(self) -> None:
        """A block was read that had been brought."""
        self._right += 1

    @property
    def has_failed(self) -> bool:
        """What is brought does not stay."""
        by_chance = max(_CHANCE, self._read // 8)
        return max(self._again, self._lost) > by_chance or self._evicted > max(_CHANCE, self._right // 4)

    @property
    def allowance(self) -> float:
        """Bytes that may be brought now for what was read of the area, if that is wanted."""
        return GAIN * self.share * self.read_bytes - self.unread_bytes

    @property
    def share(self) -> float:
        """The part of the area that was read."""
        return self._read / self.area.count

    def is_wanted(self, around: "Sweep | None") -> bool:
        """Do the reads show that all of the area is wanted? around: the set that has all of it, if that is brought too.

        Where a random reader reads in all of a set, some directory is always ahead of the others by chance.
        """
        if self.in_order:
            return True
        by_chance = around is not None and around.share < WANTED and self.share < FOCUS * around.share
        # Of a small area a random reader is sooner ahead by chance: by a standard deviation of what it reads there.
        enough = WANTED * self.area.count + math.sqrt(self.area.count) / 2
        return self._read >= enough and not by_chance

    @property
    def rest(self) -> float:
        """Bytes that are still to be brought, about: what is missing where nobody has looked is as in what was looked
        at."""
        mean = self.read_bytes / max(1, self._read)
        return self._left * mean * (self._missing + 1) / (self._looked + 1)

    def next_places(self, most: int) -> list[int]:
        """Up to *most* places of which nothing is known: those after the last reads, in turns."""
        heads = self._heads[::-1] or [0]
        found: dict[int, None] = {}
        share = max(1, most // len(heads))
        for head in heads:
            found.update(dict.fromkeys(self._after(head, min(share, most - len(found)))))
        return list(found)

    def _after(self, head: int, most: int) -> list[int]:
        """Up to *most* of them after *head*, and then from the beginning."""
        found: list[int] = []
        for first, end in ((head, self.area.count), (0, head)):
            place = first
            while len(found) < most and (place := self._known.find(_UNKNOWN, place, end)) >= 0:
                found.append(place)
                place += 1
        return found

    def _move_head(self, place: int) -> None:
        for number, head in enumerate(self._heads):
            if 0 <= place - head <= _NEAR:
                del self._heads[number]
                break
        self._heads.append(place)
        del self._heads[:-_HEADS]

    def looked_at(self, place: int, *, missing: bool) -> None:
        """It is known what is missing there, and that is brought."""
        self._looked += 1
        self._missing += missing
        if self._known[place] == _UNKNOWN:
            self._known[place] = _LOOKED_AT
            self._left -= 1

    def forget(self, place: int) -> None:
        """It could not be brought."""
        if self._known[place] == _LOOKED_AT:
            self._known[place] = _UNKNOWN
            self._left += 1
