"""Learns which files samples are from the files that were opened for them, and compares them with the published ones.

A file is kept as its inode number, which identifies snapshot and entry: a million samples take 12 MB, where their paths
would take 270. Each path passed here was just opened, so that the kernel knows its inode number without a request.
Published files are compared with the files opened, since a dataset may use its list in an unexpected way.
"""

import os
import stat
from array import array
from collections.abc import Sequence
from typing import Final

import numpy

from cachefs.inodes import ENTRY_BITS, slots_and_entries
from cachefs.mount_table import MountPoint
from cachefs.publishing.files.inference import MatchCounts, OpenedFiles
from cachefs.publishing.files.shares import FileShare, NumberArray, make_share
from cachefs.publishing.mount_resolver import MountResolver

# Maximum number of samples of a dataset, and of files of all samples together: 64 and 384 MiB.
MAX_SAMPLES: Final = 1 << 26
MAX_FILES: Final = 1 << 25


class FileComparison:
    """Counts how often published files of one consumer differ from the opened ones."""

    def __init__(self) -> None:
        self._counts = MatchCounts()

    @property
    def is_wrong(self) -> bool:
        return self._counts.is_too_wrong

    def compare_opened(self, observed: OpenedFiles, inodes: Sequence[int], shares: Sequence[FileShare]) -> None:
        """inodes: numbers of the files that were opened for the samples."""
        slots, entries = slots_and_entries(numpy.array(inodes, numpy.int64))
        opened = set(zip(slots.tolist(), entries.tolist(), strict=True))
        published = [_published_files(sample, shares) for sample in observed.samples]
        known = [files for files in published if files]
        if not observed.is_complete:
            # Files in the page cache are not seen, but each file that is seen has to be of one of the samples.
            strange = len(opened.difference(*known)) if len(known) == len(published) else 0
            self._counts.add_samples(min(len(known), len(opened)), min(len(known), strange))
            return
        # A sample that is kept in memory is not opened again, alone or in a batch.
        wrong = sum(not files & opened for files in known) if opened else 0
        self._counts.add_samples(len(known), wrong)


def _published_files(sample: int, shares: Sequence[FileShare]) -> set[tuple[int, int]]:
    """Return the slots and entries of the sample's files, as they were published."""
    found = set()
    for share in shares:
        begin, end = numpy.searchsorted(share.samples, [sample, sample + 1])
        found |= {(share.slot, int(entry)) for entry in share.entries[begin:end]}
    return found


class _FileRows:
    """Files of samples, one per row, in the order in which they were learned; rows of one sample are adjacent."""

    def __init__(self) -> None:
        self.samples = array("I")
        self.inodes = array("q")

    def __len__(self) -> int:
        return len(self.inodes)


class LearnedFiles:
    """The files of the samples of one consumer."""

    def __init__(self, length: int) -> None:
        """length: number of samples. Of a dataset with more than MAX_SAMPLES nothing is learned."""
        self.count = 0  # samples whose files are known
        self._length = length
        self._known = bytearray(length if length <= MAX_SAMPLES else 0)  # by sample: 1 where its files are known
        self._own = _FileRows()  # learned in this process and its workers
        self._others = _FileRows()  # learned by other processes of the job
        self._mounts: dict[int, MountPoint] = {}  # by slot, a mount that shows the snapshot

    @property
    def own_row_count(self) -> int:
        """Number of rows that were learned in this process and its workers."""
        return len(self._own)

    @property
    def is_full(self) -> bool:
        """Whether everything is known, or no more can be kept."""
        return self.count == self._length or not self._known or self._room <= 0

    @property
    def _room(self) -> int:
        return MAX_FILES - len(self._own) - len(self._others)

    def set_length(self, length: int) -> None:
        """Set the number of samples, which is larger than was known."""
        self._length = length
        # A new bytearray, since an array may still refer to the old one. Beyond MAX_SAMPLES nothing more is learned.
        self._known = self._known.ljust(min(length, MAX_SAMPLES), b"\0")

    def learn_sample(self, sample: int, paths: Sequence[str], resolver: MountResolver) -> None:
        """Record that the absolute *paths* were opened for the sample. Ignores paths that are no files of a mount."""
        if not self._is_wanted(sample):
            return
        found = [file for path in paths if (file := find_file(path, resolver)) is not None]
        for mount, inode in found:
            self._own.samples.append(sample)
            self._own.inodes.append(inode)
            self._mounts.setdefault(inode >> ENTRY_BITS, mount)
        if found:
            self._mark_known(sample)

    def learn_rows(self, rows: NumberArray, mounts: Sequence[MountPoint]) -> None:
        """Record rows of another process, as its `read_rows` returns them. rows: shape (n, 2), int64; mounts: of the
        snapshots in the rows, by ascending slot."""
        slots = numpy.unique(rows[:, 1] >> ENTRY_BITS).tolist()
        for slot, mount in zip(slots, mounts, strict=True):
            self._mounts.setdefault(slot, mount)
        rows = rows[(rows[:, 0] >= 0) & (rows[:, 0] < len(self._known))]
        known = numpy.frombuffer(self._known, numpy.uint8)
        rows = rows[known[rows[:, 0]] == 0][: self._room]
        self._others.samples.frombytes(rows[:, 0].astype(numpy.uint32).tobytes())
        self._others.inodes.frombytes(rows[:, 1].astype(numpy.int64).tobytes())
        for sample in numpy.unique(rows[:, 0]).tolist():
            self._mark_known(sample)

    def read_rows(self, begin: int, max_rows: int) -> tuple[NumberArray, list[MountPoint]]:
        """Return own rows from number *begin* on for `learn_rows`, about *max_rows* of them, never a part of a
        sample's."""
        samples, inodes = self._own.samples, self._own.inodes
        end = min(begin + max_rows, len(samples))
        while begin < end < len(samples) and samples[end] == samples[end - 1]:
            end += 1
        found = numpy.empty((end - begin, 2), numpy.int64)
        found[:, 0], found[:, 1] = samples[begin:end], inodes[begin:end]
        slots = numpy.unique(found[:, 1] >> ENTRY_BITS).tolist()
        return found, [self._mounts[slot] for slot in slots]

    def make_shares(self) -> list[FileShare]:
        """Return the shares of the samples whose files are known."""
        slots, entries = slots_and_entries(numpy.array(self._own.inodes + self._others.inodes, numpy.int64))
        samples = numpy.array(self._own.samples + self._others.samples, numpy.int64)
        found = []
        for slot, mount in self._mounts.items():
            here = slots == slot
            found.append(make_share(mount, slot, entries[here], samples[here], self._length))
        return found

    def _is_wanted(self, sample: int) -> bool:
        return 0 <= sample < len(self._known) and not self._known[sample] and self._room > 0

    def _mark_known(self, sample: int) -> None:
        self._known[sample] = 1
        self.count += 1


def find_file(path: str, resolver: MountResolver) -> tuple[MountPoint, int] | None:
    """Return the mount that the file *path* lies below, and its inode number; None where it lies below none."""
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            path = os.path.realpath(path)
            status = os.lstat(path)
    except (OSError, ValueError):
        return None
    mount = resolver.mount_of(path)
    if mount is None or not stat.S_ISREG(status.st_mode) or not status.st_ino >> ENTRY_BITS:
        return None
    return mount, status.st_ino
