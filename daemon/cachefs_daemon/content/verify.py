"""Reading every cached byte again, comparing it with its checksum, and dropping what is wrong."""

import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

from cachefs.messages import VerifyProgress
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.block_store import BlockStore
from cachefs_daemon.store.index_writer import IndexWriter

REPORT_SECONDS: Final = 0.2
# Keys that are looked up at once: 1 ms.
_PORTION: Final = 4096


@dataclass(slots=True)
class _Sweep:
    """One walk over all blocks, and how far it is."""

    # Keys of the blocks that are still to be read.
    keys: Iterator[bytes]
    # Blocks that were read, or that were gone when it was their turn.
    blocks: int = 0
    # Bytes that were read.
    size: int = 0
    # Blocks that were wrong.
    repaired: int = 0

    def advance(self, store: BlockStore) -> bool:
        """Go on for REPORT_SECONDS. Returns False once all blocks are done."""
        until = time.monotonic() + REPORT_SECONDS
        while time.monotonic() < until:
            key = next(self.keys, None)
            if key is None:
                return False
            self._check(store, key)
        return True

    def _check(self, store: BlockStore, key: bytes) -> None:
        self.blocks += 1
        location = store.get(key)
        if location is None:
            return  # evicted since the walk began
        self.size += location.length
        if store.read(key, location) is None:
            # It was evicted or moved meanwhile, or it is really bad: the store finds out.
            self.repaired += store.repair(key, location)


async def verify(store: BlockStore, index: IndexWriter, threads: Threads) -> AsyncGenerator[VerifyProgress, None]:
    """Read all blocks, also some that come meanwhile. Yields progress, and last a message that says done."""
    total = await threads.background(index.count)
    sweep = _Sweep(chain.from_iterable(index.portions(_PORTION)))
    going = True
    while going:
        going = await threads.background(sweep.advance, store)
        yield VerifyProgress(
            blocks=sweep.blocks,
            blocks_total=max(total, sweep.blocks),
            bytes=sweep.size,
            repaired=sweep.repaired,
            done=not going,
        )
