"""Builds a snapshot from the listing of an origin.

Objects may come in any order, and more of them than fit into memory. Each is one flat row of bytes, `path NUL NUL
facts`, in which NULs also replace the path's slashes, so that sorting the rows of one depth as plain bytes sorts them
by path components. Whenever a bounded number of rows has come, they go to a file as sorted runs. The runs are merged
depth by depth, the deepest first, as a directory needs to know its number of children (`cachefs/snapshot_levels.py`);
entries are then written from the root down.

Keys that cannot be file names are reported and left out, never replaced by others.
"""

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import lmdb
import msgspec
from xxhash import xxh3_128

from cachefs.block import content_id
from cachefs.errors import CachefsError
from cachefs.snapshot import (
    DIRENT_DB,
    FOOTER,
    INODE_DB,
    MAGIC,
    MAX_DBS,
    MAX_PROBLEMS,
    META_DB,
    META_KEY,
    NUMBER,
    PROBLEM_DB,
    SUFFIX,
    Entry,
    SnapshotMeta,
    content_version,
    pack_entry,
    seal,
    verify,
)
from cachefs.snapshot_levels import SnapshotLevels, TreeRow, directory_row, file_row
from cachefs.spill_file import RowRange, SpillFile

MAX_NAME: Final = 255
# Maximum size of a file in bytes, and nanoseconds before and after 1970: beyond these limits, the kernel would show
# neither the file nor its directory.
MAX_SIZE: Final = 1 << 60
MAX_TIME: Final = 1 << 62

BuildProgress = Callable[[str, int, int], None]

# Maximum bytes of rows in memory, with Python's overhead for each, before they are sorted and written to the file.
_MAX_ROW_BYTES: Final = 32 << 20
_ROW_OVERHEAD: Final = 41
# Maximum number of directories remembered as having rows. With more, some directories get several rows.
_MAX_RECENT_DIRECTORIES: Final = 10_000
# Number of entries per transaction.
_BATCH: Final = 10_000
# Address space only, while building. At 200 bytes per entry this is enough for some three hundred million entries.
_MAP_SIZE: Final = 64 << 30


@dataclass(frozen=True, slots=True)
class ListedObject:
    """An object in the origin's listing."""

    # Key of the object, relative to the dataset's URL. A key that ends in a slash stands for a directory.
    key: bytes
    # Bytes of the object.
    size: int
    # When the object was last changed: unix time in nanoseconds.
    mtime_ns: int
    # Its ETag, or a replacement for one (see cachefs.snapshot.content_version).
    version: bytes
    # Whether the object cannot be read before it is restored from an archive.
    is_archived: bool = False


def build_snapshot_file(
    objects: Iterable[ListedObject],
    url: str,
    block_size: int,
    identify: Callable[[bytes], bytes],
    directory: Path,
    progress: BuildProgress = lambda phase, objects, size: None,
) -> Path:
    """Write the snapshot of *objects* into *directory*. Return the file, named after the id; see SnapshotBuilder."""
    with contextlib.closing(SpillFile(directory)) as spill:
        builder = SnapshotBuilder(url, block_size, identify, spill)
        builder.add_objects(objects)
        return builder.write_snapshot(directory, progress)


class BuilderState(msgspec.Struct, frozen=True):
    """The state of a builder, from which another can continue. Its rows are in the first builder's file."""

    # Size of the file in bytes.
    end: int = 0
    # The sorted runs of each depth, from the root down.
    runs: list[list[RowRange]] = []
    # Objects so far, and their bytes.
    objects: int = 0
    total_bytes: int = 0
    # Last change of the root, where an object stands for it: unix time in nanoseconds.
    root_mtime_ns: int = 0
    # The first problems by key, and the number of all problems.
    problems: list[tuple[bytes, str]] = []
    problem_count: int = 0
    # How many of the objects are files.
    files: int = 0


class SnapshotBuilder:
    """Collects a listing, then writes the snapshot once."""

    def __init__(self, url: str, block_size: int, identify: Callable[[bytes], bytes], spill: SpillFile) -> None:
        """identify: key -> the object's full name at its origin, as for cachefs.block.content_id; spill: holds the
        rows, and is closed by the caller."""
        self._url = url
        self._block_size = block_size
        self._identify = identify
        self._spill = spill
        self._levels: list[list[bytes]] = []  # rows of each depth that are in memory
        self._row_bytes = 0  # bytes of these rows
        self._runs: list[list[RowRange]] = []  # sorted runs of each depth
        self._recent: set[bytes] = set()  # directories that have recently got rows
        self._root_mtime_ns = 0
        self._problems: set[tuple[bytes, str]] = set()  # (key, reason): the first MAX_PROBLEMS, and a few more
        self._problem_count = 0
        self._files = 0  # added so far
        self._archived = 0  # archived files of the part of the tree that is written
        self.objects = 0  # added so far
        self.bytes = 0  # total size of these objects

    def add_objects(self, objects: Iterable[ListedObject]) -> None:
        """Add objects of the listing. Raises OSError."""
        for listed in objects:
            if not 0 <= listed.size <= MAX_SIZE:
                self.report_problem(listed.key, f"is listed with the invalid size of {listed.size} bytes")
                continue
            self.objects += 1
            self.bytes += listed.size
            mtime_ns = min(max(listed.mtime_ns, -MAX_TIME), MAX_TIME)
            key = listed.key.removesuffix(b"/") if listed.key != b"/" else listed.key
            if not key:
                self._root_mtime_ns = mtime_ns
            elif reason := _unusable_reason(key):
                self.report_problem(listed.key, reason)
            elif key is not listed.key:
                self._add_marker(key.replace(b"/", b"\0"), listed, mtime_ns)
            else:
                path = key.replace(b"/", b"\0")
                self._files += 1
                row = file_row(path, mtime_ns, listed.size, listed.version, listed.is_archived)
                self._add_row(path.count(b"\0"), row)
                self._add_directory(path.rpartition(b"\0")[0])
        if self._row_bytes > _MAX_ROW_BYTES:
            self._spill_rows()

    def report_problem(self, key: bytes, reason: str) -> None:
        """Record that *key* is not in the tree. A key that is listed twice counts once, up to MAX_PROBLEMS keys."""
        if (key, reason) in self._problems:
            return
        self._problem_count += 1
        self._problems.add((key, reason))
        if len(self._problems) > 2 * MAX_PROBLEMS:
            self._problems = set(sorted(self._problems)[:MAX_PROBLEMS])

    def exclusion_reason(self) -> str:
        """Return why there are no files though some were listed, for people; else ""."""
        if not self._problem_count or self._files:
            return ""
        key, reason = min(self._problems)
        return f"{key.decode(errors='backslashreplace')!r} {reason} ({self._problem_count} left out in all)"

    def export_state(self) -> BuilderState:
        """Return the state for `restore_state`. Raises OSError."""
        self._spill_rows()
        return BuilderState(
            self._spill.end, [list(runs) for runs in self._runs], self.objects, self.bytes,
            self._root_mtime_ns, sorted(self._problems)[:MAX_PROBLEMS], self._problem_count,
            self._files,
        )  # fmt: skip

    def restore_state(self, state: BuilderState) -> None:
        """Continue from the state of another builder, whose file this builder was given.

        Raises OSError, and CachefsError where the file does not have the other builder's rows.
        """
        self._spill.truncate(state.end)
        for runs in state.runs:
            for run in runs:
                for _ in self._spill.read_rows(run):
                    pass
        self._runs = [list(runs) for runs in state.runs]
        self.objects, self.bytes = state.objects, state.total_bytes
        self._root_mtime_ns = state.root_mtime_ns
        self._problems, self._problem_count = set(state.problems), state.problem_count
        self._files = state.files

    def write_snapshot(self, directory: Path, progress: BuildProgress = lambda phase, objects, size: None) -> Path:
        """Write `<id>.snapshot` into *directory*, durably and atomically. Replaces a damaged file of the same name, but
        keeps a good one, as mounts have it open.

        progress: called after each batch with ("building", entries so far, bytes of the files among them). Raises
        OSError, lmdb.Error, CachefsError.
        """
        self._spill_rows()
        levels = SnapshotLevels(directory, self.report_problem)
        with contextlib.closing(levels):
            levels.merge_depths([self._spill.read_rows(run) for run in runs] for runs in reversed(self._runs))
            with tempfile.NamedTemporaryFile(dir=directory, prefix=".building-", suffix=SUFFIX, delete=False) as file:
                temporary = Path(file.name)
            try:
                entries = map(self._make_entry, levels.tree_rows(self._root_mtime_ns))
                snapshot_id = self._write_tables(temporary, entries, progress)
                _append_footer(temporary)
                path = directory / f"{snapshot_id}{SUFFIX}"
                if not _is_complete(path):
                    temporary.rename(path)
            finally:
                temporary.unlink(missing_ok=True)
        _sync_directory(directory)
        return path

    def _add_marker(self, path: bytes, listed: ListedObject, mtime_ns: int) -> None:
        if listed.size:
            self.report_problem(listed.key, f"names a directory, so its {listed.size} bytes cannot be read as a file")
        self._add_row(path.count(b"\0"), directory_row(path, mtime_ns))
        self._add_directory(path.rpartition(b"\0")[0])

    def _add_directory(self, path: bytes) -> None:
        """Add one row for each directory on the way to *path*. Repeated rows become one when rows are merged."""
        while path and path not in self._recent:
            if len(self._recent) >= _MAX_RECENT_DIRECTORIES:
                self._recent.clear()
            self._recent.add(path)
            self._add_row(path.count(b"\0"), directory_row(path))
            path = path.rpartition(b"\0")[0]

    def _add_row(self, depth: int, row: bytes) -> None:
        while len(self._levels) <= depth:
            self._levels.append([])
        self._levels[depth].append(row)
        self._row_bytes += len(row) + _ROW_OVERHEAD

    def _spill_rows(self) -> None:
        self._runs += [[] for _ in self._levels[len(self._runs) :]]
        for runs, rows in zip(self._runs, self._levels, strict=False):
            if rows:
                rows.sort()
                runs.append(self._spill.write_rows(rows))
        self._levels, self._row_bytes = [], 0

    def _make_entry(self, row: TreeRow) -> Entry:
        number, parent, path, is_dir, mtime_ns, size, version, first_child, children, is_archived = row
        self._archived += is_archived
        name = path[path.rfind(b"\0") + 1 :]
        content = b""
        if not is_dir:
            identity = self._identify(path.replace(b"\0", b"/"))
            content = content_id(identity, content_version(version), size, self._block_size)
        return Entry(number, parent, name, is_dir, size, mtime_ns, version, content, first_child, children)

    def _write_tables(self, path: Path, entries: Iterator[Entry], progress: BuildProgress) -> str:
        """Write the LMDB file. Return the snapshot's id."""
        digest = hashlib.blake2b(b"%d %b\0" % (self._block_size, self._url.encode()), digest_size=16)
        self._archived = 0
        files = directories = size = 0
        env = lmdb.open(str(path), subdir=False, lock=False, sync=False, max_dbs=MAX_DBS, map_size=_MAP_SIZE)
        try:
            inode, dirent, problem, meta = (env.open_db(name) for name in (INODE_DB, DIRENT_DB, PROBLEM_DB, META_DB))
            for batch in _batches(entries):
                records = [(NUMBER.pack(entry.number), pack_entry(entry)) for entry in batch]
                names = [(NUMBER.pack(entry.parent) + entry.name, NUMBER.pack(entry.number)) for entry in batch]
                with env.begin(write=True) as txn:
                    txn.cursor(inode).putmulti(records, append=True)
                    txn.cursor(dirent).putmulti(names, append=True)
                for _, record in records:
                    digest.update(record)
                found = sum(not entry.is_dir for entry in batch)
                files += found
                directories += len(batch) - found
                size += sum(entry.size for entry in batch)
                progress("building", files + directories, size)
            problems = _sealed_problems(self._problems)
            for _, record in problems:
                digest.update(record)
            facts = SnapshotMeta(
                id=digest.hexdigest(), url=self._url, block_size=self._block_size, files=files,
                directories=directories - 1, bytes=size, created_ns=time.time_ns(), problem_count=self._problem_count,
                archived=self._archived,
            )  # fmt: skip
            with env.begin(write=True) as txn:
                txn.cursor(problem).putmulti(problems, append=True)
                txn.put(META_KEY, seal(0, msgspec.msgpack.encode(facts)), db=meta)
        finally:
            env.close()
        return facts.id


def _unusable_reason(path: bytes) -> str | None:
    """Return why *path* cannot be a path of files; None where it can."""
    if b"\0" in path:
        return "contains a NUL byte"
    for name in path.split(b"/"):
        if not name:
            return "starts with a slash or has two in a row"
        if name in (b".", b".."):
            return f"has a part `{name.decode()}`"
        if len(name) > MAX_NAME:
            return f"has a part longer than {MAX_NAME} bytes"
    return None


def _batches(entries: Iterator[Entry]) -> Iterator[list[Entry]]:
    batch: list[Entry] = []
    for entry in entries:
        batch.append(entry)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _sealed_problems(problems: set[tuple[bytes, str]]) -> list[tuple[bytes, bytes]]:
    first = sorted(problems)[:MAX_PROBLEMS]
    return [
        (NUMBER.pack(number), seal(number, msgspec.msgpack.encode(problem))) for number, problem in enumerate(first)
    ]


def _is_complete(path: Path) -> bool:
    try:
        verify(path)
    except (CachefsError, OSError):
        return False
    return True


def _append_footer(path: Path) -> None:
    """Append length and digest to the finished LMDB file, and make it durable."""
    digest = xxh3_128()
    with path.open("r+b", buffering=0) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        file.write(FOOTER.pack(MAGIC, file.tell(), digest.digest()))
        os.fchmod(file.fileno(), 0o644)
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
