"""Guessing what is read without an order that is known: the rest of a file, the next shards, and all files of a
directory (see `Sweep`).

Reads that wait, and that nothing else explains, are evidence. They are looked up in batches, by somebody who has the
listing: in which areas they are. What an area still lacks is brought a little at a time, behind everything else.

It costs a dictionary entry per read that waits, and 300 bytes for each block that was brought and is not read yet.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cachefs.planning.prefetch.credit import Credit
from cachefs.planning.prefetch.guess_counts import GuessBook, Rule
from cachefs.planning.prefetch.streams import Name
from cachefs.planning.prefetch.sweep import ACTIVE_SECONDS, IDLE_SECONDS, MOST_PLACES, Area, Candidate, Sweep

# Bytes that may be brought of a snapshot for reads in order and not be read, before any were.
START: Final = 32 << 20
# Reads that wait to be looked up; areas of which little was read; areas that are brought, and places of all of these;
# blocks that were brought and not read.
MOST_MISSED: Final = 1024
MOST_CANDIDATES: Final = 1024
MOST_SWEEPS: Final = 32
MOST_PLACES_OF_ALL: Final = 1 << 25
MOST_UNREAD: Final = 1 << 17
_MOST_SNAPSHOTS: Final = 256
# Several readers that wait for a block within so many seconds wait for the same fetch of it.
AWAITED_SECONDS: Final = 2.0
# Where a set of directories is brought as a whole, one of them begins by itself only if so many times the reads that it
# takes came to it among as many of all: somebody goes from directory to directory.
_APART: Final = 8
_ORDER: Final = {Rule.REST: 0, Rule.SHARDS: 1, Rule.SET: 2}
# Places that one search looks at.
PLACES_LOOKED_AT: Final = 64
# Of one file, so many blocks are brought at most; of a larger one somebody must have read a part.
MOST_BLOCKS_OF_FILE: Final = 16


@dataclass(frozen=True, slots=True)
class Place:
    """Where in an area a block is."""

    area: Area
    place: int
    # SHARDS, SET: the directory below the area in which it is, or the entry itself where it is in none.
    directory: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A block that somebody waited for, and the areas that it is in: first its file, where that has several blocks."""

    name: Name
    # Bytes of the block, and of the file.
    size: int
    file_size: int
    places: Sequence[Place]


@dataclass(frozen=True, slots=True, eq=False)
class AreaSearch:
    """What of these places of an area is not on the node?"""

    sweep: Sweep
    places: Sequence[int]
    # Find no more bytes than this, but for the last file.
    size: int


@dataclass(frozen=True, slots=True)
class Lacking:
    """A block that is not on the node."""

    place: int
    entry: int
    number: int
    key: bytes
    size: int


@dataclass(frozen=True, slots=True)
class AreaFound:
    """What a search has found: how many of the places were looked at, and what is missing there."""

    looked: int
    missing: Sequence[Lacking]


@dataclass(slots=True, eq=False)
class Swept:
    """A block that is brought since its area is read."""

    sweep: Sweep
    name: Name
    key: bytes
    size: int
    place: int
    # It counts for the snapshot's credit, not for the area's allowance.
    on_credit: bool
    landed: bool = False


class Sweeping:
    """Decides what is brought of areas. Times are monotonic seconds."""

    def __init__(self, book: GuessBook) -> None:
        self._book = book
        self._awaited: OrderedDict[Name, float] = OrderedDict()  # when blocks were waited for, least recent first
        self._missed: list[tuple[Name, int]] = []  # blocks that were waited for and are not placed yet; their sizes
        self._candidates: OrderedDict[Area, Candidate] = OrderedDict()  # least recent first
        self._sweeps: OrderedDict[Area, Sweep] = OrderedDict()  # least recent first
        self._places = 0  # of all sweeps
        self._unread: dict[bytes, Swept] = {}  # by key
        self._of: dict[Sweep, dict[bytes, Swept]] = {}  # the same, by sweep: those that have any
        self._reads = 0  # that waited, or were of what was brought
        self._credits: OrderedDict[str, Credit] = OrderedDict()  # by snapshot, least recent first

    @property
    def sweeps(self) -> int:
        """How many areas are brought."""
        return len(self._sweeps)

    @property
    def unread(self) -> int:
        """Blocks that were brought and not read yet."""
        return len(self._unread)

    # --- what is read ---------------------------------------------------------------------------------------------

    def missed(self, name: Name, size: int, key: bytes, now: float) -> bool:
        """A reader waits for a block of *size* bytes that no stream explains. True where there is something to do."""
        if self._is_awaited(name, now):
            return False
        self._reads += 1
        self._credit(name[0]).demanded(size)
        swept = self._unread.get(key)
        if swept is not None and not swept.landed:
            self._read(swept, now)  # a guess, but late
            return True
        if swept is not None:
            swept.sweep.evicted()
            self._wrong(swept)
        if len(self._missed) < MOST_MISSED:
            self._missed.append((name, size))
        return True

    def _is_awaited(self, name: Name, now: float) -> bool:
        """Does another reader wait for this block already, as the ranks of a job that read the same file do?"""
        since = self._awaited.get(name, -AWAITED_SECONDS)
        self._awaited[name] = now
        self._awaited.move_to_end(name)
        if len(self._awaited) > MOST_MISSED:
            self._awaited.popitem(last=False)
        return now < since + AWAITED_SECONDS

    def seen(self, keys: Iterable[bytes], now: float) -> bool:
        """Blocks with these keys were read. True where some of them were brought."""
        if not self._unread:
            return False
        found = [swept for swept in map(self._unread.get, keys) if swept is not None]
        for swept in found:
            if swept.key in self._unread:
                self._read(swept, now)
        return bool(found)

    def take_missed(self) -> list[tuple[Name, int]]:
        """Blocks that are to be placed, with their sizes."""
        missed, self._missed = self._missed, []
        return missed

    def placed(self, reads: Iterable[Placed], now: float) -> None:
        """It was found out in which areas blocks are that were waited for."""
        for read in reads:
            has_begun = False
            for place in read.places:
                if place.area.rule is Rule.REST:
                    has_begun = self._note(place, read.size, now)
                elif self._tells(read, place.area, has_begun=has_begun):
                    self._note(place, read.file_size, now)

    def _tells(self, read: Placed, area: Area, *, has_begun: bool) -> bool:
        """Is a block that was waited for evidence that files of an area are wanted?"""
        if area in self._sweeps or area.rule is Rule.SET:
            return read.name[2] == 0
        return has_begun

    def _note(self, place: Place, size: int, now: float) -> bool:
        """True where somebody has begun to read a large file."""
        sweep = self._sweeps.get(place.area)
        if sweep is not None:
            sweep.waited_again(place.place)
            sweep.note(place.place, size, now)
            self._sweeps.move_to_end(place.area)
            return False
        if place.area.count > MOST_PLACES:
            return False
        candidate = self._candidates.get(place.area)
        if candidate is None:
            candidate = self._candidates[place.area] = Candidate(place.area, began=self._reads)
            if len(self._candidates) > MOST_CANDIDATES:
                self._candidates.popitem(last=False)
        self._candidates.move_to_end(place.area)
        if candidate.note(place.place, size, place.directory):
            del self._candidates[place.area]
            if self._reads - candidate.began > _APART * place.area.begins_after and self._covering(place.area):
                return False
            self._begin(candidate, now)
            return candidate.is_from_beginning
        return False

    def _covering(self, area: Area) -> Sweep | None:
        """The smallest set that is brought and has all of this one."""
        found = [sweep for sweep in self._sweeps.values() if sweep.area.covers(area)]
        return min(found, key=lambda one: one.area.count, default=None)

    def _begin(self, candidate: Candidate, now: float) -> None:
        sweep = self._sweeps[candidate.area] = Sweep(candidate.area, now, in_order=candidate.is_in_order)
        self._places += candidate.area.count
        for place, size in candidate.reads.items():
            sweep.note(place, size, now)
        while len(self._sweeps) > MOST_SWEEPS or (self._places > MOST_PLACES_OF_ALL and len(self._sweeps) > 1):
            self._end(next(iter(self._sweeps.values())))

    # --- what is brought ------------------------------------------------------------------------------------------

    def search(self, room: int, size: int, now: float) -> list[AreaSearch]:
        """What to look for, one area at most. It is to be followed by `choose`.

        room: bytes that are free, or taken by what may be evicted for this; size: bytes to be asked for now.
        """
        if size <= 0 or len(self._unread) >= MOST_UNREAD:
            return []
        for sweep in sorted(self._sweeps.values(), key=_nearest_first):
            if sweep.looking or sweep.has_failed or now - sweep.seen > ACTIVE_SECONDS:
                continue
            allowed = max(self._allowance(sweep), self._credit(sweep.area.snapshot).left if sweep.in_order else 0)
            if allowed <= 0 or sweep.rest > room:
                continue
            places = sweep.next_places(PLACES_LOOKED_AT)
            if places:
                sweep.looking = True
                return [AreaSearch(sweep, places, int(min(allowed, size)) or 1)]
        return []

    def _allowance(self, sweep: Sweep) -> float:
        """Bytes that may be brought of an area for what was read of it."""
        return sweep.allowance if sweep.is_wanted(self._covering(sweep.area)) else 0

    def choose(self, search: AreaSearch, found: AreaFound) -> list[Swept]:
        """What is to be brought of what a search has *found*. For each of these there is one call of `landed` or
        `undone`."""
        sweep = search.sweep
        sweep.looking = False
        if self._sweeps.get(sweep.area) is not sweep:
            return []
        lacking = {one.place for one in found.missing}
        for place in search.places[: found.looked]:
            sweep.looked_at(place, missing=place in lacking)
        snapshot, credit = sweep.area.snapshot, self._credit(sweep.area.snapshot)
        brought = []
        for one in found.missing:
            if one.key in self._unread or len(self._unread) >= MOST_UNREAD:
                continue
            on_credit = self._allowance(sweep) <= 0
            if on_credit and not (sweep.in_order and credit.left > 0):
                sweep.forget(one.place)
                continue
            swept = Swept(sweep, (snapshot, one.entry, one.number), one.key, one.size, one.place, on_credit)
            self._add(swept)
            if on_credit:
                credit.guessed(one.size)
            else:
                sweep.unread_bytes += one.size
            self._book.guessed(snapshot, sweep.area.rule, one.size)
            brought.append(swept)
        return brought

    def landed(self, swept: Swept) -> None:
        """It is on the node."""
        swept.landed = True

    def undone(self, swept: Swept) -> None:
        """It could not be fetched, or no tier took it."""
        if self._unread.get(swept.key) is swept:
            self._out(swept)
            if swept.on_credit:
                self._credit(swept.name[0]).undone(swept.size)
            else:
                swept.sweep.unread_bytes -= swept.size
            self._book.undone(swept.name[0], swept.sweep.area.rule, swept.size)
            swept.sweep.forget(swept.place)
            swept.sweep.lost()

    def forget_idle(self, now: float) -> None:
        """Forget areas of which nobody has read for long. To be called every second or so, while there are any."""
        for sweep in [one for one in self._sweeps.values() if now - one.seen > IDLE_SECONDS]:
            self._end(sweep)

    def _end(self, sweep: Sweep) -> None:
        del self._sweeps[sweep.area]
        self._places -= sweep.area.count
        heir = self._covering(sweep.area)
        for swept in list(self._of.get(sweep, {}).values()):
            if heir is None:
                self._wrong(swept)
                continue
            self._out(swept)
            swept.sweep, swept.place = heir, swept.name[1] - heir.area.first
            heir.unread_bytes += 0 if swept.on_credit else swept.size
            self._add(swept)

    def _read(self, swept: Swept, now: float) -> None:
        sweep, snapshot = swept.sweep, swept.name[0]
        self._reads += 1
        self._out(swept)
        if swept.on_credit:
            self._credit(snapshot).right(swept.size)
        else:
            sweep.unread_bytes -= swept.size
        self._book.right(snapshot, sweep.area.rule, swept.size)
        sweep.right()
        if swept.name[2] == 0 or sweep.area.rule is Rule.REST:
            sweep.note(swept.place, swept.size, now)
            self._note_around(sweep, swept, now)
        else:
            sweep.seen, sweep.read_bytes = now, sweep.read_bytes + swept.size
        if self._sweeps.get(sweep.area) is sweep:
            self._sweeps.move_to_end(sweep.area)

    def _note_around(self, sweep: Sweep, swept: Swept, now: float) -> None:
        """A file was read that was brought for one area: that counts for those that it is a part of, too."""
        if sweep.area.rule is not Rule.REST:
            for other in self._sweeps.values():
                if other is not sweep and other.area.covers(Area(Rule.SET, swept.name[0], swept.name[1], 1)):
                    other.note(swept.name[1] - other.area.first, swept.size, now)

    def _wrong(self, swept: Swept) -> None:
        """Nobody has read it. What it has cost is not given back."""
        self._out(swept)
        self._book.wrong(swept.name[0], swept.sweep.area.rule, swept.size)

    def _out(self, swept: Swept) -> None:
        del self._unread[swept.key]
        of_sweep = self._of[swept.sweep]
        del of_sweep[swept.key]
        if not of_sweep:
            del self._of[swept.sweep]

    def _add(self, swept: Swept) -> None:
        self._unread[swept.key] = swept
        self._of.setdefault(swept.sweep, {})[swept.key] = swept

    def _credit(self, snapshot: str) -> Credit:
        credit = self._credits.get(snapshot)
        if credit is None:
            credit = self._credits[snapshot] = Credit(first=START)
            if len(self._credits) > _MOST_SNAPSHOTS:
                self._credits.popitem(last=False)
        self._credits.move_to_end(snapshot)
        return credit


def _nearest_first(sweep: Sweep) -> tuple[int, int]:
    """The rest of a file first, then shards, then the smallest directory."""
    return _ORDER[sweep.area.rule], sweep.area.count
