"""A cache of index entries that were looked up or changed recently.

On its way into a tier a block is looked up half a dozen times, and another one that is evicted for it as often. Each
lookup in LMDB releases the interpreter lock: where other threads wait for that it costs 0.1 to 1 ms, else 1 us.
"""

import threading
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import Final

from cachefs.block import BlockLocation

# Blocks of one generation: two of them take some 5 MB.
_MOST: Final = 8192


class NotCached(Enum):
    """The type of NOT_CACHED, for a block that is not cached."""

    NOT_CACHED = auto()


NOT_CACHED: Final = NotCached.NOT_CACHED

_Entries = dict[bytes, BlockLocation | None]


class RecentEntries:
    """Caches the present state of the index. Thread-safe. Each change of the index is also applied here, and what a
    reader has found in the index is stored only where no change can have come in between.

    There are two generations. Changes go into the young one; once that is full it becomes the old one, whose blocks are
    forgotten. So a change is known until the generations have changed twice.
    """

    def __init__(self, most: int = _MOST) -> None:
        """most: blocks of one generation."""
        self._most = most
        self._lock = threading.Lock()
        self._young: _Entries = {}
        self._old: _Entries = {}
        self._generation = 0  # how often the generations have changed

    def get(self, key: bytes) -> BlockLocation | NotCached | None:
        """Return where the block is; None: nowhere. Waits for no lock."""
        found = self._young.get(key, NOT_CACHED)
        return self._old.get(key, NOT_CACHED) if found is NOT_CACHED else found

    def apply_changes(self, changes: Mapping[bytes, BlockLocation | None]) -> None:
        """Store changes that the index has already: a reader that begins later must find them there."""
        with self._lock:
            self._make_room()
            self._young.update(changes)

    @property
    def generation(self) -> int:
        """Read this before reading the index, for `add_read_entries`."""
        return self._generation

    def add_read_entries(self, found: Iterable[tuple[bytes, BlockLocation | None]], mark: int) -> None:
        """Store what a reader has found in the index after it read *mark*."""
        with self._lock:
            self._make_room()
            # A change since *mark* is still cached, and newer. Later it may have been forgotten.
            if self._generation <= mark + 1:
                for key, location in found:
                    if key not in self._young and key not in self._old:
                        self._young[key] = location

    def _make_room(self) -> None:
        """Make room in the young generation. Needs the lock."""
        if len(self._young) >= self._most:
            self._old, self._young = self._young, {}
            self._generation += 1
