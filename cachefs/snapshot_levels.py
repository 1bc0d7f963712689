"""Merges rows in sorted runs into the tree of a snapshot, ordered by number, in bounded memory.

A row is `path NUL NUL kind facts`, in which NULs replace the path's slashes. Each depth of the tree has runs of its
own. They are merged from the deepest depth to the root: the rows of one directory are adjacent, so one counter gives
its number of children and their newest time. Then numbers are assigned from the root down: the directories of a depth
have their children in the same order in the next one.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from pathlib import Path
from typing import Final, NamedTuple

from cachefs.snapshot import ROOT
from cachefs.spill_file import RowRange, RowRangeWriter, SpillFile

_SEPARATOR: Final = b"\0\0"
# Sorts a directory before a file of the same path.
_DIRECTORY: Final = b"D"
_FILE: Final = b"F"
_IS_DIRECTORY: Final = _DIRECTORY[0]
_EARLIEST: Final = -(1 << 63)
# Time in ns since _EARLIEST, so that bytes sort by time; size; whether the object is archived. The version follows.
_FACTS: Final = struct.Struct(">QQ?")
_TIME: Final = struct.Struct(">Q")
# The newest time in a directory, as above, and its number of children. In _families its path follows.
_FAMILY: Final = struct.Struct(">QQ")
# Index of a directory in its depth, and its number of children.
_PARENT: Final = struct.Struct(">QQ")
# Time of a directory in which nothing has a time.
_NO_TIME: Final = 0

ProblemCallback = Callable[[bytes, str], None]


class TreeRow(NamedTuple):
    """A file or directory, and its place in the tree."""

    number: int
    # Number of the parent directory.
    parent: int
    # Relative to the root, with NULs in place of slashes.
    path: bytes
    is_dir: bool
    mtime_ns: int
    # Bytes of a file; 0 for a directory.
    size: int
    # Version of a file; empty for a directory.
    version: bytes
    # Number of the first child and number of children of a directory; 0 and 0 for a file.
    first_child: int
    children: int
    is_archived: bool = False


class _Level(NamedTuple):
    """One merged depth."""

    rows: RowRange
    # The directories with children among the rows.
    parents: RowRange
    # Number of its rows.
    size: int


def file_row(path: bytes, mtime_ns: int, size: int, version: bytes, is_archived: bool = False) -> bytes:
    """Return the row of a file. path: as in TreeRow."""
    return b"%b\0\0F%b%b" % (path, _FACTS.pack(mtime_ns - _EARLIEST, size, is_archived), version)


def directory_row(path: bytes, mtime_ns: int | None = None) -> bytes:
    """Return the row of a directory. mtime_ns: of the object that stands for the directory, where there is one."""
    return path + (b"\0\0D" if mtime_ns is None else b"\0\0D" + _TIME.pack(mtime_ns - _EARLIEST))


class SnapshotLevels:
    """The merged rows of all depths, in files without names."""

    def __init__(self, directory: Path, report: ProblemCallback) -> None:
        """directory: for the files; report: gets (path, reason) of objects that cannot be in the tree. Raises
        OSError."""
        self._rows, self._parents, self._families = (SpillFile(directory) for _ in range(3))
        self._report = report
        self._levels: list[_Level] = []  # from the root down
        self._root = _FAMILY.pack(_NO_TIME - _EARLIEST, 0)

    def merge_depths(self, depths: Iterable[list[Iterator[bytes]]]) -> None:
        """Merge all depths. depths: the sorted runs of each depth, the deepest first. Raises OSError, CachefsError."""
        families = RowRange(0, 0)
        for runs in depths:
            level, families = self._merge_depth(merge(*runs), families)
            self._levels.insert(0, level)
        for family in self._families.read_rows(families):
            self._root = family

    def tree_rows(self, root_mtime_ns: int) -> Iterator[TreeRow]:
        """Yield all rows, sorted by number. root_mtime_ns: minimum time of the root. Raises OSError, CachefsError."""
        newest, children = _FAMILY.unpack_from(self._root)
        mtime_ns = max(root_mtime_ns, newest + _EARLIEST)
        first = ROOT + 1
        yield TreeRow(ROOT, ROOT, b"", True, mtime_ns, 0, b"", first, children)
        parents = iter([(ROOT, children)])
        for level in self._levels:
            yield from self._numbered_rows(level, first, parents)
            parents = self._numbered_parents(level, first)
            first += level.size

    def close(self) -> None:
        for file in (self._rows, self._parents, self._families):
            file.close()

    def _merge_depth(self, sorted_rows: Iterator[bytes], below: RowRange) -> tuple[_Level, RowRange]:
        """Merge one depth. Return it, and the families to which its rows belong. below: the families whose parents are
        the directories of this depth."""
        rows, parents, families = (RowRangeWriter(file) for file in (self._rows, self._parents, self._families))
        children = self._families.read_rows(below)
        next_family = next(children, b"")
        # Directory of the last row, the newest time in it as in _FACTS, and the number of its children so far.
        directory, newest, count = b"", _NO_TIME - _EARLIEST, 0
        size = 0
        for path, facts in self._one_per_path(sorted_rows):
            if facts[0] == _IS_DIRECTORY:
                own = _TIME.unpack_from(facts, 1)[0] if len(facts) > 1 else _NO_TIME - _EARLIEST
                family = 0, 0
                if next_family[_FAMILY.size :] == path:
                    family = _FAMILY.unpack_from(next_family)
                    parents.append(_PARENT.pack(size, family[1]))
                    next_family = next(children, b"")
                time = max(_NO_TIME - _EARLIEST, own, family[0])
                facts = _DIRECTORY + _FAMILY.pack(time, family[1])
            else:
                time = _TIME.unpack_from(facts, 1)[0]
            rows.append(path + _SEPARATOR + facts)
            size += 1
            above = path.rpartition(b"\0")[0]
            if above != directory:
                if count:
                    families.append(_FAMILY.pack(newest, count) + directory)
                directory, newest, count = above, _NO_TIME - _EARLIEST, 0
            newest = max(newest, time)
            count += 1
        if count:
            families.append(_FAMILY.pack(newest, count) + directory)
        return _Level(rows.finish(), parents.finish(), size), families.finish()

    def _one_per_path(self, rows: Iterator[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Yield (path, kind and facts), once for each path. A directory wins over a file of the same path, and has the
        time of the newest object that stands for it. Of several files the last one, which is the newest, wins."""
        kept_path, kept_facts = b"", b""
        for row in rows:
            path, _, facts = row.partition(_SEPARATOR)
            if path != kept_path:
                if kept_facts:
                    yield kept_path, kept_facts
                kept_path, kept_facts = path, facts
            elif facts[0] == _IS_DIRECTORY:
                kept_facts = facts
            elif kept_facts[0] == _IS_DIRECTORY:
                self._report(path.replace(b"\0", b"/"), "is also a directory: other keys begin with it and a slash")
            elif kept_facts != facts:
                self._report(
                    path.replace(b"\0", b"/"),
                    "is listed twice; the newest object is used, or the largest of several with the same time",
                )
                kept_facts = facts
        if kept_facts:
            yield kept_path, kept_facts

    def _numbered_rows(self, level: _Level, first: int, parents: Iterator[tuple[int, int]]) -> Iterator[TreeRow]:
        """Yield numbered rows. first: the first row's number; parents: (number, children) of the level above, in
        order."""
        first_child = first + level.size
        parent, left = ROOT, 0
        for number, row in enumerate(self._rows.read_rows(level.rows), first):
            if not left:
                parent, left = next(parents)
            left -= 1
            path, _, facts = row.partition(_SEPARATOR)
            if facts[0] == _IS_DIRECTORY:
                time, more = _FAMILY.unpack_from(facts, 1)
                yield TreeRow(number, parent, path, True, time + _EARLIEST, 0, b"", first_child, more)
                first_child += more
            else:
                time, size, is_archived = _FACTS.unpack_from(facts, 1)
                version = facts[1 + _FACTS.size :]
                yield TreeRow(number, parent, path, False, time + _EARLIEST, size, version, 0, 0, is_archived)

    def _numbered_parents(self, level: _Level, first: int) -> Iterator[tuple[int, int]]:
        for row in self._parents.read_rows(level.parents):
            index, children = _PARENT.unpack(row)
            yield first + index, children
