"""What the index says of blocks that were asked for or changed of late.

On its way into a tier a block is looked up half a dozen times, and another one that is evicted for it as often. Each
look into LMDB lets go of the interpreter lock: where other threads wait for that it costs 0.1 to 1 ms, else 1 us.
"""

import threading
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import Final

from cachefs.block import Location

# Blocks of one generation: with two of them some 5 MB.
_MOST: Final = 8192


class Unknown(Enum):
    """Nothing is known of a block."""

    UNKNOWN = auto()


UNKNOWN: Final = Unknown.UNKNOWN

_Places = dict[bytes, Location | None]


class KnownPlaces:
    """Thread-safe. What it knows is what the index says now: whoever changes the index says so here, and what a reader
    has found there is taken only where no change can have come in between.

    There are two generations. What is changed goes into the young one; once that is full it becomes the old one, whose
    blocks are forgotten. So a change is known until the generations have changed twice.
    """

    def __init__(self, most: int = _MOST) -> None:
        """most: blocks of one generation."""
        self._most = most
        self._lock = threading.Lock()
        self._young: _Places = {}
        self._old: _Places = {}
        self._turns = 0  # how often the generations have changed

    def get(self, key: bytes) -> Location | Unknown | None:
        """Where the block is; None: nowhere. Waits for no lock."""
        found = self._young.get(key, UNKNOWN)
        return self._old.get(key, UNKNOWN) if found is UNKNOWN else found

    def change(self, changes: Mapping[bytes, Location | None]) -> None:
        """The index says this of these blocks. To be called once it does: a reader who begins later must find it."""
        with self._lock:
            self._make_room()
            self._young.update(changes)

    @property
    def mark(self) -> int:
        """To be taken before the index is read."""
        return self._turns

    def learn(self, found: Iterable[tuple[bytes, Location | None]], mark: int) -> None:
        """A reader has found this in the index after it took *mark*."""
        with self._lock:
            self._make_room()
            # A change since then is still known, and newer. Later it may be forgotten.
            if self._turns <= mark + 1:
                for key, place in found:
                    if key not in self._young and key not in self._old:
                        self._young[key] = place

    def _make_room(self) -> None:
        """Before something comes into the young generation. Needs the lock."""
        if len(self._young) >= self._most:
            self._old, self._young = self._young, {}
            self._turns += 1
