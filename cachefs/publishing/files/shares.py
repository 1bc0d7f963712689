"""Maps samples to files: the files of a job's samples by snapshot, and the orders of files that follow."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy
from numpy.typing import NDArray

from cachefs.inodes import ENTRY_BITS, slots_and_entries
from cachefs.mount_table import MountPoint
from cachefs.publishing.mount_resolver import MountResolver

OrderArray = NDArray[numpy.uint32]
NumberArray = NDArray[numpy.int64]

# Maximum number of names in one directory that are looked up one by one. A look-up through the mount is one request; a
# listing is three, of a directory that may be large.
FEW_NAMES: Final = 3
# Number of threads that read directories, since each request to the mount waits for other processes: on a busy machine,
# one thread takes 3 ms per directory.
THREADS: Final = 8
# Number of directories passed to the threads at a time.
DIRECTORIES_AT_ONCE: Final = 4096


@dataclass(frozen=True)
class FileShare:
    """The files that samples have in one snapshot.

    The daemon knows only files. A sample may have no file or several, so orders and positions are translated.
    """

    # A mount below which the files were found.
    mount: MountPoint
    # Slot of the snapshot's inodes (cachefs.inodes).
    slot: int
    # Shape (files,), uint32: the number of each file in the snapshot.
    entries: OrderArray
    # Shape (files,), int64, ascending: the sample that each file belongs to.
    samples: NumberArray
    # Number of samples.
    length: int
    # Whether the samples are the records of the files; the daemon finds how many records each file has.
    of_records: bool = False

    @cached_property
    def is_one_to_one(self) -> bool:
        """Whether positions of the daemon and the job are equal, as each sample is one file, or one record."""
        return self.of_records or (len(self.samples) == self.length and bool((self._counts == 1).all()))

    @cached_property
    def _counts(self) -> NumberArray:
        return numpy.bincount(self.samples, minlength=self.length)

    @cached_property
    def _first(self) -> NumberArray:
        return numpy.cumsum(self._counts) - self._counts

    def file_order(self, samples: OrderArray) -> OrderArray:
        """Return the files in the order of *samples*, shape (n,), uint32: indices of `entries`, shape (m,), uint32."""
        if self.of_records:
            return samples
        samples = self._known_samples(samples)
        if self.is_one_to_one:
            return samples
        counts = self._counts[samples]
        before = numpy.cumsum(counts) - counts
        within = numpy.arange(int(counts.sum())) - numpy.repeat(before, counts)
        return (numpy.repeat(self._first[samples], counts) + within).astype(numpy.uint32)

    def file_position(self, samples: OrderArray, position: int) -> int:
        """Return how many files of `order(samples)` belong to the first *position* of the samples."""
        return position if self.is_one_to_one else int(self._counts[self._known_samples(samples[:position])].sum())

    def _known_samples(self, samples: OrderArray) -> OrderArray:
        return samples if not len(samples) or samples.max() < self.length else samples[samples < self.length]


@dataclass(frozen=True, slots=True)
class _DirectoryNames:
    """Names to find in a directory, and the sample of each."""

    path: str  # with a slash at the end
    names: list[str] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)


def find_shares(
    files: Sequence[str | Sequence[str]], resolver: MountResolver, length: int | None = None
) -> list[FileShare]:
    """Return the shares of samples, each of which has the path or paths in *files*.

    Leaves out paths below no mount, and names that do not exist. length: number of samples, where it is not that of
    *files*.

    A directory with many of the files is listed once, which gives all inode numbers in it, and takes no request if the
    job itself has listed the directory before. In other directories the files are looked up. Raises OSError.
    """
    found: dict[int, tuple[MountPoint, list[NumberArray], list[NumberArray]]] = {}
    directories = _group_by_directory(files)
    for directory, (mount, inodes) in zip(directories, _find_inodes(directories, resolver), strict=True):
        if mount is None:
            continue
        slots, entries = slots_and_entries(inodes)
        samples = numpy.array(directory.samples, dtype=numpy.int64)
        for slot in numpy.unique(slots):
            if slot:
                here = slots == slot
                _, slot_entries, slot_samples = found.setdefault(int(slot), (mount, [], []))
                slot_entries.append(entries[here])
                slot_samples.append(samples[here])
    return [
        make_share(mount, slot, numpy.concatenate(entries), numpy.concatenate(samples), length or len(files))
        for slot, (mount, entries, samples) in found.items()
    ]


def empty_share(mount: MountPoint, inode: int) -> FileShare:
    """Return a share without files, of the snapshot that contains the file with this inode number."""
    return make_share(mount, inode >> ENTRY_BITS, numpy.empty(0, numpy.int64), numpy.empty(0, numpy.int64), 0)


def _group_by_directory(files: Sequence[str | Sequence[str]]) -> list[_DirectoryNames]:
    found: dict[str, _DirectoryNames] = {}
    for sample, path in _sample_paths(files):
        begin = path.rfind("/") + 1
        directory = found.get(path[:begin])
        if directory is None:
            directory = found[path[:begin]] = _DirectoryNames(path[:begin])
        directory.names.append(path[begin:])
        directory.samples.append(sample)
    return list(found.values())


def _find_inodes(
    directories: Sequence[_DirectoryNames], resolver: MountResolver
) -> Iterator[tuple[MountPoint | None, NumberArray]]:
    """Yield the mount of each directory, and the inode numbers of its names. Raises OSError."""

    def look(directory: _DirectoryNames) -> tuple[MountPoint | None, NumberArray]:
        mount = resolver.mount_of(directory.path)
        return mount, _inode_numbers(directory.path, directory.names) if mount is not None else numpy.empty(
            0, numpy.int64
        )

    if len(directories) <= THREADS:
        yield from map(look, directories)
        return
    with ThreadPoolExecutor(THREADS) as threads:
        for begin in range(0, len(directories), DIRECTORIES_AT_ONCE):
            yield from threads.map(look, directories[begin : begin + DIRECTORIES_AT_ONCE])


def _sample_paths(files: Sequence[str | Sequence[str]]) -> Iterator[tuple[int, str]]:
    for sample, of_sample in enumerate(files):
        if isinstance(of_sample, str):
            yield sample, of_sample
        else:
            for path in of_sample:
                yield sample, path


def _inode_numbers(directory: str, names: Sequence[str]) -> NumberArray:
    """Return the inode number of each name, 0 for a name that does not exist: shape (n,), int64. Raises OSError."""
    wanted = set(names)
    known = _look_up_names(directory, wanted) if len(wanted) <= FEW_NAMES else _list_directory(directory)
    return numpy.array([known.get(name, 0) for name in names], dtype=numpy.int64)


def _look_up_names(directory: str, names: set[str]) -> dict[str, int]:
    """Return the inode numbers of the names that a listing would have. Raises OSError."""
    known = {}
    for name in names - {"", ".", ".."}:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            known[name] = os.lstat(os.path.join(directory, name)).st_ino
    return known


def _list_directory(directory: str) -> dict[str, int]:
    """Return the inode number of each name in the directory. Raises OSError."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory or ".") as entries:
        return {entry.name: entry.inode() for entry in entries}
    return {}


def make_share(mount: MountPoint, slot: int, entries: NumberArray, samples: NumberArray, length: int) -> FileShare:
    """Return the share with these entries, each of which belongs to one of the *samples*, in any order."""
    order = numpy.argsort(samples, kind="stable")
    return FileShare(mount, slot, entries[order].astype(numpy.uint32), samples[order], length)
