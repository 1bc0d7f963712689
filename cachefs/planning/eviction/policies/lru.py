"""Evicts the block used longest ago.

`UseOrder` orders uses over all tiers of a node, so that a block keeps its position when it moves to another tier.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import ClassVar, Final

# Removed blocks are purged from the queue once they outnumber the others, and exceed this number.
_MIN_OUTDATED: Final = 1024


class UseOrder:
    """Numbers the uses of blocks. Shared by all policies of a node's tiers that go by the last use."""

    def __init__(self) -> None:
        # Last use of each block that has left one tier and is in no other yet. A policy that takes such a block adopts
        # the number.
        self.moving_uses: dict[bytes, int] = {}
        self._numbers = count(1)

    def next_use(self) -> int:
        """Return the number of a use that happens now, higher than all numbers before."""
        return next(self._numbers)

    def forget_use(self, key: bytes) -> None:
        """Forget the last use of a block that has come into another tier, or has left the node. A later fetch is a new
        use."""
        self.moving_uses.pop(key, None)


@dataclass(slots=True)
class _Block:
    size: int
    used: int  # number of its last use


class Lru:
    """Least recently used first.

    Tiers that share their *uses* form one list of their total size: a block comes from another tier with its last use
    there, and no block that was used later is evicted for it.
    """

    name: ClassVar = "lru"
    description: ClassVar = "keeps the blocks that were used last"
    can_evict: Final = True

    def __init__(self, uses: UseOrder | None = None) -> None:
        self.bytes = 0  # size of all blocks it holds
        self._uses = uses or UseOrder()
        self._shares_uses = uses is not None
        self._blocks: dict[bytes, _Block] = {}
        # (use, block): at least one for each block, none after its last use. Outdated entries are skipped when popped.
        self._queue: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def can_admit(self, key: bytes, size: int, free: int) -> bool:
        return True

    def note_added(self, key: bytes, size: int) -> None:
        self._drop(key)
        block = self._blocks[key] = _Block(size, self._uses.moving_uses.get(key) or self._uses.next_use())
        self.bytes += size
        heappush(self._queue, (block.used, key))
        if len(self._queue) > 2 * len(self._blocks) + _MIN_OUTDATED:
            self._queue = [(block.used, key) for key, block in self._blocks.items()]
            heapify(self._queue)

    def note_accessed(self, key: bytes) -> None:
        block = self._blocks.get(key)
        if block is not None:
            block.used = self._uses.next_use()

    def note_removed(self, key: bytes) -> None:
        block = self._drop(key)
        if block is not None and self._shares_uses:
            self._uses.moving_uses.setdefault(key, block.used)

    def rank_incoming(self, keys: Sequence[bytes], pinned: Collection[bytes]) -> list[int]:
        return list(range(len(keys)))

    def choose_victims(self, size: int, pinned: Collection[bytes], incoming: Sequence[bytes] = ()) -> Sequence[bytes]:
        if not 0 < size <= self.bytes:
            return ()
        latest = min((self._uses.moving_uses.get(key, math.inf) for key in incoming), default=math.inf)
        found: dict[bytes, _Block] = {}
        passed: dict[bytes, _Block] = {}
        total = 0
        for key, block in self._pop_oldest():
            if key in pinned:
                passed[key] = block
                continue
            total += block.size if key not in found else 0
            found[key] = block
            if total >= size or block.used > latest:
                break
        # Pinned blocks need no position; at the far end they are not passed over each time.
        for block in passed.values():
            block.used = self._uses.next_use()
        for key, block in (*found.items(), *passed.items()):
            heappush(self._queue, (block.used, key))
        enough = total >= size and all(block.used <= latest for block in found.values())
        return list(found) if enough else ()

    def replaceable_bytes(self, incoming: bytes) -> int:
        return self.bytes

    def catch_up(self) -> bool:
        return False

    def last_use(self, key: bytes) -> int | None:
        block = self._blocks.get(key)
        return block.used if block is not None else None

    def _pop_oldest(self) -> Iterator[tuple[bytes, _Block]]:
        """Yield blocks in the order of their last use, and remove them from the queue; some may come twice."""
        while self._queue:
            used, key = heappop(self._queue)
            block = self._blocks.get(key)
            if block is not None and used == block.used:
                yield key, block
            elif block is not None:
                heappush(self._queue, (block.used, key))

    def _drop(self, key: bytes) -> _Block | None:
        block = self._blocks.pop(key, None)
        if block is not None:
            self.bytes -= block.size
        return block
