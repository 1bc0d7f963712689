"""Stores blocks in the page cache and drops them: the work of one thread of a pusher.

Stores go through the FUSE device, drops through the mounted file. A store of 110 KB measured 10 us into pages that were
there and 22 us into new ones.

Blocks are read from the disk directly and verified, so that a pushed file is cached once and not twice. A direct read
of 110 KB measured 129 us, 25 us of them on a processor; a buffered read whose pages are dropped again took 194 us,
72 us of them on a processor.
"""

import contextlib
import errno
import logging
import math
import mmap
import os
import select
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachefs.block import MAX_READ, MEMORY, PIECE_SIZE, SSD, BlockLocation, block_key, block_length, pieces_match
from cachefs.errors import CachefsError
from cachefs.index import IndexReader
from cachefs.mount.page_residency import PAGE, resident_pages
from cachefs.mount.push.mounted_snapshots import MountedSnapshot
from cachefs.mount.reads.read_records import ReadMarks
from cachefs.segment import SegmentReader

log = logging.getLogger(__name__)

# struct fuse_out_header (length, notify code in place of an error, 0 in place of a request's number), then
# struct fuse_notify_store_out (inode, offset, size, padding).
_STORE: Final = struct.Struct("<IiQQQII")
_NOTIFY_STORE: Final = 4
# Bytes of one store. The kernel copies them with one page locked at a time; the limit keeps the buffers of all threads
# small.
MAX_STORE: Final = 1 << 20
_UNSUPPORTED: Final = (errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP)
# Alignment of file offsets and of memory, in bytes; no device needs more.
_ALIGNMENT: Final = 4096
# A reader that has read a block less than CLOSE_READER_SECONDS before its turn is as far as the pusher, and would race
# it for each next block. The next BLOCKS_LEFT blocks are left to the reader, and the pusher goes on behind them.
CLOSE_READER_SECONDS: Final = 0.02
BLOCKS_LEFT: Final = 4


class StoreUnsupported(Exception):
    """The kernel does not support stores by a pusher."""


def store_pages(device: int, inode: int, offset: int, data: memoryview) -> None:
    """Put *data* into the page cache of *inode*. The data must not reach beyond the file's end, which would move.

    Waits for a page that is being read. Raises FileNotFoundError for an inode that the kernel does not know yet, or no
    longer; StoreUnsupported; another OSError where the kernel does not take these pages now.
    """
    size = len(data)
    try:
        os.writev(device, (_STORE.pack(_STORE.size + size, _NOTIFY_STORE, 0, inode, offset, size, 0), data))
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            raise StoreUnsupported(error.strerror) from None
        raise


def drop_pages(path: bytes, inode: int, offset: int, length: int) -> None:
    """Drop the pages of a range of a file, but not the file's attributes; pages that are mapped or locked stay.

    Raises OSError, also where *path* now leads to another inode than *inode*.
    """
    fd = _open_inode(path, inode)
    try:
        # Only whole pages in the range are dropped, so the range is extended to the end of the last page.
        os.posix_fadvise(fd, offset, -(-length // PAGE) * PAGE, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def are_cached(path: bytes, inode: int, offset: int, length: int) -> bool:
    """Return whether the kernel has all pages of a range of a file; False where it does not tell.

    Raises OSError as `drop_pages` does.
    """
    fd = _open_inode(path, inode)
    try:
        with contextlib.suppress(OSError):
            return resident_pages(fd, offset, length) >= -(-length // PAGE)
        return False
    finally:
        os.close(fd)


def _open_inode(path: bytes, inode: int) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_ino != inode:
            raise FileNotFoundError(errno.ENOENT, f"the mount no longer shows inode {inode:x} there", os.fsdecode(path))
    except OSError:
        os.close(fd)
        raise
    return fd


def has_mount_ended(device: int, seconds: float) -> bool:
    """Return whether the mount has ended. Waits up to *seconds* for its end."""
    poll = select.poll()
    poll.register(device, 0)  # errors only: the workers take the requests
    return bool(poll.poll(seconds * 1000))


def aligned_buffer(size: int) -> memoryview:
    """Return a buffer for a `DirectReader.read` of at most *size* bytes."""
    return memoryview(mmap.mmap(-1, size + 2 * PIECE_SIZE + 2 * _ALIGNMENT))


class DirectReader(SegmentReader):
    """A SegmentReader whose reads need a buffer of `aligned_buffer`, and always wait."""

    def __init__(self, directories: Mapping[int, Path], owner: int | None = None) -> None:
        super().__init__(directories, owner)
        self._has_direct_reads = True  # whether the file system has direct reads, as far as is known

    def read(
        self, key: bytes, location: BlockLocation, start: int, size: int, buffer: memoryview, *, wait: bool = True
    ) -> memoryview | None:
        assert wait
        first = start // PIECE_SIZE
        begin = first * PIECE_SIZE
        end = min(location.length, -(-(start + size) // PIECE_SIZE) * PIECE_SIZE)
        skipped = (location.offset + begin) % _ALIGNMENT
        span = -(-(skipped + end - begin) // _ALIGNMENT) * _ALIGNMENT
        try:
            got = self._read(location, location.offset + begin - skipped, buffer[:span])
        except (KeyError, OSError):
            return None  # the segment, or the whole tier, is gone
        pieces = buffer[skipped : skipped + end - begin]
        if got < skipped + len(pieces) or not pieces_match(key, location.checksums, first, pieces):
            return None
        return pieces[start - begin : min(start + size, location.length) - begin]

    def _read(self, location: BlockLocation, offset: int, buffer: memoryview) -> int:
        try:
            got = os.preadv(self._file(location), [buffer], offset)
        except OSError as error:
            if not self._has_direct_reads or error.errno != errno.EINVAL:
                raise
            # This file system has no direct reads, like some overlays and network file systems.
            self._has_direct_reads = False
            self.close()
            got = os.preadv(self._file(location), [buffer], offset)
        if not self._has_direct_reads:
            os.posix_fadvise(self._file(location), offset, len(buffer), os.POSIX_FADV_DONTNEED)
        return got

    def _open(self, path: Path, flags: int = 0) -> int:
        return super()._open(path, flags | (os.O_DIRECT if self._has_direct_reads else 0))


@dataclass(slots=True)
class PushCounters:
    """Counts the work of one thread since the pusher started. The daemon uses the same names."""

    stored_blocks: int = 0
    stored_bytes: int = 0
    dropped_blocks: int = 0
    dropped_bytes: int = 0
    # Stores of files unknown to the kernel, which needed a look-up first.
    unknown_inodes: int = 0
    # Blocks that were gone, or wrong, at their turn.
    not_in_tier: int = 0
    # Blocks that readers had read before their turn.
    read_first: int = 0
    # Blocks left to a reader that is as far as the pusher.
    left: int = 0
    # Blocks whose pages the kernel had reclaimed before they were read.
    taken_back: int = 0
    # Blocks that failed for any other reason.
    errors: int = 0


@dataclass(frozen=True, slots=True)
class TierSource:
    """The tiers that blocks are read from."""

    # Shared by threads.
    index: IndexReader
    # Tier number -> directory.
    directories: Mapping[int, Path]


class BlockMover:
    """Moves blocks into the page cache and out of it. Each thread has its own instance."""

    def __init__(self, device: int, marks: ReadMarks, *, look_up: bool = False) -> None:
        """device: descriptor of the mount's FUSE connection; look_up: look up each pushed file. Through a shield the
        first look-up of a file is a request, which no reader should wait for. Later look-ups take 3 us."""
        self._look_up = look_up
        self.counters = PushCounters()
        self._device = device
        self._marks = marks
        self._blocks_left = 0  # number of next blocks that are left to a reader
        self._index: IndexReader | None = None
        self._readers: dict[int, SegmentReader] = {}
        self._buffer = aligned_buffer(MAX_STORE)

    def use_source(self, source: TierSource) -> None:
        """Read blocks from *source* from now on."""
        for reader in self._readers.values():
            reader.close()
        self._index = source.index
        where, owner = source.directories, source.index.owner
        self._readers = {MEMORY: SegmentReader(where, owner), SSD: DirectReader(where, owner)}

    def move_block(
        self,
        mounted: MountedSnapshot,
        entry: int,
        number: int,
        *,
        drop: bool = False,
        check: bool = False,
        stores: bool = True,
    ) -> bool:
        """Store block *number* of a file, or *drop* it, or (*check*) store it if a tier has it and the kernel lacks a
        page of it. Without *stores*, nothing is stored, and *check* only tests the page cache.

        Returns False where that failed. Raises StoreUnsupported.
        """
        try:
            if check:
                if self._is_cached(mounted, entry, number):
                    return True
                if not self._is_on_node(mounted, entry, number):
                    return False
            if drop:
                return self._drop_block(mounted, entry, number)
            return stores and self._store_block(mounted, entry, number)
        except (CachefsError, OSError) as error:
            self.counters.errors += 1
            log.debug("block %d of entry %d of %s: %s", number, entry, mounted.snapshot.id, error)
            return False

    def forget_unlinked(self) -> None:
        for reader in self._readers.values():
            reader.close_unlinked()

    def _is_cached(self, mounted: MountedSnapshot, entry: int, number: int) -> bool:
        size, _ = mounted.snapshot.size_and_content(entry)
        block_size = mounted.snapshot.block_size
        there = are_cached(
            mounted.path(entry), mounted.inode(entry), number * block_size, block_length(size, block_size, number)
        )
        self.counters.taken_back += not there
        return there

    def _is_on_node(self, mounted: MountedSnapshot, entry: int, number: int) -> bool:
        _, content = mounted.snapshot.size_and_content(entry)
        return self._index is not None and self._index.get(block_key(content, number)) is not None

    def _store_block(self, mounted: MountedSnapshot, entry: int, number: int) -> bool:
        size, content = mounted.snapshot.size_and_content(entry)
        key, length = block_key(content, number), block_length(size, mounted.snapshot.block_size, number)
        if self._blocks_left:
            self._blocks_left -= 1
            self.counters.left += 1
            return False
        age = self._marks.age(key)
        if age < math.inf:
            self.counters.read_first += 1
            self._blocks_left = BLOCKS_LEFT if age < CLOSE_READER_SECONDS else 0
            # The pages of a block that fits into one request are in the page cache, or soon will be.
            return length <= MAX_READ
        location = self._index.get(key) if self._index is not None else None
        # A store beyond the end of the file would move its end.
        if location is None or location.length != length:
            self.counters.not_in_tier += 1
            return False
        reader = self._readers[location.tier]
        begin = number * mounted.snapshot.block_size
        for start in range(0, location.length, MAX_STORE):
            step = min(MAX_STORE, location.length - start)
            data = reader.read(key, location, start, step, self._buffer)
            if data is None:
                self.counters.not_in_tier += 1
                return False
            self._store_bytes(mounted, entry, begin + start, data)
        if self._look_up and number == 0:
            os.stat(mounted.path(entry))
        self.counters.stored_blocks += 1
        self.counters.stored_bytes += location.length
        return True

    def _store_bytes(self, mounted: MountedSnapshot, entry: int, offset: int, data: memoryview) -> None:
        inode = mounted.inode(entry)
        try:
            store_pages(self._device, inode, offset, data)
        except FileNotFoundError:
            self.counters.unknown_inodes += 1
            os.stat(mounted.path(entry))
            store_pages(self._device, inode, offset, data)

    def _drop_block(self, mounted: MountedSnapshot, entry: int, number: int) -> bool:
        size, content = mounted.snapshot.size_and_content(entry)
        self._marks.clear(block_key(content, number))
        block_size = mounted.snapshot.block_size
        length = block_length(size, block_size, number)
        drop_pages(mounted.path(entry), mounted.inode(entry), number * block_size, length)
        self.counters.dropped_blocks += 1
        self.counters.dropped_bytes += length
        return True
