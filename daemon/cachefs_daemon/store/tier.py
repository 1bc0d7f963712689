"""One tier: a directory of segments under a byte budget.

A tier knows where bytes go and how many there are, not which blocks they are (that is the index) nor which to keep
(that is the policy). Room is reserved before a byte is written and given back after the hole is punched, so what `du`
says of the directory never exceeds the budget.
"""

import contextlib
import errno
import fcntl
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachefs.block import MEMORY, TIER_NAMES, Location
from cachefs.errors import Busy, ConfigError
from cachefs.segment import segment_path
from cachefs_daemon.store import capacity, segment_writer
from cachefs_daemon.store.segment_writer import PAGE, Record, span

_log = logging.getLogger(__name__)

# So many writes at once saturate any disk. Were there no bound, one that hangs would take every thread of the daemon.
_WRITES_AT_ONCE: Final = 4
_WRITE_PATIENCE: Final = 1.0
# At most so many segments at 100 % live: mounts keep up to 512 open.
_MOST_SEGMENTS: Final = 256
_SPARSE: Final = 0.25
_TEMPORARY: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Where one tier is, what it may take, and how it chooses."""

    directory: Path  # where its segments are
    budget: int  # bytes
    segment_size: int  # bytes
    policy: str  # a name in cachefs.planning.eviction.policies.POLICIES
    min_free: int = 0  # bytes of the file system that stay free, whatever the budget says


@dataclass(slots=True)
class _Segment:
    end: int = 0  # where the next record goes
    live: int = 0  # bytes of spans in it
    writers: int = 0  # writes under way
    exists: bool = False  # True once there is a file of it


class Tier:
    """Thread-safe; its lock is never held over I/O. It follows cachefs.planning.eviction.tiering.TierRoom.

    It has more methods and attributes than most classes as it is the one place where room, segments and files agree.
    """

    def __init__(self, number: int, config: TierConfig, block_size: int) -> None:
        """Raises ConfigError where the directory or the budget cannot do."""
        self.number = number  # MEMORY or SSD
        self.config = config
        self.name = TIER_NAMES[number]
        self.directory = config.directory
        self.used = 0  # bytes that it takes, reserved ones and a page per segment included
        self.problem = ""  # why it takes no new blocks; empty while it does
        # Bytes of blocks that its budget is good for.
        self.capacity = config.budget - capacity.metadata_reserve(config.budget)
        self._lock = threading.Lock()
        self._segments: dict[int, _Segment] = {}
        self._active: int | None = None  # number of the segment that is written to
        self._next = 0  # number of the next new segment
        self._unpunched: list[tuple[int, int, int]] = []  # (segment, start, size) of holes that could not be punched
        self._writes = threading.BoundedSemaphore(_WRITES_AT_ONCE)
        self._segment_size = max(config.segment_size, span(block_size), config.budget // _MOST_SEGMENTS)
        smallest = span(block_size) + 2 * PAGE
        if self.capacity < smallest:
            smallest += capacity.metadata_reserve(smallest) + PAGE
            raise ConfigError(
                f"[{self.name}] budget is {config.budget} bytes, less than one block of {block_size} takes;"
                f" set it to at least {smallest} (or lower block_size)"
            )
        self._descriptor, self._device = self._open_directory()
        self.limit = self.capacity  # bytes it may take now
        self.refresh_limit()

    # --- room -----------------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Bytes that can be reserved now; negative where the limit has sunk below what is used.

        A page is left for the extents of the segment the next block may open.
        """
        return self.limit - self.used - PAGE

    @property
    def segments(self) -> int:
        """How many segments it has."""
        return len(self._segments)

    def reserve(self, size: int) -> bool:
        """Set *size* bytes of free room aside for a block to be written. False, with nothing reserved, where there are
        fewer."""
        with self._lock:
            if size > self.free:
                return False
            self.used += size
            return True

    def refresh_limit(self) -> None:
        """Ask the machine anew how much the tier may take. Does I/O."""
        try:
            if self.directory.stat().st_dev != self._device:
                raise OSError(
                    errno.ENODEV, "it is on another file system than at start; mount the right one or restart"
                )
            rooms = [capacity.disk_room(self.directory, self.config.min_free)]
        except OSError as error:
            self._failed(error)
            return
        if self.number == MEMORY and (room := capacity.memory_room()) is not None:
            rooms.append(room)
        before = self.limit
        with self._lock:
            self.limit = max(0, min(self.capacity, self.used + min(rooms)))
        if self.limit < self.capacity <= before:
            _log.warning(
                "%s tier: the machine has room for %d bytes only, less than the budget of %d",
                self.name, self.limit, self.config.budget,
            )  # fmt: skip

    # --- blocks ---------------------------------------------------------------------------------------------------

    def write(self, key: bytes, checksums: bytes, data: bytes | bytearray | memoryview) -> Location | None:
        """Write a block into room reserved for its span. None, the room given back, where that fails: see `problem`."""
        size = span(len(data))
        if not self._writes.acquire(timeout=_WRITE_PATIENCE):
            self._failed(TimeoutError(errno.ETIMEDOUT, f"writes take longer than {_WRITE_PATIENCE} s"))
            self._give_back(size)
            return None
        number, start, create = self._allocate(size)
        record = Record(key, start, len(data), checksums)
        try:
            segment_writer.write_record(self._path(number), number, record, data, create=create)
        except OSError as error:
            self._abandon(number)
            self._failed(error)
            self._free_span(number, start, size)
            return None
        else:
            self._worked(number)
            return record.location(self.number, number)
        finally:
            with self._lock:
                self._segments[number].writers -= 1
            self._writes.release()

    def read(self, key: bytes, location: Location) -> bytes | None:
        return segment_writer.read_block(self._path(location.segment), key, location)

    def read_ahead(self, location: Location) -> None:
        """Let the kernel begin to read a block into its page cache."""
        with contextlib.suppress(OSError):
            segment = os.open(self._path(location.segment), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(segment, location.offset, location.length, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(segment)

    def free_blocks(self, locations: Iterable[Location]) -> None:
        """Punch blocks out that no index entry, committed or not, points to any more."""
        for location in locations:
            self._free_span(location.segment, segment_writer.record_start(location), span(location.length))

    def suspect(self, reason: str, location: Location) -> None:
        """Its disk does not answer: take no new blocks until the next `retry`, and free only then the block at
        *location*, to which no index entry points any more."""
        self._failed(TimeoutError(errno.ETIMEDOUT, reason))
        with self._lock:
            self._unpunched.append((location.segment, segment_writer.record_start(location), span(location.length)))

    # --- segments -------------------------------------------------------------------------------------------------

    def segment_numbers(self) -> list[int]:
        """Segments in the directory, oldest first. Raises OSError."""
        with os.scandir(self.directory) as entries:
            numbers = (
                segment_writer.segment_number(entry.name) for entry in entries if entry.is_file(follow_symlinks=False)
            )
            return sorted(number for number in numbers if number is not None)

    def survey(self, number: int) -> tuple[int, list[tuple[int, int]]]:
        """Where a segment ends, and the ranges that hold data. Raises OSError."""
        return segment_writer.survey(self._path(number))

    def records(self, number: int, ranges: Iterable[tuple[int, int]]) -> Iterator[Record]:
        """The records found in some ranges of a segment, dead ones included. Raises OSError."""
        for start, end in ranges:
            yield from segment_writer.scan(self._path(number), number, start, end)

    def adopt_segment(self, number: int, end: int, live: int) -> None:
        """Account for a segment found at start, oldest first: *live* bytes of spans, all before *end*."""
        with self._lock:
            self._segments[number] = state = _Segment(end, exists=True)
            self._count(state, live)
            self.used += live
            self._next = max(self._next, number + 1)
            self._active = number if end < self._segment_size else None

    def discard(self, number: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Punch out adopted ranges that are nobody's."""
        for start, end in ranges:
            self._free_span(number, start, end - start)

    def sparse_segments(self) -> list[int]:
        """Closed segments so empty that they are better copied forward, emptiest first."""
        with self._lock:
            found = [
                (state.live, number)
                for number, state in self._segments.items()
                if number != self._active and not state.writers and state.live < _SPARSE * self._segment_size
            ]
        return [number for _, number in sorted(found)]

    def oldest_segment(self) -> int | None:
        """The oldest segment that has live blocks."""
        with self._lock:
            return min((number for number, state in self._segments.items() if state.live), default=None)

    def remove_segment(self, number: int) -> None:
        """Unlink a segment whose blocks have left it. Raises OSError."""
        path = self._path(number)
        try:
            # A mount may hold the file open, and then unlinking alone frees nothing.
            segment_writer.punch(path, 0, segment_writer.page_ceil(path.stat().st_size) or PAGE)
            path.unlink()
        except FileNotFoundError:
            pass
        with self._lock:
            state = self._segments.pop(number)
            self.used -= state.live
            self._count(state, -state.live)

    def retry(self) -> None:
        """Try again what failed before."""
        with self._lock:
            spans, self._unpunched = self._unpunched, []
        for number, start, size in spans:
            self._free_span(number, start, size)
        # Not while all writes hang: the probe would, too.
        if self.problem and not self._unpunched and self._writes.acquire(blocking=False):
            try:
                self._probe()
                self._worked()
            except OSError as error:
                self._failed(error)
            finally:
                self._writes.release()

    def close(self) -> None:
        """Let another daemon have the directory."""
        os.close(self._descriptor)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _path(self, number: int) -> Path:
        return segment_path(self.directory, number)

    def _allocate(self, size: int) -> tuple[int, int, bool]:
        """Segment and offset for a span, and whether the segment's file is still to be made."""
        with self._lock:
            number = self._active
            if number is None or self._segments[number].end + size > self._segment_size:
                number = self._active = self._next
                self._next += 1
                self._segments[number] = _Segment()
            state = self._segments[number]
            start = state.end
            state.end += size
            state.writers += 1
            self._count(state, size)
            return number, start, not state.exists

    def _abandon(self, number: int) -> None:
        """Write nothing more into a segment. If its file was deleted, mounts may hold the old one open."""
        with self._lock:
            if self._active == number:
                self._active = None

    def _count(self, state: _Segment, size: int) -> None:
        """Add to a segment's live bytes. A segment that has any may need a page for its extents. Needs the lock."""
        had = state.live > 0
        state.live += size
        self.used += PAGE * ((state.live > 0) - had)

    def _free_span(self, number: int, start: int, size: int) -> None:
        try:
            segment_writer.punch(self._path(number), start, size)
        except OSError as error:
            # The bytes are still there, so they still count.
            self._failed(error)
            with self._lock:
                self._unpunched.append((number, start, size))
            return
        with self._lock:
            if (state := self._segments.get(number)) is not None:
                self._count(state, -size)
                self.used -= size

    def _give_back(self, size: int) -> None:
        with self._lock:
            self.used -= size

    def _failed(self, error: OSError) -> None:
        if isinstance(error, FileNotFoundError) and self._remade_directory():
            _log.warning("%s tier: segments were deleted from %s by somebody else", self.name, self.directory)
            return
        problem = f"{self.directory}: {error.strerror or error}"
        if problem != self.problem:
            self.problem = problem
            _log.error("%s tier takes no new blocks: %s", self.name, problem)

    def _worked(self, number: int | None = None) -> None:
        if number is not None:
            self._segments[number].exists = True
        if self.problem:
            self.problem = ""
            _log.warning("%s tier takes blocks again", self.name)

    def _open_directory(self) -> tuple[int, int]:
        """A descriptor that keeps the directory locked, and the device the directory is on."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise self._unusable(error) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._check_size()
            self._probe()
        except BlockingIOError:
            os.close(descriptor)
            raise Busy(
                f"[{self.name}] dir {self.directory} belongs to another running daemon; choose another"
            ) from None
        except OSError as error:
            # A disk that is full or read-only can still be read from.
            if error.errno not in _TEMPORARY:
                os.close(descriptor)
                raise self._unusable(error) from None
            self._failed(error)
        except ConfigError:
            os.close(descriptor)
            raise
        return descriptor, os.fstat(descriptor).st_dev

    def _unusable(self, error: OSError) -> ConfigError:
        if error.errno == errno.EOPNOTSUPP:
            reason = "its file system cannot punch holes into files; use one on ext4, xfs, btrfs or tmpfs"
        else:
            reason = f"{error.strerror}; make it a writable directory"
        return ConfigError(f"[{self.name}] dir {self.directory} cannot be used: {reason}")

    def _check_size(self) -> None:
        size = capacity.disk_size(self.directory)
        if self.number == MEMORY and size < self.config.budget:
            raise ConfigError(
                f"[memory] budget is {self.config.budget} bytes, but the file system behind {self.directory} has only"
                f" {size}; lower the budget, enlarge it (mount -o remount,size=..., docker --shm-size), or choose"
                " another dir"
            )

    def _probe(self) -> None:
        """Write, and free what is in the middle of a file. Raises OSError."""
        path = self.directory / ".probe"
        try:
            path.write_bytes(bytes(2 * PAGE))
            segment_writer.punch(path, 0, PAGE)
        finally:
            path.unlink(missing_ok=True)

    def _remade_directory(self) -> bool:
        """Somebody removed the directory; make it again, but not on the disk below one that is not mounted just now."""
        try:
            if self.directory.parent.stat().st_dev != self._device:
                return False
            self.directory.mkdir(exist_ok=True)
            return True
        except OSError as error:
            _log.error("%s tier: cannot make %s again: %s", self.name, self.directory, error.strerror)
            return False
