"""Writes segments, and scans their records without the index.

A segment is a file of records, each at a 4 KiB boundary and self-describing:

    magic 8 | block key 20 | length 4 | piece checksums 8 each | checksum of all that 8 | data

A record is evicted by punching a hole over its whole 4 KiB-aligned span, so the space a segment takes is the sum of its
live spans. A segment has its full size from the start and is filled from its start: XFS gives a file that grows twice
the space it needs, for writes to come (measured: 120 MiB for 58). What follows the last record is a hole.

Every batch opens the file again, by its name in the tier's directory, wherever that directory's path leads by now: that
takes 5 us beside a write of 30 us or more, and no thread can close or reuse a descriptor that another one uses. Keeping
files open has shown no gain (puts onto the SSD beside a busy thread: 0.48 ms of processor time before and after), and
no disk could be remounted read-only. Symbolic links, which another user may have planted, are not followed.
"""

import errno
import os
import re
import stat
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from cachefs.block import KEY_SIZE, PIECE_SIZE, BlockLocation, piece_checksums, piece_count, pieces_match
from cachefs.segment import segment_path
from cachefs_daemon.store import batch_io

Data = batch_io.Buffer
# A part of a segment: the segment's number, start and length in bytes.
SegmentSpan = tuple[int, int, int]

PAGE: Final = 4096
_MAGIC: Final = b"cachefs\x01"
_HEAD: Final = struct.Struct(f"<8s{KEY_SIZE}sI")
_SEAL: Final = struct.Struct("<Q")
_HEADER: Final = _HEAD.size + _SEAL.size  # bytes of a header without its checksums
_NAME: Final = re.compile(r"([0-9a-f]{8})\.seg")
_MODE: Final = 0o640
# O_NONBLOCK: a pipe in the place of a segment would block the open.
_SAFELY: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# The scan of a segment ends after this many unreadable pages, since each may take seconds.
_MAX_UNREADABLE: Final = 16


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """The name of a segment's file."""

    root: Path  # the tier's directory, for messages
    directory: int  # its descriptor
    number: int

    @property
    def name(self) -> str:
        return segment_name(self.number)

    @property
    def path(self) -> Path:
        return segment_path(self.root, self.number)


@dataclass(frozen=True, slots=True)
class Record:
    """One block in a segment."""

    key: bytes
    start: int  # offset of its header, in bytes from the start of the segment
    length: int  # bytes of the block
    checksums: bytes  # of the block's pieces, 8 bytes each

    def location(self, tier: int, segment: int) -> BlockLocation:
        return BlockLocation(tier, segment, self.start + header_size(self.length), self.length, self.checksums)


def segment_name(number: int) -> str:
    return f"{number:08x}.seg"


def segment_number(name: str) -> int | None:
    """Return the number of a segment file's name; None for any other file."""
    match = _NAME.fullmatch(name)
    return int(match[1], 16) if match else None


def page_ceil(size: int) -> int:
    return -(-size // PAGE) * PAGE


def header_size(length: int) -> int:
    return _HEADER + 8 * piece_count(length)


def span(length: int) -> int:
    """Return the bytes of disk that the record of a block of *length* bytes takes."""
    # Written out, since it is called a dozen times per block: 0.3 us, where calls of `header_size` took 1.
    return -(-(_HEADER + 8 * -(-length // PIECE_SIZE) + length) // PAGE) * PAGE


def spans(lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Return `span` of each length: shape (n,). Most blocks have one of few lengths."""
    different, which = np.unique(lengths, return_inverse=True)
    found: npt.NDArray[np.int64] = np.array([span(length) for length in different.tolist()], np.int64)[which]
    return found


def record_start(location: BlockLocation) -> int:
    return location.offset - header_size(location.length)


def create(file: SegmentFile, size: int) -> None:
    """Create a segment of *size* bytes, all of them a hole. Raises FileExistsError or another OSError."""
    with _opened(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        os.ftruncate(fd, size)


def write_records(
    file: SegmentFile, records: Sequence[tuple[Record, Data]], *, allocate: bool
) -> tuple[int, OSError | None]:
    """Write records into a segment; *allocate*: each as an extent of its own (see `TierDirectory`). Return how many of
    the first ones were written, and the error of the next one."""
    writes = [(record.start, (_header(record, file.number), data)) for record, data in records]
    unit = PAGE if allocate else 0
    done, failed = batch_io.write_many(file.directory, os.O_WRONLY | _SAFELY, file.name.encode(), unit, writes)
    return done, OSError(failed, os.strerror(failed)) if failed else None


def open_to_write(file: SegmentFile) -> int:
    """Return a descriptor of a segment, for writing. Raises OSError."""
    return _open(file, os.O_WRONLY)


def write_record(file: SegmentFile, fd: int, record: Record, data: Data, *, allocate: bool) -> None:
    """Write one record into a segment that is open as *fd*; *allocate*: as in `write_records`. Raises OSError."""
    batch_io.write_parts(fd, record.start, (_header(record, file.number), data), PAGE if allocate else 0)


def _header(record: Record, segment: int) -> bytes:
    head = _HEAD.pack(_MAGIC, record.key, record.length) + record.checksums
    return head + _seal(head, segment, record.start)


def read_block(file: SegmentFile, key: bytes, location: BlockLocation) -> bytes | None:
    """Return the block's verified bytes; None where they are damaged or not there."""
    try:
        with _opened(file, os.O_RDONLY) as fd:
            data = os.pread(fd, location.length, location.offset)
    except OSError:
        return None
    if len(data) < location.length or not pieces_match(key, location.checksums, 0, memoryview(data)):
        return None
    return data


def read_into(directory: int, blocks: Sequence[tuple[bytes, BlockLocation, memoryview]]) -> list[bool]:
    """Read blocks (key, location, buffer of its length) of a tier into their buffers. directory: the tier's descriptor.
    Return False for each that is damaged or not there."""
    reads = [(segment_name(location.segment).encode(), location.offset, buffer) for _, location, buffer in blocks]
    got = batch_io.read_many(directory, os.O_RDONLY | _SAFELY, reads)
    return [
        size == location.length and piece_checksums(key, buffer) == location.checksums
        for size, (key, location, buffer) in zip(got, blocks, strict=True)
    ]


def read_ahead(file: SegmentFile, location: BlockLocation) -> None:
    """Let the kernel begin to read a block into its page cache. Raises OSError."""
    with _opened(file, os.O_RDONLY) as fd:
        os.posix_fadvise(fd, location.offset, location.length, os.POSIX_FADV_WILLNEED)


def punch(directory: int, spans: Sequence[SegmentSpan]) -> tuple[list[SegmentSpan], OSError | None]:
    """Free the disk space of spans of segments. directory: the tier's descriptor. Return the spans that could not be
    freed, and the error. A file that is gone is no error: so is its space."""
    joined = _join_adjacent(spans)
    holes = [(segment_name(number).encode(), start, length) for number, start, length in joined]
    results = batch_io.punch_many(directory, os.O_WRONLY | _SAFELY, holes)
    bad = [(hole, -result) for hole, result in zip(joined, results, strict=True) if result not in (0, -errno.ENOENT)]
    if not bad:
        return [], None
    failed = [one for one in spans if any(_is_within(one, hole) for hole, _ in bad)]
    return failed, OSError(bad[0][1], os.strerror(bad[0][1]))


def _is_within(one: SegmentSpan, other: SegmentSpan) -> bool:
    return one[0] == other[0] and other[1] <= one[1] < other[1] + other[2]


def _join_adjacent(spans: Iterable[SegmentSpan]) -> list[SegmentSpan]:
    """Return the spans in order, with adjacent ones joined: blocks that came together often leave together, and
    punching one range of 1,500 blocks takes as long as one block."""
    joined: list[SegmentSpan] = []
    for number, start, length in sorted(spans):
        if joined and joined[-1][0] == number and sum(joined[-1][1:]) == start:
            start, length = joined[-1][1], joined.pop()[2] + length
        joined.append((number, start, length))
    return joined


def free_range(fd: int, start: int, length: int) -> None:
    """Free the disk space of a range of an open file. Raises OSError."""
    batch_io.fallocate(fd, batch_io.PUNCH_HOLE_KEEP_SIZE, start, length)


def punch_gaps(file: SegmentFile, ranges: Iterable[tuple[int, int]]) -> None:
    """Free the disk space between and after some sorted ranges. Raises OSError."""
    at = 0
    with _opened(file, os.O_WRONLY) as fd:
        size = page_ceil(os.fstat(fd).st_size)
        for start, end in [*ranges, (size, size)]:
            if start > at:
                free_range(fd, at, start - at)
            at = end


def remove(file: SegmentFile) -> None:
    """Unlink a segment, and free its space even while a mount has it open. Raises OSError, but not if it is gone."""
    try:
        with _opened(file, os.O_WRONLY) as fd:
            free_range(fd, 0, page_ceil(os.fstat(fd).st_size) or PAGE)
        os.unlink(file.name, dir_fd=file.directory)
    except FileNotFoundError:
        pass


def survey(file: SegmentFile) -> tuple[int, list[tuple[int, int]]]:
    """Return a segment's size, and its page-aligned ranges that are not holes, in order. Raises OSError, also where the
    file is not the daemon's own."""
    ranges: list[tuple[int, int]] = []
    with _opened(file, os.O_RDONLY) as fd:
        found = os.fstat(fd)
        _require_own(found)
        end = 0
        while end < found.st_size:
            try:
                start = os.lseek(fd, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    break
                raise
            end = os.lseek(fd, start, os.SEEK_HOLE)
            ranges.append((start - start % PAGE, page_ceil(end)))
    return found.st_size, ranges


def _require_own(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        raise OSError(errno.EPERM, "it is not a regular file, or has another name too")
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(errno.EPERM, f"user {found.st_uid} or others may have written to it")


def covers(ranges: list[tuple[int, int]], start: int, end: int) -> bool:
    """Return whether one of the sorted *ranges* holds all of [start, end)."""
    at = bisect_right(ranges, (start, 1 << 63)) - 1
    return at >= 0 and end <= ranges[at][1]


def scan(file: SegmentFile, start: int, end: int) -> Iterator[Record]:
    """Yield the records that lie wholly in a page-aligned range, in order; damaged ones are skipped. Raises OSError."""
    unreadable = 0
    with _opened(file, os.O_RDONLY) as fd:
        while start < end:
            try:
                record = _record_at(fd, file.number, start)
            except OSError:
                unreadable += 1
                if unreadable > _MAX_UNREADABLE:
                    raise
                record = None
            if record is not None and start + span(record.length) <= end:
                yield record
                start += span(record.length)
            else:
                start += PAGE


def _record_at(fd: int, segment: int, start: int) -> Record | None:
    page = os.pread(fd, PAGE, start)
    if len(page) < _HEAD.size or not page.startswith(_MAGIC):
        return None
    _, key, length = _HEAD.unpack_from(page)
    size = header_size(length)
    header = page if size <= PAGE else os.pread(fd, size, start)
    head, seal = header[: size - _SEAL.size], header[size - _SEAL.size : size]
    if seal != _seal(head, segment, start):
        return None
    return Record(key, start, length, head[_HEAD.size :])


def _seal(head: bytes, segment: int, start: int) -> bytes:
    """Return the header's checksum. It is seeded with the location, so that a segment file which a user caches as data
    is not mistaken for records of ours."""
    return _SEAL.pack(xxh3_64_intdigest(head, segment << 32 | start // PAGE))


def _open(file: SegmentFile, flags: int) -> int:
    return os.open(file.name, flags | _SAFELY, _MODE, dir_fd=file.directory)


@contextmanager
def _opened(file: SegmentFile, flags: int) -> Iterator[int]:
    fd = _open(file, flags)
    try:
        yield fd
    finally:
        os.close(fd)
