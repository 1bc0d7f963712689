"""Read access to the node's block index: block key -> Location, in one LMDB file that only the daemon writes.

A look-up takes 1.3 us including the transaction, so a mount asks the index at each read and keeps no state. A damaged
entry reads as absent: the caller then asks the daemon, which fetches the block again.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import lmdb

from cachefs.block import BlockLocation
from cachefs.errors import CachefsError

BLOCKS_DB: Final = b"blocks"
# Address space only, since LMDB files are sparse. 64 GiB of index hold about half a billion blocks.
MAP_SIZE: Final = 64 << 30
MAX_READERS: Final = 1024
MAX_DBS: Final = 8


class IndexReader:
    """A read-only view of the index. LMDB allows one environment per file and process, which must not survive a
    fork."""

    def __init__(self, path: Path) -> None:
        """Raises CachefsError."""
        self.path = path
        self.is_open = True
        with contextlib.ExitStack() as undo:
            try:
                self._env = lmdb.open(
                    str(path),
                    readonly=True,
                    subdir=False,
                    max_dbs=MAX_DBS,
                    map_size=MAP_SIZE,
                    max_readers=MAX_READERS,
                    readahead=False,
                )
                undo.callback(self._env.close)
                self._blocks = self._env.open_db(BLOCKS_DB, create=False)
                self._opened = os.stat(path)
                self.owner = self._opened.st_uid  # the daemon's uid, to whom the segments must belong
            except (lmdb.Error, OSError) as error:
                raise CachefsError(f"the index {path} cannot be read: {error}") from None
            undo.pop_all()

    def get(self, key: bytes) -> BlockLocation | None:
        try:
            with self._env.begin(db=self._blocks) as txn:
                record = txn.get(key)
            return BlockLocation.unpack(record) if record is not None else None
        except (lmdb.Error, ValueError):
            return None

    def blocks_of(self, content: bytes) -> Iterator[tuple[bytes, BlockLocation]]:
        """Yield all cached blocks of one content, sorted by number. Iterate quickly: this holds a read transaction."""
        with self._env.begin(db=self._blocks) as txn, txn.cursor() as cursor:
            found = cursor.set_range(content)
            while found and cursor.key().startswith(content):
                with contextlib.suppress(ValueError):
                    yield cursor.key(), BlockLocation.unpack(cursor.value())
                found = cursor.next()

    def is_current(self) -> bool:
        """Return whether the file still is the one that was opened, and this reader is open."""
        try:
            return self.is_open and os.path.samestat(self._opened, os.stat(self.path))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        # A new file may get the inode number of the closed one.
        self.is_open = False
        self._env.close()
