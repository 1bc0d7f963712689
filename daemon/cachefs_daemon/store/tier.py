"""One tier: a directory of segments under a byte budget.

A tier manages locations and bytes; the index knows the blocks, and the policy decides which to keep. Room is reserved
before a byte is written and given back after the hole is punched, so what `du` reports for the directory never exceeds
the budget.
"""

import contextlib
import errno
import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachefs.block import MEMORY, TIER_NAMES, BlockLocation
from cachefs.errors import CachefsError, ConfigError
from cachefs.sizes import format_size
from cachefs_daemon.store import capacity, segment_writer
from cachefs_daemon.store.owned_directory import ConfiguredDirectory
from cachefs_daemon.store.segment_writer import PAGE, Data, Record, SegmentFile, SegmentSpan, page_ceil, span
from cachefs_daemon.store.tier_directory import TierDirectory

_log = logging.getLogger(__name__)

# This many concurrent writes saturate any disk. Without a bound, a disk that hangs would take every thread of the
# daemon.
_WRITES_AT_ONCE: Final = 4
_WRITE_TIMEOUT: Final = 1.0
# The same for holes. Together with the writes they leave two of the eight threads that readers wait for.
_HOLES_AT_ONCE: Final = 2
# Most segments at 100 % live: mounts keep up to 512 open.
_MAX_SEGMENTS: Final = 256
_SPARSE_FRACTION: Final = 0.25
_MIN_BLOCKS: Final = 4
_TEMPORARY_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
# Most files in the way of a new segment; a start knows of all files, so each was put there since.
_MAX_FOREIGN_FILES: Final = 64
_NUMBERS: Final = 1 << 32
# Other programs have taken what the budget promises. For tmpfs at the limit of a control group it is ENOMEM.
_FULL_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)


class FileSystemFull(OSError):
    """Raised where a tier's file system has no room for a block."""


@dataclass(frozen=True, slots=True)
class TierConfig:
    """The directory, the budget and the policy of one tier."""

    directory: Path  # where its segments are
    budget: int  # bytes
    segment_size: int  # bytes
    policy: str  # a name in cachefs.planning.eviction.policies.POLICIES
    # Bytes that stay free, whatever the budget is: of the file system, and for the memory tier of the machine's memory.
    min_free: int = 0
    required_mount: Path | None = None  # a mount point on which a file system must be mounted


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A block that will be written."""

    key: bytes
    checksums: bytes  # of its pieces (see cachefs.block)
    data: Data

    @property
    def span(self) -> int:
        """Bytes that the block takes of a tier."""
        return span(len(self.data))


def configured_directory(number: int, config: TierConfig) -> ConfiguredDirectory:
    """Return the directory of tier *number*, for messages and checks."""
    return ConfiguredDirectory(f"[{TIER_NAMES[number]}] dir", config.directory, config.required_mount)


def check_budget(number: int, config: TierConfig, block_size: int) -> None:
    """Raise ConfigError where not even one block would fit."""
    smallest = span(block_size) + 2 * PAGE
    if config.budget - capacity.metadata_reserve(config.budget) < smallest:
        smallest += capacity.metadata_reserve(smallest) + 2 * PAGE
        raise ConfigError(
            f"[{TIER_NAMES[number]}] budget is {config.budget} bytes, less than one block of {block_size} takes;"
            f" set it to at least {smallest} (or lower block_size)"
        )


def check_size(number: int, config: TierConfig, size: int) -> None:
    """Raise ConfigError where a file system of *size* bytes is too small for the memory tier."""
    if number == MEMORY and size < config.budget:
        raise ConfigError(
            f"[memory] budget is {format_size(config.budget)}, but the file system behind {config.directory} has only "
            f"{format_size(size)}; lower the budget, enlarge it (mount -o remount,size=..., docker --shm-size), or "
            "choose another dir"
        )


def on_disk(directory: int | Path) -> bool:
    """Return whether a directory, or its descriptor, is on a file system that is not in memory. Raises OSError."""
    return capacity.file_system(directory) not in capacity.IN_MEMORY


@dataclass(slots=True)
class _Segment:
    end: int = 0  # offset of the next record
    live: int = 0  # bytes of spans in it
    writers: int = 0  # writes in progress


class Tier:
    """The segments of one tier, and the room in it. Thread-safe; its lock is never held over I/O. Implements
    cachefs.planning.eviction.tiering.TierRoom."""

    def __init__(self, number: int, config: TierConfig, block_size: int) -> None:
        """Raises ConfigError where directory or budget cannot be used."""
        self.number = number  # MEMORY or SSD
        self.config = config
        self.name = TIER_NAMES[number]
        self.directory = config.directory
        self.used = 0  # bytes in use, reserved ones and a page per segment included
        self.problem = ""  # the reason for which it takes no new blocks; "" while it does
        # Bytes of blocks for which the budget suffices.
        self.capacity = config.budget - capacity.metadata_reserve(config.budget)
        self._lock = threading.Lock()
        self._creating = threading.Lock()  # held while the file of a segment is created, so that only one is
        self._segments: dict[int, _Segment] = {}
        self._active: int | None = None  # number of the segment that receives new records
        self._next = 0  # number of the next new segment
        self._unpunched: deque[SegmentSpan] = deque()  # holes that could not be punched
        self._write_limit = threading.BoundedSemaphore(_WRITES_AT_ONCE)
        self._punch_limit = threading.BoundedSemaphore(_HOLES_AT_ONCE)
        self._is_disabled = False
        self._segment_size = max(config.segment_size, span(block_size), config.budget // _MAX_SEGMENTS)
        check_budget(number, config, block_size)
        # Bytes for blocks on their way to readers, available even when memory gets short.
        self._min_limit = min(_MIN_BLOCKS * span(block_size), self.capacity)
        self._tier_directory = self._open_directory()
        self.limit = self.capacity  # bytes it may take now
        self.refresh_limit()

    def resize(self, config: TierConfig) -> None:
        """Apply another budget and minimum free space. The excess is evicted at the next `shrink`."""
        with self._lock:
            self.config = config
            self.capacity = config.budget - capacity.metadata_reserve(config.budget)
            self._min_limit = min(self._min_limit, self.capacity)
            self.limit = min(self.limit, self.capacity)
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
        """The number of segments."""
        return len(self._segments)

    def reserve(self, size: int) -> bool:
        """Reserve *size* bytes for a block that will be written. Return False, with nothing reserved, where there are
        fewer."""
        with self._lock:
            if size > self.free:
                return False
            self.used += size
            return True

    def release(self, size: int) -> None:
        """Release *size* reserved bytes."""
        with self._lock:
            self.used -= size

    def refresh_limit(self) -> None:
        """Determine anew how much the tier may take on this machine. Does I/O."""
        try:
            self._tier_directory.check()
            rooms = [capacity.disk_room(self._tier_directory.descriptor, self.config.min_free)]
        except OSError as error:
            self._note_failure(error)
            return
        if self.number == MEMORY:
            spare = self._min_limit - self.used
            if (room := capacity.memory_room(min_free=self.config.min_free, spare=spare)) is not None:
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

    def write(self, block: NewBlock) -> BlockLocation | None:
        """Write a block into room reserved for its span. Return None, the room given back, where that fails: see
        `problem`. Raises FileSystemFull, the room given back, where the file system has less room than the budget: then
        the limit is as low as that."""
        written, error = self._write([block])
        if error is not None:
            self._raise_if_full(error)
            self._note_failure(error)
        return written[0] if written else None

    def write_many(self, blocks: Sequence[NewBlock]) -> list[BlockLocation]:
        """Write blocks into room reserved for their spans, up to the first one that fails; the room of that one and of
        all others is given back."""
        written, error = self._write(blocks)
        if error is not None and error.errno not in _FULL_ERRORS:
            self._note_failure(error)
        return written

    def _write(self, blocks: Sequence[NewBlock]) -> tuple[list[BlockLocation], OSError | None]:
        """Return the locations of the first blocks, and the error of the next one."""
        written: list[BlockLocation] = []
        if not self._write_limit.acquire(timeout=_WRITE_TIMEOUT):
            self.release(sum(block.span for block in blocks))
            return written, TimeoutError(errno.ETIMEDOUT, f"writes take longer than {_WRITE_TIMEOUT} s")
        error: OSError | None = None
        try:
            while error is None and len(written) < len(blocks):
                locations, error = self._write_run(blocks[len(written) :])
                written += locations
        finally:
            self._write_limit.release()
        if error is None:
            self._note_success()
        return written, error

    def _write_run(self, blocks: Sequence[NewBlock]) -> tuple[list[BlockLocation], OSError | None]:
        """Write blocks into one segment, as far as they fit. Return the locations of the first ones, and the error of
        the next one; after an error the room of all others has been given back."""
        sizes = [block.span for block in blocks]
        try:
            number, starts = self._allocate(sizes)
        except OSError as error:
            self.release(sum(sizes))
            return [], error
        records = [
            (Record(block.key, start, len(block.data), block.checksums), block.data)
            for start, block in zip(starts, blocks, strict=False)
        ]
        done = 0
        try:
            done, failure = segment_writer.write_records(
                self._file(number), records, allocate=self._tier_directory.extent_per_record
            )
        finally:
            if done < len(records):
                left = zip(starts[done:], sizes[done : len(starts)], strict=True)
                self._free_spans([(number, start, size) for start, size in left])
                self.release(sum(sizes[len(starts) :]))
            with self._lock:
                self._segments[number].writers -= 1
        if failure is not None and failure.errno not in _FULL_ERRORS:
            self._abandon(number)
        return [record.location(self.number, number) for record, _ in records[:done]], failure

    # --- room that a fetch process writes into ------------------------------------------------------------------------

    @property
    def extent_per_record(self) -> bool:
        """Whether each record must be an extent of its own for its space to come back."""
        return self._tier_directory.extent_per_record

    def allocate_spans(self, spans: Sequence[int]) -> list[tuple[int, int]]:
        """Return segment and offset of each span for which room is reserved, up to the first for which no segment can
        be created; the room of that one and of all others is given back. Call `note_ended_writes` for each in the
        end."""
        allocated: list[tuple[int, int]] = []
        try:
            for size in spans:
                number, (start,) = self._allocate([size])
                allocated.append((number, start))
        except OSError as error:
            self.release(sum(spans[len(allocated) :]))
            if error.errno not in _FULL_ERRORS:
                self._note_failure(error)
        return allocated

    def open_segment(self, number: int) -> int:
        """Return a descriptor for writing, which the caller closes. After an OSError nothing more is written there."""
        try:
            return segment_writer.open_to_write(self._file(number))
        except OSError as error:
            self._abandon(number)
            self._note_failure(error)
            raise

    def free_unused(self, spans: Sequence[SegmentSpan]) -> None:
        """Free spans into which no process writes any more, and to which no index entry points."""
        if spans:
            self._free_spans(spans)

    def note_ended_writes(self, numbers: Iterable[int]) -> None:
        """Record that writes into these segments have ended, one for each time a segment was allotted."""
        with self._lock:
            for number in numbers:
                if (state := self._segments.get(number)) is not None:
                    state.writers -= 1

    # --- stored blocks ------------------------------------------------------------------------------------------------

    def read(self, key: bytes, location: BlockLocation) -> bytes | None:
        return segment_writer.read_block(self._file(location.segment), key, location)

    def read_many(self, blocks: Sequence[tuple[bytes, BlockLocation]], buffer: memoryview) -> list[memoryview | None]:
        """Return the verified bytes of blocks (key, location), one after the other in *buffer*, which holds as many
        bytes as they have; None for each that is damaged or not there."""
        parts = []
        at = 0
        for key, location in blocks:
            parts.append((key, location, buffer[at : at + location.length]))
            at += location.length
        right = segment_writer.read_into(self._tier_directory.descriptor, parts)
        return [data if is_right else None for (_, _, data), is_right in zip(parts, right, strict=True)]

    def read_ahead(self, location: BlockLocation) -> None:
        """Let the kernel begin to read a block into its page cache."""
        with contextlib.suppress(OSError):
            segment_writer.read_ahead(self._file(location.segment), location)

    def free_blocks(self, locations: Iterable[BlockLocation]) -> None:
        """Punch out blocks to which no index entry, committed or not, points any more."""
        spans = [(one.segment, segment_writer.record_start(one), span(one.length)) for one in locations]
        if spans:
            self._free_spans(spans)

    def report_hang(self, reason: str, location: BlockLocation) -> None:
        """Take no new blocks until the next `retry_failed`, because the disk does not answer. Free the block at
        *location*, to which no index entry points any more, only then."""
        self._note_failure(TimeoutError(errno.ETIMEDOUT, reason))
        with self._lock:
            self._unpunched.append((location.segment, segment_writer.record_start(location), span(location.length)))

    # --- segments -------------------------------------------------------------------------------------------------

    def segment_numbers(self) -> list[int]:
        """Return the segments in the directory, oldest first. New ones get higher numbers. Raises OSError."""
        found = self._tier_directory.list_segments()
        with self._lock:
            self._next = max(self._next, found.next)
        return found.segments

    def survey(self, number: int) -> tuple[int, list[tuple[int, int]]]:
        """Return where the next record of a segment may begin, and the ranges that hold data. Raises OSError."""
        size, ranges = segment_writer.survey(self._file(number))
        if size < self._segment_size:
            # An earlier version made it, or another program has cut it: it takes no more records.
            return max(page_ceil(size), self._segment_size), ranges
        return ranges[-1][1] if ranges else 0, ranges

    def free_unwritten(self, number: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Free what a killed daemon had allocated for records and not written: all but the *ranges* that hold data."""
        if self._tier_directory.extent_per_record:
            with contextlib.suppress(OSError):
                segment_writer.punch_gaps(self._file(number), ranges)

    def records(self, number: int, ranges: Iterable[tuple[int, int]]) -> Iterator[Record]:
        """Yield the records found in some ranges of a segment, dead ones included. Raises OSError."""
        for start, end in ranges:
            yield from segment_writer.scan(self._file(number), start, end)

    def account_segment(self, number: int, end: int, live: int) -> None:
        """Account for a segment found at start, oldest first: *live* bytes of spans, all before *end*."""
        with self._lock:
            self._segments[number] = state = _Segment(end)
            self._count_live(state, live)
            self.used += live
            self._active = number if end < self._segment_size else None

    def disable(self, error: OSError) -> None:
        """Take no blocks until the next start, because the segments are unknown."""
        self._is_disabled = True
        self._note_failure(error)

    def count_unusable_segment(self, number: int) -> int:
        """Leave an unusable segment alone, but count the bytes that it takes, and return them."""
        taken = self._tier_directory.disk_bytes(number)
        with self._lock:
            self.used += taken
        return taken

    def free_garbage(self, number: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Punch out adopted ranges that belong to no block."""
        self._free_spans([(number, start, end - start) for start, end in ranges])

    def sparse_segments(self) -> list[int]:
        """Return the closed segments that are so empty that copying them forward is better, emptiest first."""
        with self._lock:
            found = [
                (state.live, number)
                for number, state in self._segments.items()
                if number != self._active and not state.writers and state.live < _SPARSE_FRACTION * self._segment_size
            ]
        return [number for _, number in sorted(found)]

    def live_segments(self) -> list[int]:
        """Return the segments that have live blocks, oldest first."""
        with self._lock:
            return sorted(number for number, state in self._segments.items() if state.live)

    def remove_segment(self, number: int) -> None:
        """Unlink a segment whose blocks have left it. Raises OSError."""
        segment_writer.remove(self._file(number))
        with self._lock:
            state = self._segments.pop(number)
            self.used -= state.live
            self._count_live(state, -state.live)

    def pause(self, error: OSError) -> None:
        """Take no new blocks until `retry_failed` finds that the tier works again."""
        self._note_failure(error)

    def retry_failed(self) -> None:
        """Retry what failed before, up to the first hole that still cannot be punched: 20,000 on a read-only disk took
        0.3 s of each retry. A hole that always fails keeps counting as used, but does not close the tier: the probe,
        which punches a hole too, determines whether the disk works."""
        while self._unpunched:
            with self._lock:
                # A hole that fails again goes to the other end, so that it blocks no others.
                hole = self._unpunched.popleft()
            if not self._free_spans([hole], again=True):
                break
        # Not while all writes hang: the probe would hang, too.
        if self.problem and not self._is_disabled and self._write_limit.acquire(blocking=False):
            try:
                self._tier_directory.probe()
                self._note_success()
            except OSError as error:
                self._note_failure(error)
            finally:
                self._write_limit.release()

    def close(self) -> None:
        """Release the directory for another daemon."""
        self._tier_directory.close()

    # --- internals ------------------------------------------------------------------------------------------------

    def _raise_if_full(self, error: OSError) -> None:
        """Raise FileSystemFull where that is the reason for a failed write. With quotas, `statvfs` may report more than
        the tier gets; so the limit is lowered to what is used."""
        if error.errno in _FULL_ERRORS:
            self.refresh_limit()
            with self._lock:
                self.limit = min(self.limit, self.used)
            raise FileSystemFull(error.errno, error.strerror) from None

    def _file(self, number: int) -> SegmentFile:
        return self._tier_directory.segment(number)

    def _allocate(self, sizes: Sequence[int]) -> tuple[int, list[int]]:
        """Return a segment, and offsets in it for the first of some spans, one or more. Raises OSError where a new
        segment cannot be created."""
        while (found := self._allocate_in_active(sizes)) is None:
            with self._creating:
                if not self._has_space(sizes[0]):
                    self._add_segment()
        return found

    def _allocate_in_active(self, sizes: Sequence[int]) -> tuple[int, list[int]] | None:
        starts: list[int] = []
        with self._lock:
            for size in sizes:
                if self._active is None or not self._has_space(size):
                    break
                state = self._segments[self._active]
                starts.append(state.end)
                state.end += size
                self._count_live(state, size)
            if self._active is None or not starts:
                return None
            self._segments[self._active].writers += 1
            return self._active, starts

    def _has_space(self, size: int) -> bool:
        """Return whether the active segment can take a span. An empty one takes any."""
        active = self._active
        end = self._segments[active].end if active is not None else self._segment_size
        return end == 0 or end + size <= self._segment_size

    def _add_segment(self) -> None:
        for _ in range(_MAX_FOREIGN_FILES):
            with self._lock:
                number = self._next
                self._next = (number + 1) % _NUMBERS
            try:
                segment_writer.create(self._file(number), self._segment_size)
            except FileExistsError:
                continue
            with self._lock:
                self._segments[number] = _Segment()
                self._active = number
            return
        raise FileExistsError(errno.EEXIST, "files of another program have the names of new segments; remove them")

    def _abandon(self, number: int) -> None:
        """Write nothing more into a segment. If its file was deleted, mounts may hold the old one open."""
        with self._lock:
            if self._active == number:
                self._active = None

    def _count_live(self, state: _Segment, size: int) -> None:
        """Add to a segment's live bytes. A segment that has any may need a page for its extents. Needs the lock."""
        had = state.live > 0
        state.live += size
        self.used += PAGE * ((state.live > 0) - had)

    def _free_spans(self, spans: Sequence[SegmentSpan], *, again: bool = False) -> bool:
        """Punch holes into segments. Return False where some failed, which are remembered for `retry_failed`. again:
        they have failed before."""
        failed, error = self._punch(spans)
        if error is not None:
            # The bytes are still there, so they still count.
            if not again:
                self._note_failure(error)
            left = set(failed)
            spans = [one for one in spans if one not in left]
        with self._lock:
            self._unpunched.extend(failed)
            for number, _, size in spans:
                if (state := self._segments.get(number)) is not None:
                    self._count_live(state, -size)
                    self.used -= size
        return error is None

    def _punch(self, spans: Sequence[SegmentSpan]) -> tuple[Sequence[SegmentSpan], OSError | None]:
        """Return the spans that could not be punched out, and the error."""
        if not self._punch_limit.acquire(timeout=0.0 if self.problem else _WRITE_TIMEOUT):
            return spans, TimeoutError(errno.ETIMEDOUT, f"freeing takes longer than {_WRITE_TIMEOUT} s")
        try:
            return segment_writer.punch(self._tier_directory.descriptor, spans)
        finally:
            self._punch_limit.release()

    def _note_failure(self, error: OSError | CachefsError) -> None:
        if isinstance(error, FileNotFoundError):
            try:
                self._tier_directory.recreate()
                _log.warning("%s tier: segments were deleted from %s by another program", self.name, self.directory)
                return
            except (OSError, CachefsError) as why:
                error = why
        problem = f"{self.directory}: {error.strerror or error}" if isinstance(error, OSError) else str(error)
        if problem != self.problem:
            self.problem = problem
            _log.error("%s tier takes no new blocks: %s", self.name, problem)

    def _note_success(self) -> None:
        if self.problem and not self._is_disabled:
            self.problem = ""
            _log.warning("%s tier takes blocks again", self.name)

    def _open_directory(self) -> TierDirectory:
        configured = configured_directory(self.number, self.config)
        directory = TierDirectory(configured)
        try:
            check_size(self.number, self.config, capacity.disk_size(directory.descriptor))
            if self.number == MEMORY and on_disk(directory.descriptor):
                _log.warning("[memory] dir %s is on a disk: use a directory on tmpfs, as /dev/shm is", self.directory)
            taken = directory.probe()
            if taken > PAGE:
                raise configured.unusable_error(
                    f"its file system frees no less than {taken} bytes at a time, and blocks begin every {PAGE}; use"
                    f" one with units of {PAGE} bytes (ext4 without bigalloc, tmpfs without huge pages, xfs)"
                )
        except OSError as error:
            # A disk that is full or read-only can still be read.
            if error.errno not in _TEMPORARY_ERRORS:
                directory.close()
                raise _unusable_error(configured, error) from None
            self._note_failure(error)
        except ConfigError:
            directory.close()
            raise
        return directory


def _unusable_error(directory: ConfiguredDirectory, error: OSError) -> ConfigError:
    if error.errno == errno.EOPNOTSUPP:
        return directory.unusable_error(
            "its file system cannot punch holes into files; use one on ext4, xfs, btrfs or tmpfs"
        )
    return directory.unusable_error(f"{error.strerror}; make it a writable directory")
