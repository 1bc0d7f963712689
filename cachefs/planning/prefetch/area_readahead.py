"""Readahead without a known order: the rest of a file, the next shards, and all files of a directory (see
`ActiveArea`).

Reads that wait, and that no stream explains, are evidence. A caller with the listing looks up their areas in batches.
The missing blocks of an area are fetched a few at a time, with the lowest priority.

The cost is a dictionary entry per read that waits, and 300 bytes for each fetched and unread block.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cachefs.planning.prefetch.areas import ACTIVE_SECONDS, IDLE_SECONDS, MAX_POSITIONS, ActiveArea, Area, CandidateArea
from cachefs.planning.prefetch.readahead_budget import ReadaheadBudget, ReadaheadCounters, ReadaheadRule
from cachefs.planning.prefetch.streams import FileBlockName

# Bytes of unread guesses for reads in order that a snapshot may have before any guess was right.
INITIAL_BYTES: Final = 32 << 20
# Limits: reads that wait to be looked up; candidates; sweeps, and places of all of them; fetched and unread blocks.
MAX_MISSED: Final = 1024
MAX_CANDIDATES: Final = 1024
MAX_ACTIVE_AREAS: Final = 32
MAX_POSITIONS_OF_ALL: Final = 1 << 25
MAX_UNREAD_BLOCKS: Final = 1 << 17
_MAX_SNAPSHOTS: Final = 256
# Readers that wait for a block within this many seconds wait for the same fetch.
AWAITED_SECONDS: Final = 2.0
# Where a set of directories is fetched as a whole, one of them begins by itself only if its share of all reads
# meanwhile is at least 1 in this many: a reader goes from directory to directory.
_MIN_READ_RATIO: Final = 8
_RULE_ORDER: Final = {ReadaheadRule.REST: 0, ReadaheadRule.SHARDS: 1, ReadaheadRule.SET: 2}
# Places that one search examines.
POSITIONS_PER_SEARCH: Final = 64
# Most blocks of one file that are fetched for a directory; of a larger file, a reader must have read a part.
MAX_BLOCKS_OF_FILE: Final = 16


@dataclass(frozen=True, slots=True)
class AreaPosition:
    """The place of a block in an area."""

    area: Area
    index: int
    # SHARDS, SET: the block's directory below the area, or the entry itself where it is directly in the area.
    directory: int


@dataclass(frozen=True, slots=True)
class LocatedMiss:
    """A block that a reader waited for, and its areas: first its file, where that has several blocks."""

    name: FileBlockName
    # Bytes of the block, and of the file.
    size: int
    file_size: int
    positions: Sequence[AreaPosition]


@dataclass(frozen=True, slots=True, eq=False)
class AreaSearch:
    """A search for blocks that are not on the node, at these places of an area."""

    area: ActiveArea
    positions: Sequence[int]
    # Most bytes to find; the last file may exceed them.
    max_bytes: int


@dataclass(frozen=True, slots=True)
class MissingAreaBlock:
    """A block that is not on the node."""

    position: int
    entry: int
    number: int
    key: bytes
    size: int


@dataclass(frozen=True, slots=True)
class AreaSearchResult:
    """The result of a search: number of examined places, and the missing blocks there."""

    examined: int
    missing: Sequence[MissingAreaBlock]


@dataclass(slots=True, eq=False)
class AreaBlock:
    """A block that is fetched because its area is read."""

    area: ActiveArea
    name: FileBlockName
    key: bytes
    size: int
    position: int
    # Whether it takes the snapshot's credit, instead of the area's allowance.
    is_on_budget: bool
    has_landed: bool = False


class AreaReadahead:
    """Decides which blocks of areas to fetch. Times are monotonic seconds."""

    def __init__(self, counters: ReadaheadCounters) -> None:
        self._counters = counters
        self._awaited: OrderedDict[FileBlockName, float] = OrderedDict()  # time of the last wait, least recent first
        self._missed: list[tuple[FileBlockName, int]] = []  # blocks waited for, not placed yet, with their sizes
        self._candidates: OrderedDict[Area, CandidateArea] = OrderedDict()  # least recent first
        self._active: OrderedDict[Area, ActiveArea] = OrderedDict()  # least recent first
        self._positions = 0  # of all sweeps
        self._unread: dict[bytes, AreaBlock] = {}  # by key
        self._unread_by_area: dict[ActiveArea, dict[bytes, AreaBlock]] = {}  # the same by sweep, without empty ones
        self._reads = 0  # reads that waited, and reads of guesses
        self._budgets: OrderedDict[str, ReadaheadBudget] = OrderedDict()  # by snapshot, least recent first

    @property
    def active_areas(self) -> int:
        """The number of areas that are fetched."""
        return len(self._active)

    @property
    def unread_blocks(self) -> int:
        """The number of blocks that were fetched and not read yet."""
        return len(self._unread)

    # --- what is read ---------------------------------------------------------------------------------------------

    def note_miss(self, name: FileBlockName, size: int, key: bytes, now: float) -> bool:
        """Record that a reader waits for a block of *size* bytes that no stream explains. Returns whether work is
        due."""
        if self._is_awaited(name, now):
            return False
        self._reads += 1
        self._budget(name[0]).note_miss(size)
        swept = self._unread.get(key)
        if swept is not None and not swept.has_landed:
            self._note_read(swept, now)  # a right guess, but late
            return True
        if swept is not None:
            swept.area.note_evicted()
            self._note_wrong(swept)
        if len(self._missed) < MAX_MISSED:
            self._missed.append((name, size))
        return True

    def _is_awaited(self, name: FileBlockName, now: float) -> bool:
        """Return whether another reader waits for the block already, like ranks of a job that read the same file."""
        since = self._awaited.get(name, -AWAITED_SECONDS)
        self._awaited[name] = now
        self._awaited.move_to_end(name)
        if len(self._awaited) > MAX_MISSED:
            self._awaited.popitem(last=False)
        return now < since + AWAITED_SECONDS

    def note_reads(self, keys: Iterable[bytes], now: float) -> bool:
        """Record reads of blocks with these keys. Returns whether some were fetched here."""
        if not self._unread:
            return False
        found = [swept for swept in map(self._unread.get, keys) if swept is not None]
        for swept in found:
            if swept.key in self._unread:
                self._note_read(swept, now)
        return bool(found)

    def take_misses(self) -> list[tuple[FileBlockName, int]]:
        """Return the blocks to be placed, with their sizes."""
        missed, self._missed = self._missed, []
        return missed

    def note_located(self, reads: Iterable[LocatedMiss], now: float) -> None:
        """Record the areas of blocks that readers waited for."""
        for read in reads:
            has_begun = False
            for position in read.positions:
                if position.area.rule is ReadaheadRule.REST:
                    has_begun = self._note_area_read(position, read.size, now)
                elif self._is_evidence(read, position.area, has_begun=has_begun):
                    self._note_area_read(position, read.file_size, now)

    def _is_evidence(self, read: LocatedMiss, area: Area, *, has_begun: bool) -> bool:
        """Return whether a block that a reader waited for is evidence that files of the area are wanted."""
        if area in self._active or area.rule is ReadaheadRule.SET:
            return read.name[2] == 0
        return has_begun

    def _note_area_read(self, position: AreaPosition, size: int, now: float) -> bool:
        """Record a read in an area. Returns whether it shows that a reader begins a large file."""
        sweep = self._active.get(position.area)
        if sweep is not None:
            sweep.note_repeated_wait(position.index)
            sweep.note_read(position.index, size, now)
            self._active.move_to_end(position.area)
            return False
        if position.area.count > MAX_POSITIONS:
            return False
        candidate = self._candidates.get(position.area)
        if candidate is None:
            candidate = self._candidates[position.area] = CandidateArea(position.area, reads_at_start=self._reads)
            if len(self._candidates) > MAX_CANDIDATES:
                self._candidates.popitem(last=False)
        self._candidates.move_to_end(position.area)
        if candidate.note_read(position.index, size, position.directory):
            del self._candidates[position.area]
            if (
                self._reads - candidate.reads_at_start > _MIN_READ_RATIO * position.area.reads_to_begin
                and self._smallest_covering(position.area)
            ):
                return False
            self._activate(candidate, now)
            return candidate.is_from_beginning
        return False

    def _smallest_covering(self, area: Area) -> ActiveArea | None:
        """Return the smallest sweep of a set that contains *area*; None where there is none."""
        found = [sweep for sweep in self._active.values() if sweep.area.is_covering(area)]
        return min(found, key=lambda one: one.area.count, default=None)

    def _activate(self, candidate: CandidateArea, now: float) -> None:
        sweep = self._active[candidate.area] = ActiveArea(candidate.area, now, is_in_order=candidate.is_in_order)
        self._positions += candidate.area.count
        for position, size in candidate.reads.items():
            sweep.note_read(position, size, now)
        while len(self._active) > MAX_ACTIVE_AREAS or (
            self._positions > MAX_POSITIONS_OF_ALL and len(self._active) > 1
        ):
            self._end_area(next(iter(self._active.values())))

    # --- what is brought ------------------------------------------------------------------------------------------

    def next_searches(self, free_bytes: int, max_bytes: int, now: float) -> list[AreaSearch]:
        """Return the searches to make, at most one, which must be followed by `choose_blocks`.

        free_bytes: free bytes, and those of blocks that may be evicted for guesses; max_bytes: bytes to request now.
        """
        if max_bytes <= 0 or len(self._unread) >= MAX_UNREAD_BLOCKS:
            return []
        for sweep in sorted(self._active.values(), key=_nearest_first):
            if sweep.is_searching or sweep.has_failed or now - sweep.last_read_at > ACTIVE_SECONDS:
                continue
            allowed = max(
                self._allowance(sweep), self._budget(sweep.area.snapshot).remaining if sweep.is_in_order else 0
            )
            if allowed <= 0 or sweep.remaining_bytes > free_bytes:
                continue
            positions = sweep.next_positions(POSITIONS_PER_SEARCH)
            if positions:
                sweep.is_searching = True
                return [AreaSearch(sweep, positions, int(min(allowed, max_bytes)) or 1)]
        return []

    def _allowance(self, sweep: ActiveArea) -> float:
        """Return the bytes that may be fetched of an area for its reads."""
        return sweep.allowance if sweep.is_wanted(self._smallest_covering(sweep.area)) else 0

    def choose_blocks(self, search: AreaSearch, found: AreaSearchResult) -> list[AreaBlock]:
        """Return the blocks to fetch among those *found*. Each must be followed by one call of `note_landed` or
        `note_undone`."""
        sweep = search.area
        sweep.is_searching = False
        if self._active.get(sweep.area) is not sweep:
            return []
        lacking = {one.position for one in found.missing}
        for position in search.positions[: found.examined]:
            sweep.note_examined(position, is_missing=position in lacking)
        snapshot, credit = sweep.area.snapshot, self._budget(sweep.area.snapshot)
        brought = []
        for one in found.missing:
            if one.key in self._unread or len(self._unread) >= MAX_UNREAD_BLOCKS:
                continue
            on_credit = self._allowance(sweep) <= 0
            if on_credit and not (sweep.is_in_order and credit.remaining > 0):
                sweep.forget_position(one.position)
                continue
            swept = AreaBlock(sweep, (snapshot, one.entry, one.number), one.key, one.size, one.position, on_credit)
            self._add_block(swept)
            if on_credit:
                credit.spend(one.size)
            else:
                sweep.unread_bytes += one.size
            self._counters.note_fetched(snapshot, sweep.area.rule, one.size)
            brought.append(swept)
        return brought

    def note_landed(self, swept: AreaBlock) -> None:
        """Record that the block is on the node."""
        swept.has_landed = True

    def note_undone(self, swept: AreaBlock) -> None:
        """Record that the block could not be fetched, or no tier took it."""
        if self._unread.get(swept.key) is swept:
            self._remove_block(swept)
            if swept.is_on_budget:
                self._budget(swept.name[0]).refund(swept.size)
            else:
                swept.area.unread_bytes -= swept.size
            self._counters.note_undone(swept.name[0], swept.area.area.rule, swept.size)
            swept.area.forget_position(swept.position)
            swept.area.note_failed()

    def end_idle_areas(self, now: float) -> None:
        """Forget areas without recent reads. To be called about once a second, while there are sweeps."""
        for sweep in [one for one in self._active.values() if now - one.last_read_at > IDLE_SECONDS]:
            self._end_area(sweep)

    def _end_area(self, sweep: ActiveArea) -> None:
        del self._active[sweep.area]
        self._positions -= sweep.area.count
        heir = self._smallest_covering(sweep.area)
        for swept in list(self._unread_by_area.get(sweep, {}).values()):
            if heir is None:
                self._note_wrong(swept)
                continue
            self._remove_block(swept)
            swept.area, swept.position = heir, swept.name[1] - heir.area.first
            heir.unread_bytes += 0 if swept.is_on_budget else swept.size
            self._add_block(swept)

    def _note_read(self, swept: AreaBlock, now: float) -> None:
        sweep, snapshot = swept.area, swept.name[0]
        self._reads += 1
        self._remove_block(swept)
        if swept.is_on_budget:
            self._budget(snapshot).note_hit(swept.size)
        else:
            sweep.unread_bytes -= swept.size
        self._counters.note_right(snapshot, sweep.area.rule, swept.size)
        sweep.note_right()
        if swept.name[2] == 0 or sweep.area.rule is ReadaheadRule.REST:
            sweep.note_read(swept.position, swept.size, now)
            self._note_around(sweep, swept, now)
        else:
            sweep.last_read_at, sweep.read_bytes = now, sweep.read_bytes + swept.size
        if self._active.get(sweep.area) is sweep:
            self._active.move_to_end(sweep.area)

    def _note_around(self, sweep: ActiveArea, swept: AreaBlock, now: float) -> None:
        """Record the read of a file fetched for one area in all other areas that contain it."""
        if sweep.area.rule is not ReadaheadRule.REST:
            for other in self._active.values():
                if other is not sweep and other.area.is_covering(
                    Area(ReadaheadRule.SET, swept.name[0], swept.name[1], 1)
                ):
                    other.note_read(swept.name[1] - other.area.first, swept.size, now)

    def _note_wrong(self, swept: AreaBlock) -> None:
        """Count an unread block as wrong. Its cost is not given back."""
        self._remove_block(swept)
        self._counters.note_wrong(swept.name[0], swept.area.area.rule, swept.size)

    def _remove_block(self, swept: AreaBlock) -> None:
        del self._unread[swept.key]
        of_sweep = self._unread_by_area[swept.area]
        del of_sweep[swept.key]
        if not of_sweep:
            del self._unread_by_area[swept.area]

    def _add_block(self, swept: AreaBlock) -> None:
        self._unread[swept.key] = swept
        self._unread_by_area.setdefault(swept.area, {})[swept.key] = swept

    def _budget(self, snapshot: str) -> ReadaheadBudget:
        credit = self._budgets.get(snapshot)
        if credit is None:
            credit = self._budgets[snapshot] = ReadaheadBudget(first=INITIAL_BYTES)
            if len(self._budgets) > _MAX_SNAPSHOTS:
                self._budgets.popitem(last=False)
        self._budgets.move_to_end(snapshot)
        return credit


def _nearest_first(sweep: ActiveArea) -> tuple[int, int]:
    """Return a sort key: the rest of a file first, then shards, then the smallest directory."""
    return _RULE_ORDER[sweep.area.rule], sweep.area.count
