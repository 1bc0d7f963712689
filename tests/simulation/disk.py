"""A simulated disk of one node, with the interface of its block store and of a peer server's outlet.

It outlives the node's processes. It can be full, slow, or hang; a restart may find blocks lost or damaged.
"""

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cachefs.block import MEMORY, BlockLocation, piece_checksums, pieces_match
from cachefs.errors import StoreFull
from cachefs_cluster.peers.block_sender import BlockSender
from cachefs_cluster.peers.protocol import RequestedBlock, block_end, block_start
from cachefs_cluster.peers.wire import Wire
from cachefs_daemon.store.block_store import BlockToStore

# Where a block begins.
ALIGNMENT: Final = 4096


@dataclass
class _Stored:
    location: BlockLocation
    data: bytes


class Disk:
    """All blocks of one node."""

    def __init__(self, host: str, budget: int, chances: random.Random, trace: Callable[..., None]) -> None:
        """budget: bytes."""
        self.host = host
        self.budget = budget
        self.chances = chances
        self.trace = trace
        self.is_full = False
        self.slow = 0.0  # seconds that a write takes at most
        self.hangs = False
        self.used = 0
        self.repairs = 0
        self.blocks: OrderedDict[bytes, _Stored] = OrderedDict()  # by key, oldest first
        self._offset = 0

    # --- what the fetcher asks: cachefs_daemon.store.block_store.BlockStore ---------------------------------------

    def get(self, key: bytes) -> BlockLocation | None:
        found = self.blocks.get(key)
        return found.location if found is not None else None

    def put_many(self, blocks: Sequence[BlockToStore]) -> list[BlockLocation | StoreFull | None]:
        while self.hangs:
            time.sleep(0.5)
        if self.slow:
            time.sleep(self.slow * self.chances.random())
        return [self._put(block) for block in blocks]

    def _put(self, block: BlockToStore) -> BlockLocation | StoreFull | None:
        known = self.get(block.key)
        if known is not None:
            return known
        data = bytes(block.data)
        if self.is_full or len(data) > self.budget:
            return StoreFull("the disk is full") if block.may_be_transient else None
        while self.used + len(data) > self.budget:
            self.drop(next(iter(self.blocks)))
        checksums = block.checksums or piece_checksums(block.key, data)
        location = BlockLocation(MEMORY, self._offset >> 26, self._offset & 0x3FFFFFF, len(data), checksums)
        self._offset += -(-len(data) // ALIGNMENT) * ALIGNMENT
        self.blocks[block.key] = _Stored(location, data)
        self.used += len(data)
        return location

    def read(self, key: bytes, location: BlockLocation) -> bytes | None:
        """Return the block's bytes if they are right."""
        data = self.raw(key, location)
        return data if data is not None and pieces_match(key, location.checksums, 0, memoryview(data)) else None

    def raw(self, key: bytes, location: BlockLocation) -> bytes | None:
        """Return what is at a place, right or not."""
        found = self.blocks.get(key)
        return found.data if found is not None and found.location == location else None

    def repair(self, key: bytes, location: BlockLocation) -> bool:
        if self.get(key) != location or self.read(key, location) is not None:
            return False
        self.drop(key)
        self.repairs += 1
        return True

    def drop_unresponsive(self, key: bytes, location: BlockLocation) -> bool:
        if self.get(key) != location:
            return False
        self.drop(key)
        return True

    def evict(self, keys: Iterable[bytes]) -> tuple[int, int]:
        found = [key for key in keys if key in self.blocks]
        size = sum(len(self.blocks[key].data) for key in found)
        for key in found:
            self.drop(key)
        return len(found), size

    def drop(self, key: bytes) -> None:
        """Forget a block."""
        self.used -= len(self.blocks.pop(key).data)

    # --- faults ---------------------------------------------------------------------------------------------------

    def damage(self, *, lost: float, corrupt: float) -> None:
        """Lose these shares of all blocks, or flip a bit of them."""
        for key in list(self.blocks):
            chance = self.chances.random()
            if chance < lost:
                self.drop(key)
                self.trace("block lost", self.host)
            elif chance < lost + corrupt:
                data = bytearray(self.blocks[key].data)
                data[self.chances.randrange(len(data))] ^= 1 << self.chances.randrange(8)
                self.blocks[key].data = bytes(data)
                self.trace("block corrupt", self.host)


class SimulatedOutlet:
    """Sends blocks of a disk to a peer: `cachefs_cluster.peers.block_sender.BlockSender`."""

    send_fetched = staticmethod(BlockSender.send_fetched)

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.segments = self

    def forget_unlinked(self) -> None: ...

    def find_block(self, block: RequestedBlock) -> BlockLocation | None:
        location = self._disk.get(block.key)
        return location if location is not None and location.length == block.length else None

    def has_right_bytes(self, block: RequestedBlock, location: BlockLocation) -> bool:
        return self._disk.read(block.key, location) is not None

    def send_block(self, wire: Wire, at: int, block: RequestedBlock, location: BlockLocation) -> bool:
        data = self._disk.raw(block.key, location)
        if data is None:
            return False
        wire.send(block_start(at, location.tier, location.length, location.checksums), more=True)
        wire.send(data, more=True)
        wire.send(block_end(stayed=self._disk.get(block.key) == location), more=True)
        return True


def any_store(disk: Disk) -> Any:
    """Return the disk as what the fetcher takes."""
    return disk
