"""Writes the block index (see cachefs.index for its format and its other readers).

Changes go into an overlay in memory, which this process's reads consult first, and from there in batches into LMDB: a
transaction per block is slow (40 us), and a commit that fails because the disk is full must not fail a fetch.
RecentEntries caches recent lookups and changes.
"""

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from itertools import islice
from pathlib import Path
from typing import Final

import lmdb

from cachefs.block import BlockLocation, seal_location
from cachefs.errors import CachefsError
from cachefs.index import BLOCKS_DB, MAP_SIZE, MAX_DBS, MAX_READERS

# Blocks of one generation: two of them take some 5 MB.
_MOST: Final = 8192
_log = logging.getLogger(__name__)

# Seconds for which a change waits for others to share its commit: other processes see new blocks this much later.
_GATHER_SECONDS: Final = 0.005
_RETRY_SECONDS: Final = 2.0
# Mounts of the daemon's group read the index. As readers of LMDB they write into the lock file, and nowhere else.
_MODE: Final = 0o640
_LOCK_FILE_MODE: Final = 0o660
_SPARE_TRANSACTIONS: Final = 16
# A cache line per reader, and a header.
_LOCK_FILE_BYTES: Final = 64 * MAX_READERS + 4096


class NotCached(Enum):
    """The type of NOT_CACHED, for a block that is not cached."""

    NOT_CACHED = auto()


NOT_CACHED: Final = NotCached.NOT_CACHED

_Entries = dict[bytes, BlockLocation | None]


class RecentEntries:
    """Caches the present state of the index. Thread-safe.

    On its way into a tier a block is looked up half a dozen times, and another one that is evicted for it as often.
    Each lookup in LMDB releases the interpreter lock: where other threads wait for that it costs 0.1 to 1 ms, else
    1 us.

    Each change of the index is also applied here, and what a reader has found in the index is stored only where no
    change can have come in between. There are two generations. Changes go into the young one; once that is full it
    becomes the old one, whose blocks are forgotten. So a change is known until the generations have changed twice.
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


def open_environment(path: Path) -> lmdb.Environment:
    """Open the index without syncing: after a crash of the machine it is rebuilt anyway. Raises lmdb.Error."""
    try:
        _allocate_lock_file(Path(f"{path}-lock"))
    except OSError as error:
        raise lmdb.DiskError(f"{path}-lock: {error.strerror}") from None
    return lmdb.open(
        str(path), subdir=False, sync=False, map_size=MAP_SIZE, max_dbs=MAX_DBS, max_readers=MAX_READERS,
        max_spare_txns=_SPARE_TRANSACTIONS, mode=_MODE,
    )  # fmt: skip


def _allocate_lock_file(path: Path) -> None:
    """Allocate the file, since LMDB's store into a mapped hole of a full disk is a SIGBUS. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _LOCK_FILE_MODE)
    try:
        os.posix_fallocate(fd, 0, _LOCK_FILE_BYTES)
    finally:
        os.close(fd)


class IndexWriter:
    """Writes the index. Thread-safe; one per file and process. Only `commit` may wait for the disk."""

    def __init__(self, path: Path) -> None:
        """Raises CachefsError."""
        self.path = path
        try:
            self._env = open_environment(path)
            self._blocks = self._env.open_db(BLOCKS_DB)
        except (lmdb.Error, OSError) as error:
            raise CachefsError(
                f"the index {path} cannot be opened: {error}; free space there or set another state_dir"
            ) from None
        self._lock = threading.Lock()
        self._recent = RecentEntries()
        self._pending: dict[bytes, BlockLocation | None] = {}
        self._committing: Mapping[bytes, BlockLocation | None] = {}
        self._commit_lock = threading.Lock()
        self._is_failing = False
        self._retry_at = 0.0
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._committer = threading.Thread(target=self._commit_changes, name="index-commit", daemon=True)
        self._committer.start()

    def get(self, key: bytes) -> BlockLocation | None:
        """Return where the block is now."""
        found = self._recent.get(key)
        return self._look_up([key])[0] if isinstance(found, NotCached) else found

    def get_many(self, keys: Sequence[bytes]) -> list[BlockLocation | None]:
        """Return `get` of each key, with one transaction for those that are not cached."""
        known = [self._recent.get(key) for key in keys]
        unknown = [key for key, one in zip(keys, known, strict=True) if isinstance(one, NotCached)]
        found = iter(self._look_up(unknown) if unknown else ())
        return [next(found) if isinstance(one, NotCached) else one for one in known]

    def put(self, key: bytes, location: BlockLocation) -> None:
        self.apply_changes({key: location})

    def delete(self, key: bytes) -> None:
        self.apply_changes({key: None})

    def apply_changes(self, changes: Mapping[bytes, BlockLocation | None]) -> None:
        """Put the keys that have a location, and delete those that have none."""
        lasting = changes
        if self._is_failing:
            lasting = {key: one for key, one in changes.items() if one is not None or not self._forget_change(key)}
        with self._lock:
            self._pending.update(lasting)
            self._recent.apply_changes(changes)
        if not self._changed.is_set():
            self._changed.set()

    def commit(self) -> bool:
        """Make all changes so far visible to other processes. Return False where LMDB fails; the changes are kept."""
        with self._commit_lock:
            if time.monotonic() < self._retry_at:
                return False
            with self._lock:
                changes = self._committing = self._pending
                self._pending = {}
            if not changes:
                return True
            try:
                with self._env.begin(write=True, db=self._blocks) as txn:
                    for key, location in changes.items():
                        if location is None:
                            txn.delete(key)
                        else:
                            txn.put(key, seal_location(key, location))
            except Exception as error:  # any error: else the committing thread would end and these changes be lost
                with self._lock:
                    self._pending = {**changes, **self._pending}
                    self._committing = {}
                self._changed.set()
                if not self._is_failing:
                    _log.error(
                        "the index %s cannot be written: %s; new blocks are known to this daemon only; trying again",
                        self.path, error,
                    )  # fmt: skip
                self._is_failing = True
                self._retry_at = time.monotonic() + _RETRY_SECONDS
                return False
            with self._lock:
                self._committing = {}
            if self._is_failing:
                _log.warning("the index %s is written again", self.path)
                self._is_failing = False
            return True

    def committed_entries(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield key and packed location of all committed entries. For start-up only: it holds a read transaction."""
        with self._env.begin(db=self._blocks) as txn, txn.cursor() as cursor:
            yield from cursor.iternext()

    def count_keys(self) -> int:
        """Return the number of keys; an estimate while the index cannot be written."""
        self.commit()
        with self._env.begin(db=self._blocks) as txn:
            return int(txn.stat(self._blocks)["entries"])

    def key_batches(self, most: int) -> Iterator[list[bytes]]:
        """Yield all keys, in lists of at most *most*; some may be gone by now. A million at once would take 77 MB, and
        a transaction that keeps pages of the file from being reused."""
        # First the uncommitted keys: once committed, they may be behind the cursor.
        fresh = iter([key for key, location in self._overlay().items() if location is not None])
        while portion := list(islice(fresh, most)):
            yield portion
        last = b""
        while True:
            with self._env.begin(db=self._blocks) as txn, txn.cursor() as cursor:
                more = cursor.set_range(last + b"\0") if last else cursor.first()
                portion = list(islice(cursor.iternext(values=False), most)) if more else []
            if not portion:
                return
            last = portion[-1]
            yield portion

    def keys_with_tiers(self, most: int) -> Iterator[tuple[list[bytes], bytes]]:
        """Yield all committed keys in portions of at most *most*, with the number of the tier of each as a byte. 0.5 us
        per block. Between two portions keys may come and go."""
        last = b""
        while True:
            with self._env.begin(db=self._blocks) as txn, txn.cursor() as cursor:
                more = cursor.set_range(last + b"\0") if last else cursor.first()
                portion = list(islice(cursor.iternext(), most)) if more else []
            if not portion:
                return
            last = portion[-1][0]
            yield [key for key, _ in portion], bytes(record[0] for _, record in portion)

    def blocks_of(self, content: bytes) -> list[tuple[bytes, BlockLocation]]:
        """Return every block of one content, in block order."""
        changes = {key: location for key, location in self._overlay().items() if key.startswith(content)}
        found: dict[bytes, BlockLocation | None] = {}
        with self._env.begin(db=self._blocks) as txn, txn.cursor() as cursor:
            more = cursor.set_range(content)
            while more and cursor.key().startswith(content):
                found[cursor.key()] = BlockLocation.unpack(cursor.value())
                more = cursor.next()
        found |= changes
        return [(key, location) for key, location in sorted(found.items()) if location is not None]

    def drop_dead_readers(self) -> None:
        """Remove dead readers: a mount killed in mid-read would pin old pages forever, and the file would grow."""
        self._env.reader_check()

    def close(self) -> bool:
        """Commit and sync. Return whether the file then holds everything."""
        self._closing.set()
        self._changed.set()
        self._committer.join()
        self._retry_at = 0.0
        complete = self.commit()
        try:
            self._env.sync(True)
        except lmdb.Error as error:
            _log.error("the index %s cannot be synced: %s", self.path, error)
            complete = False
        self._env.close()
        return complete

    def _forget_change(self, key: bytes) -> bool:
        """Forget a change of a block that the file does not have. Return False where the file has it: then the deletion
        must be kept. While commits fail, blocks that come and go would otherwise add up without end."""
        with self._lock:
            if key in self._committing:
                return False
            with self._env.begin(db=self._blocks) as txn:
                if txn.get(key) is not None:
                    return False
            self._pending.pop(key, None)
            return True

    def _look_up(self, keys: Sequence[bytes]) -> list[BlockLocation | None]:
        mark = self._recent.generation
        changed = [self._uncommitted_change(key) for key in keys]
        unchanged = [key for key, one in zip(keys, changed, strict=True) if isinstance(one, NotCached)]
        try:
            committed = self._read(unchanged) if unchanged else []
        except lmdb.Error:
            committed = [None] * len(unchanged)
        else:
            self._recent.add_read_entries(zip(unchanged, committed, strict=True), mark)
        read = iter(committed)
        return [next(read) if isinstance(one, NotCached) else one for one in changed]

    def _read(self, keys: Sequence[bytes]) -> list[BlockLocation | None]:
        """Return the committed locations. Raises lmdb.Error."""
        found: list[BlockLocation | None] = []
        with self._env.begin(db=self._blocks) as txn:
            for key in keys:
                record = txn.get(key)
                try:
                    found.append(BlockLocation.unpack(record) if record is not None else None)
                except ValueError:
                    found.append(None)
        return found

    def _uncommitted_change(self, key: bytes) -> BlockLocation | NotCached | None:
        """Return the uncommitted change of a block, or NOT_CACHED."""
        # During a commit, changes are in `_committing`; before it, and after a failed one, in `_pending`.
        found = self._pending.get(key, NOT_CACHED)
        if found is NOT_CACHED:
            found = self._committing.get(key, NOT_CACHED)
        if found is NOT_CACHED:
            found = self._pending.get(key, NOT_CACHED)
        return found

    def _overlay(self) -> dict[bytes, BlockLocation | None]:
        with self._lock:
            return {**self._committing, **self._pending}

    def _commit_changes(self) -> None:
        while not self._closing.is_set():
            self._changed.wait()
            # Before the sleep: while changes keep coming, no further wake-up is needed. The last round finds nothing to
            # do.
            self._changed.clear()
            time.sleep(_GATHER_SECONDS)
            if not self.commit():
                self._closing.wait(_RETRY_SECONDS)
