"""Verifies all cached blocks against their checksums, and drops bad ones."""

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
# Keys looked up at once: 1 ms.
_PORTION: Final = 4096


@dataclass(slots=True)
class _Verification:
    # Keys of blocks left to read.
    keys: Iterator[bytes]
    # Blocks read, or evicted before their turn.
    blocks: int = 0
    # Bytes read.
    size: int = 0
    # Bad blocks.
    repaired: int = 0

    def advance(self, store: BlockStore) -> bool:
        """Verify blocks for REPORT_SECONDS. Returns False once all blocks are done."""
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
            # Evicted or moved meanwhile, or really bad: the store finds out.
            self.repaired += store.repair(key, location)


async def verify(store: BlockStore, index: IndexWriter, threads: Threads) -> AsyncGenerator[VerifyProgress, None]:
    """Read all blocks, and possibly some that arrive meanwhile. Yields progress, and finally a message with done
    set."""
    total = await threads.background(index.count_keys)
    sweep = _Verification(chain.from_iterable(index.key_batches(_PORTION)))
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
