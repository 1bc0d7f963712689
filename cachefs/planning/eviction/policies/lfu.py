"""Evicts the block used least often while it was in the tier; among equals, the one used longest ago."""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Final


class Lfu:
    """A least-recently-used list for each number of uses. A new block has one use: it came for a reader."""

    can_evict: Final = True

    def __init__(self) -> None:
        self.bytes = 0  # size of all blocks it holds
        self._uses: dict[bytes, int] = {}  # how often each block was used
        self._sizes: dict[bytes, int] = {}
        self._by_uses: dict[int, OrderedDict[bytes, None]] = {}  # number of uses -> blocks, the last used at the end

    def can_admit(self, key: bytes, size: int, free: int) -> bool:
        return True

    def note_added(self, key: bytes, size: int) -> None:
        self.note_removed(key)
        self._sizes[key] = size
        self.bytes += size
        self._count(key, 1)

    def note_accessed(self, key: bytes) -> None:
        if key in self._sizes:
            self._count(key, self._uncount(key) + 1)

    def note_removed(self, key: bytes) -> None:
        if key in self._sizes:
            self.bytes -= self._sizes.pop(key)
            self._uncount(key)

    def rank_incoming(self, keys: Sequence[bytes], pinned: Collection[bytes]) -> list[int]:
        return list(range(len(keys)))

    def choose_victims(self, size: int, pinned: Collection[bytes], incoming: Sequence[bytes] = ()) -> Sequence[bytes]:
        if size > self.bytes:
            return ()
        found = []
        for uses in sorted(self._by_uses):
            for key in self._by_uses[uses]:
                if key not in pinned:
                    found.append(key)
                    size -= self._sizes[key]
                    if size <= 0:
                        return found
        return ()

    def replaceable_bytes(self, incoming: bytes) -> int:
        return self.bytes

    def catch_up(self) -> bool:
        return False

    def last_use(self, key: bytes) -> int | None:
        return None

    def _count(self, key: bytes, uses: int) -> None:
        self._uses[key] = uses
        self._by_uses.setdefault(uses, OrderedDict())[key] = None

    def _uncount(self, key: bytes) -> int:
        uses = self._uses.pop(key)
        alike = self._by_uses[uses]
        del alike[key]
        if not alike:
            del self._by_uses[uses]
        return uses
