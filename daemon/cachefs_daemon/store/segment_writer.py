"""Writing segments, and finding out what is in one without the index.

A segment is a file of records, each at a 4 KiB boundary and self-describing:

    magic 8 | block key 20 | length 4 | piece checksums 8 each | checksum of all that 8 | data

It only grows. A record is evicted by punching a hole over its whole 4 KiB-aligned span, so the space a segment takes is
the sum of its live spans, and no offset ever means two things. Every function opens the file by name for itself: that
takes 5 us beside a write of 30 us or more, and no thread can close or reuse a descriptor that another one uses.
"""

import ctypes
import errno
import os
import re
import struct
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from xxhash import xxh3_64_intdigest

from cachefs.block import KEY_SIZE, Location, piece_count, pieces_match

PAGE: Final = 4096
_MAGIC: Final = b"cachefs\x01"
_HEAD: Final = struct.Struct(f"<8s{KEY_SIZE}sI")
_SEAL: Final = struct.Struct("<Q")
_NAME: Final = re.compile(r"([0-9a-f]{8})\.seg")
_MODE: Final = 0o640
_PUNCH_HOLE_KEEP_SIZE: Final = 0x03

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


@dataclass(frozen=True, slots=True)
class Record:
    """One block in a segment."""

    key: bytes
    start: int  # where its header begins, in bytes from the start of the segment
    length: int  # bytes of the block
    checksums: bytes  # of the block's pieces, 8 bytes each

    def location(self, tier: int, segment: int) -> Location:
        return Location(tier, segment, self.start + header_size(self.length), self.length, self.checksums)


def segment_number(name: str) -> int | None:
    """The number of a segment file's name; None for any other file."""
    match = _NAME.fullmatch(name)
    return int(match[1], 16) if match else None


def page_ceil(size: int) -> int:
    return -(-size // PAGE) * PAGE


def header_size(length: int) -> int:
    return _HEAD.size + 8 * piece_count(length) + _SEAL.size


def span(length: int) -> int:
    """Bytes of disk that the record of a block of *length* bytes takes."""
    return page_ceil(header_size(length) + length)


def record_start(location: Location) -> int:
    return location.offset - header_size(location.length)


def write_record(
    path: Path, segment: int, record: Record, data: bytes | bytearray | memoryview, *, create: bool
) -> None:
    """Write one record into segment number *segment* at *path*; *create*: make the file if need be. Raises OSError."""
    start = record.start
    head = _HEAD.pack(_MAGIC, record.key, len(data)) + record.checksums
    parts = [memoryview(head + _seal(head, segment, start)), memoryview(data).cast("B")]
    with _opened(path, os.O_WRONLY | (os.O_CREAT if create else 0)) as fd:
        while parts:
            written = os.pwritev(fd, parts, start)
            start += written
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][written:]


def read_block(path: Path, key: bytes, location: Location) -> bytes | None:
    """The block's bytes, verified; None where they are not there or not right."""
    try:
        with _opened(path, os.O_RDONLY) as fd:
            data = os.pread(fd, location.length, location.offset)
    except OSError:
        return None
    if len(data) < location.length or not pieces_match(key, location.checksums, 0, memoryview(data)):
        return None
    return data


def punch(path: Path, start: int, length: int) -> None:
    """Free the disk space of a range. Raises OSError, but not where the file is gone: so is its space."""
    try:
        with _opened(path, os.O_WRONLY) as fd:
            if _libc.fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, start, length) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(path))
    except FileNotFoundError:
        pass


def survey(path: Path) -> tuple[int, list[tuple[int, int]]]:
    """Where a segment ends, and its page-aligned ranges that are not holes, in order. Raises OSError."""
    ranges: list[tuple[int, int]] = []
    with _opened(path, os.O_RDONLY) as fd:
        size = os.fstat(fd).st_size
        end = 0
        while end < size:
            try:
                start = os.lseek(fd, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    break
                raise
            end = os.lseek(fd, start, os.SEEK_HOLE)
            ranges.append((start - start % PAGE, page_ceil(end)))
    return page_ceil(size), ranges


def covers(ranges: list[tuple[int, int]], start: int, end: int) -> bool:
    """Does one of the sorted *ranges* hold all of [start, end)?"""
    at = bisect_right(ranges, (start, 1 << 63)) - 1
    return at >= 0 and end <= ranges[at][1]


def scan(path: Path, segment: int, start: int, end: int) -> Iterator[Record]:
    """The records that lie wholly in a page-aligned range, in order; damaged ones are stepped over. Raises OSError."""
    with _opened(path, os.O_RDONLY) as fd:
        while start < end:
            record = _record_at(fd, segment, start)
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
    """The header's checksum. It is seeded with the place, so that a segment file which somebody caches as data is not
    mistaken for records of ours."""
    return _SEAL.pack(xxh3_64_intdigest(head, segment << 32 | start // PAGE))


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, _MODE)
    try:
        yield fd
    finally:
        os.close(fd)
