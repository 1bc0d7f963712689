"""Give up what was used longest ago."""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Final


class Lru:
    """Least recently used first. Nobody calling `accessed` makes it first in, first out.

    bytes: size of all blocks it holds.
    """

    evicts: Final = True

    def __init__(self) -> None:
        self.bytes = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def admits(self, key: bytes, size: int, free: int) -> bool:
        return True

    def added(self, key: bytes, size: int) -> None:
        self.removed(key)
        self._sizes[key] = size
        self.bytes += size

    def accessed(self, key: bytes) -> None:
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def removed(self, key: bytes) -> None:
        self.bytes -= self._sizes.pop(key, 0)

    def victims(self, size: int, pinned: Collection[bytes], incoming: bytes = b"") -> Sequence[bytes]:
        if size > self.bytes:
            return ()
        found, passed, total = [], [], 0
        for key, block_size in self._sizes.items():
            if total >= size:
                break
            if key in pinned:
                passed.append(key)
            else:
                found.append(key)
                total += block_size
        # Pinned blocks have no need of their place; at the far end they are not stepped over each time.
        for key in passed:
            self._sizes.move_to_end(key)
        return found if total >= size else ()

    def replaceable(self, incoming: bytes) -> int:
        return self.bytes
