"""Maps blocks of a snapshot to the areas that contain them, and finds the blocks of an area that are missing on this
node.

An area is a file, or the files of a directory, as defined in cachefs.planning.prefetch.area_readahead.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from cachefs.block import block_count, block_key, block_length
from cachefs.errors import NotFound
from cachefs.planning.prefetch.area_readahead import (
    MAX_BLOCKS_OF_FILE,
    AreaPosition,
    AreaSearch,
    AreaSearchResult,
    LocatedMiss,
    MissingAreaBlock,
)
from cachefs.planning.prefetch.areas import Area
from cachefs.planning.prefetch.readahead_budget import ReadaheadRule
from cachefs.planning.prefetch.streams import FileBlockName
from cachefs.snapshot import ROOT, Entry, Snapshot

# Directory levels above a file that are examined: train/CLASS/VIDEO/FRAME.
_LEVELS: Final = 3
# Entries at each end of a directory that are searched for subdirectories.
_ENTRIES_SEARCHED: Final = 32
# Spans kept in the cache.
_MAX_SPANS: Final = 4096

# Number of the first entry, and of the one after the last.
_Span = tuple[int, int]


class AreaIndex:
    """Looks up areas in snapshots, with a cache of directory spans. Used by one thread at a time."""

    def __init__(self, is_here: Callable[[bytes], bool]) -> None:
        """is_here: returns whether the block with this key is in a tier."""
        self._is_here = is_here
        self._spans: OrderedDict[tuple[str, int, int], _Span] = OrderedDict()  # by snapshot, directory, and depth

    # --- areas of blocks ------------------------------------------------------------------------------------------

    def areas_of_blocks(self, snapshot: Snapshot, missed: Iterable[tuple[FileBlockName, int]]) -> list[LocatedMiss]:
        """Return the areas of blocks of the snapshot, given by name and size. Raises CachefsError."""
        return [self._areas_of_block(snapshot, name, size) for name, size in missed]

    def _areas_of_block(self, snapshot: Snapshot, name: FileBlockName, size: int) -> LocatedMiss:
        _, number, block = name
        entry = snapshot.entry(number)
        blocks = block_count(entry.size, snapshot.block_size)
        positions = []
        if blocks > 1:
            positions.append(AreaPosition(Area(ReadaheadRule.REST, snapshot.id, number, blocks), block, 0))
        if block == 0 or (blocks > 1 and block == 1):
            positions += self._positions_of_file(snapshot, entry, has_blocks=blocks > 1, is_begin=block == 0)
        return LocatedMiss(name, size, entry.size, positions)

    def _positions_of_file(
        self, snapshot: Snapshot, entry: Entry, *, has_blocks: bool, is_begin: bool
    ) -> Iterator[AreaPosition]:
        first, end = self._span(snapshot, entry.parent, 1)
        if has_blocks:
            yield AreaPosition(
                Area(ReadaheadRule.SHARDS, snapshot.id, first, end - first), entry.number - first, entry.number
            )
        if not is_begin:
            return
        yield AreaPosition(Area(ReadaheadRule.SET, snapshot.id, first, end - first), entry.number - first, entry.number)
        above, known = entry.parent, {(first, end)}
        for depth in range(2, _LEVELS + 1):
            if above == ROOT:
                return
            directory, above = above, snapshot.entry(above).parent
            first, end = span = self._span(snapshot, above, depth)
            if span not in known and first <= entry.number < end:
                known.add(span)
                yield AreaPosition(
                    Area(ReadaheadRule.SET, snapshot.id, first, end - first), entry.number - first, directory
                )

    def _span(self, snapshot: Snapshot, directory: int, depth: int) -> _Span:
        """Return the entries *depth* levels below a directory. Their numbers are consecutive."""
        key = (snapshot.id, directory, depth)
        span = self._spans.get(key)
        if span is None:
            span = self._spans[key] = self._find_span(snapshot, directory, depth)
            if len(self._spans) > _MAX_SPANS:
                self._spans.popitem(last=False)
        self._spans.move_to_end(key)
        return span

    def _find_span(self, snapshot: Snapshot, directory: int, depth: int) -> _Span:
        entry = snapshot.entry(directory)
        begin, end = entry.first_child, entry.first_child + entry.child_count
        if depth == 1:
            return begin, end
        first = self._first_span_below(snapshot, range(begin, min(end, begin + _ENTRIES_SEARCHED)), depth - 1)
        last = self._first_span_below(snapshot, range(end - 1, max(begin, end - _ENTRIES_SEARCHED) - 1, -1), depth - 1)
        return (first[0], last[1]) if first is not None and last is not None else (0, 0)

    def _first_span_below(self, snapshot: Snapshot, entries: Iterable[int], depth: int) -> _Span | None:
        """Return the span at *depth* below the first of the *entries* that has one."""
        for number in entries:
            if snapshot.entry(number).is_dir:
                first, end = self._span(snapshot, number, depth)
                if end > first:
                    return first, end
        return None

    # --- missing blocks -------------------------------------------------------------------------------------------

    def find_missing_blocks(self, snapshot: Snapshot, search: AreaSearch) -> AreaSearchResult:
        """Find missing blocks of an area. Raises CachefsError."""
        area, missing, looked, size = search.area.area, list[MissingAreaBlock](), 0, 0
        for position in search.places:
            if size >= search.max_bytes:
                break
            looked += 1
            file, numbers = (
                (area.first, (position,)) if area.rule is ReadaheadRule.REST else (area.first + position, None)
            )
            for one in self._missing_blocks_of_file(snapshot, position, file, numbers):
                missing.append(one)
                size += one.size
        return AreaSearchResult(looked, missing)

    def _missing_blocks_of_file(
        self, snapshot: Snapshot, position: int, file: int, numbers: Sequence[int] | None
    ) -> Iterator[MissingAreaBlock]:
        """Yield missing blocks of a file. numbers: the blocks to check; None: the first MAX_BLOCKS_OF_FILE."""
        try:
            length, content = snapshot.size_and_content(file)
        except NotFound:
            return  # a directory
        if numbers is None:
            numbers = range(min(MAX_BLOCKS_OF_FILE, block_count(length, snapshot.block_size)))
        for number in numbers:
            key = block_key(content, number)
            if not self._is_here(key):
                yield MissingAreaBlock(position, file, number, key, block_length(length, snapshot.block_size, number))
