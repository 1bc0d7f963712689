"""From rows in sorted runs to the tree of a snapshot in the order of its numbers, in bounded memory.

A row is `path NUL NUL kind facts`, in which NULs stand for the path's slashes. Each depth of the tree has runs of its
own. They are merged from the deepest depth to the root: the rows of one directory follow each other, so one counter
tells how many children it has and how new they are. Then numbers are given from the root down: the directories of a
depth have their children in the same order in the next one.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from pathlib import Path
from typing import Final, NamedTuple

from cachefs.snapshot import ROOT
from cachefs.spill_file import Segment, SegmentWriter, SpillFile

_SEPARATOR: Final = b"\0\0"
# A directory comes before a file of the same path.
_DIRECTORY: Final = b"D"
_FILE: Final = b"F"
_IS_DIRECTORY: Final = _DIRECTORY[0]
_EARLIEST: Final = -(1 << 63)
# The time in ns since _EARLIEST, so that bytes sort by time; the size; whether it is archived. The version follows.
_FACTS: Final = struct.Struct(">QQ?")
_TIME: Final = struct.Struct(">Q")
# Of a directory: the newest time in it, as above, and how many children it has. In _families its path follows.
_FAMILY: Final = struct.Struct(">QQ")
# Where a directory is in its depth, and how many children it has.
_PARENT: Final = struct.Struct(">QQ")
# Of a directory in which nothing has a time.
_NO_TIME: Final = 0

Report = Callable[[bytes, str], None]


class TreeRow(NamedTuple):
    """A file or directory, and its place in the tree."""

    number: int
    # Number of the directory that it is in.
    parent: int
    # Relative to the root, with NULs for slashes.
    path: bytes
    is_dir: bool
    mtime_ns: int
    # Bytes of a file; 0 for a directory.
    size: int
    # Of a file; empty for a directory.
    version: bytes
    # Of a directory: the number of its first child, and how many it has. 0 and 0 for a file.
    first_child: int
    children: int
    is_archived: bool = False


class _Level(NamedTuple):
    """One depth, merged."""

    rows: Segment
    # Those of its directories that have children.
    parents: Segment
    # Number of its rows.
    size: int


def file_row(path: bytes, mtime_ns: int, size: int, version: bytes, is_archived: bool = False) -> bytes:
    """path: as in TreeRow."""
    return b"%b\0\0F%b%b" % (path, _FACTS.pack(mtime_ns - _EARLIEST, size, is_archived), version)


def directory_row(path: bytes, mtime_ns: int | None = None) -> bytes:
    """mtime_ns: of the object that stands for the directory, where there is one."""
    return path + (b"\0\0D" if mtime_ns is None else b"\0\0D" + _TIME.pack(mtime_ns - _EARLIEST))


class SnapshotLevels:
    """The rows of all depths, merged. They are in files without names."""

    def __init__(self, directory: Path, report: Report) -> None:
        """directory: where the files are. report: told of (path, reason) for what cannot be in the tree.

        Raises OSError.
        """
        self._rows, self._parents, self._families = (SpillFile(directory) for _ in range(3))
        self._report = report
        self._levels: list[_Level] = []  # from the root down
        self._root = _FAMILY.pack(_NO_TIME - _EARLIEST, 0)

    def merge(self, depths: Iterable[list[Iterator[bytes]]]) -> None:
        """depths: the sorted runs of each depth, the deepest first. Raises OSError, CachefsError."""
        families = Segment(0, 0)
        for runs in depths:
            level, families = self._merged(merge(*runs), families)
            self._levels.insert(0, level)
        for family in self._families.read(families):
            self._root = family

    def tree(self, root_mtime_ns: int) -> Iterator[TreeRow]:
        """Everything, in the order of the numbers. root_mtime_ns: the root is at least so new.

        Raises OSError, CachefsError.
        """
        newest, children = _FAMILY.unpack_from(self._root)
        mtime_ns = max(root_mtime_ns, newest + _EARLIEST)
        first = ROOT + 1
        yield TreeRow(ROOT, ROOT, b"", True, mtime_ns, 0, b"", first, children)
        parents = iter([(ROOT, children)])
        for level in self._levels:
            yield from self._numbered(level, first, parents)
            parents = self._numbered_parents(level, first)
            first += level.size

    def close(self) -> None:
        for file in (self._rows, self._parents, self._families):
            file.close()

    def _merged(self, sorted_rows: Iterator[bytes], below: Segment) -> tuple[_Level, Segment]:
        """One depth, and the families to which its rows belong. below: the families of which its directories are the
        parents."""
        rows, parents, families = (SegmentWriter(file) for file in (self._rows, self._parents, self._families))
        children = self._families.read(below)
        next_family = next(children, b"")
        # The directory of the last row, the newest time in it as in _FACTS, and its children so far.
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
        """(path, kind and facts), once for each path. A directory stays where a file has its path, and is as new as the
        newest object that stands for it. Of several files the last one, which is the newest, stays."""
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
                self._report(path.replace(b"\0", b"/"), "is a directory too: other keys continue it with a slash")
            elif kept_facts != facts:
                self._report(
                    path.replace(b"\0", b"/"),
                    "is listed twice; the newest is used, and of those with one time the largest",
                )
                kept_facts = facts
        if kept_facts:
            yield kept_path, kept_facts

    def _numbered(self, level: _Level, first: int, parents: Iterator[tuple[int, int]]) -> Iterator[TreeRow]:
        """first: the number of the first row. parents: (number, children) of the directories above, in order."""
        first_child = first + level.size
        parent, left = ROOT, 0
        for number, row in enumerate(self._rows.read(level.rows), first):
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
        for row in self._parents.read(level.parents):
            index, children = _PARENT.unpack(row)
            yield first + index, children
