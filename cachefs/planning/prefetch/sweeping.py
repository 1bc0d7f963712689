"""Readahead without a known order: the rest of a file, the next shards, and all files of a directory (see `Sweep`).

Reads that wait, and that no stream explains, are evidence. A caller with the listing looks up their areas in batches.
The missing blocks of an area are fetched a few at a time, with the lowest priority.

The cost is a dictionary entry per read that waits, and 300 bytes for each fetched and unread block.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cachefs.planning.prefetch.credit import Credit
from cachefs.planning.prefetch.guess_counts import GuessBook, Rule
from cachefs.planning.prefetch.streams import Name
from cachefs.planning.prefetch.sweep import ACTIVE_SECONDS, IDLE_SECONDS, MOST_PLACES, Area, Candidate, Sweep

# Bytes of unread guesses for reads in order that a snapshot may have before any guess was right.
START: Final = 32 << 20
# Limits: reads that wait to be looked up; candidates; sweeps, and places of all of them; fetched and unread blocks.
MOST_MISSED: Final = 1024
MOST_CANDIDATES: Final = 1024
MOST_SWEEPS: Final = 32
MOST_PLACES_OF_ALL: Final = 1 << 25
MOST_UNREAD: Final = 1 << 17
_MOST_SNAPSHOTS: Final = 256
# Readers that wait for a block within this many seconds wait for the same fetch.
AWAITED_SECONDS: Final = 2.0
# Where a set of directories is fetched as a whole, one of them begins by itself only if its share of all reads
# meanwhile is at least 1 in this many: a reader goes from directory to directory.
_APART: Final = 8
_ORDER: Final = {Rule.REST: 0, Rule.SHARDS: 1, Rule.SET: 2}
# Places that one search examines.
PLACES_LOOKED_AT: Final = 64
# Most blocks of one file that are fetched for a directory; of a larger file, a reader must have read a part.
MOST_BLOCKS_OF_FILE: Final = 16


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a block in an area."""

    area: Area
    place: int
    # SHARDS, SET: the block's directory below the area, or the entry itself where it is directly in the area.
    directory: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A block that a reader waited for, and its areas: first its file, where that has several blocks."""

    name: Name
    # Bytes of the block, and of the file.
    size: int
    file_size: int
    places: Sequence[Place]


@dataclass(frozen=True, slots=True, eq=False)
class AreaSearch:
    """A search for blocks that are not on the node, at these places of an area."""

    sweep: Sweep
    places: Sequence[int]
    # Most bytes to find; the last file may exceed them.
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
    """The result of a search: number of examined places, and the missing blocks there."""

    looked: int
    missing: Sequence[Lacking]


@dataclass(slots=True, eq=False)
class Swept:
    """A block that is fetched because its area is read."""

    sweep: Sweep
    name: Name
    key: bytes
    size: int
    place: int
    # Whether it takes the snapshot's credit, instead of the area's allowance.
    on_credit: bool
    landed: bool = False


class Sweeping:
    """Decides which blocks of areas to fetch. Times are monotonic seconds."""

    def __init__(self, book: GuessBook) -> None:
        self._book = book
        self._awaited: OrderedDict[Name, float] = OrderedDict()  # time of the last wait, least recent first
        self._missed: list[tuple[Name, int]] = []  # blocks waited for, not placed yet, with their sizes
        self._candidates: OrderedDict[Area, Candidate] = OrderedDict()  # least recent first
        self._sweeps: OrderedDict[Area, Sweep] = OrderedDict()  # least recent first
        self._places = 0  # of all sweeps
        self._unread: dict[bytes, Swept] = {}  # by key
        self._of: dict[Sweep, dict[bytes, Swept]] = {}  # the same by sweep, without empty ones
        self._reads = 0  # reads that waited, and reads of guesses
        self._credits: OrderedDict[str, Credit] = OrderedDict()  # by snapshot, least recent first

    @property
    def sweeps(self) -> int:
        """The number of areas that are fetched."""
        return len(self._sweeps)

    @property
    def unread(self) -> int:
        """The number of blocks that were fetched and not read yet."""
        return len(self._unread)

    # --- what is read ---------------------------------------------------------------------------------------------

    def missed(self, name: Name, size: int, key: bytes, now: float) -> bool:
        """Record that a reader waits for a block of *size* bytes that no stream explains. Returns whether work is
        due."""
        if self._is_awaited(name, now):
            return False
        self._reads += 1
        self._credit(name[0]).demanded(size)
        swept = self._unread.get(key)
        if swept is not None and not swept.landed:
            self._read(swept, now)  # a right guess, but late
            return True
        if swept is not None:
            swept.sweep.evicted()
            self._wrong(swept)
        if len(self._missed) < MOST_MISSED:
            self._missed.append((name, size))
        return True

    def _is_awaited(self, name: Name, now: float) -> bool:
        """Return whether another reader waits for the block already, like ranks of a job that read the same file."""
        since = self._awaited.get(name, -AWAITED_SECONDS)
        self._awaited[name] = now
        self._awaited.move_to_end(name)
        if len(self._awaited) > MOST_MISSED:
            self._awaited.popitem(last=False)
        return now < since + AWAITED_SECONDS

    def seen(self, keys: Iterable[bytes], now: float) -> bool:
        """Record reads of blocks with these keys. Returns whether some were fetched here."""
        if not self._unread:
            return False
        found = [swept for swept in map(self._unread.get, keys) if swept is not None]
        for swept in found:
            if swept.key in self._unread:
                self._read(swept, now)
        return bool(found)

    def take_missed(self) -> list[tuple[Name, int]]:
        """Return the blocks to be placed, with their sizes."""
        missed, self._missed = self._missed, []
        return missed

    def placed(self, reads: Iterable[Placed], now: float) -> None:
        """Record the areas of blocks that readers waited for."""
        for read in reads:
            has_begun = False
            for place in read.places:
                if place.area.rule is Rule.REST:
                    has_begun = self._note(place, read.size, now)
                elif self._tells(read, place.area, has_begun=has_begun):
                    self._note(place, read.file_size, now)

    def _tells(self, read: Placed, area: Area, *, has_begun: bool) -> bool:
        """Return whether a block that a reader waited for is evidence that files of the area are wanted."""
        if area in self._sweeps or area.rule is Rule.SET:
            return read.name[2] == 0
        return has_begun

    def _note(self, place: Place, size: int, now: float) -> bool:
        """Record a read in an area. Returns whether it shows that a reader begins a large file."""
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
        """Return the smallest sweep of a set that contains *area*; None where there is none."""
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
        """Return the searches to make, at most one, which must be followed by `choose`.

        room: free bytes, and those of blocks that may be evicted for guesses; size: bytes to request now.
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
        """Return the bytes that may be fetched of an area for its reads."""
        return sweep.allowance if sweep.is_wanted(self._covering(sweep.area)) else 0

    def choose(self, search: AreaSearch, found: AreaFound) -> list[Swept]:
        """Return the blocks to fetch among those *found*. Each must be followed by one call of `landed` or `undone`."""
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
        """Record that the block is on the node."""
        swept.landed = True

    def undone(self, swept: Swept) -> None:
        """Record that the block could not be fetched, or no tier took it."""
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
        """Forget areas without recent reads. To be called about once a second, while there are sweeps."""
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
        """Record the read of a file fetched for one area in all other areas that contain it."""
        if sweep.area.rule is not Rule.REST:
            for other in self._sweeps.values():
                if other is not sweep and other.area.covers(Area(Rule.SET, swept.name[0], swept.name[1], 1)):
                    other.note(swept.name[1] - other.area.first, swept.size, now)

    def _wrong(self, swept: Swept) -> None:
        """Count an unread block as wrong. Its cost is not given back."""
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
    """Return a sort key: the rest of a file first, then shards, then the smallest directory."""
    return _ORDER[sweep.area.rule], sweep.area.count
