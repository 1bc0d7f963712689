"""One tier: a directory of segments under a byte budget.

A tier knows where bytes go and how many there are, not which blocks they are (that is the index) nor which to keep
(that is the policy). Room is reserved before a byte is written and given back after the hole is punched, so what `du`
says of the directory never exceeds the budget.
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

from cachefs.block import MEMORY, TIER_NAMES, Location
from cachefs.errors import CachefsError, ConfigError
from cachefs.sizes import format_size
from cachefs_daemon.store import capacity, segment_writer
from cachefs_daemon.store.owned_directory import Place
from cachefs_daemon.store.segment_writer import PAGE, Data, Record, SegmentFile, SegmentSpan, page_ceil, span
from cachefs_daemon.store.tier_directory import TierDirectory

_log = logging.getLogger(__name__)

# So many writes at once saturate any disk. Were there no bound, one that hangs would take every thread of the daemon.
_WRITES_AT_ONCE: Final = 4
_WRITE_PATIENCE: Final = 1.0
# The same for holes. With the writes they leave two of the eight threads that readers wait for.
_HOLES_AT_ONCE: Final = 2
# At most so many segments at 100 % live: mounts keep up to 512 open.
_MOST_SEGMENTS: Final = 256
_SPARSE: Final = 0.25
_FLOOR_BLOCKS: Final = 4
_TEMPORARY: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
# Files that are in the way of a new segment; a start knows of them all, so each was put there since.
_MOST_IN_THE_WAY: Final = 64
_NUMBERS: Final = 1 << 32
# Somebody else has taken what the budget promises. For tmpfs at the limit of a control group it is ENOMEM.
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)


class FileSystemFull(OSError):
    """There is no room for a block where a tier's segments are."""


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Where one tier is, what it may take, and how it chooses."""

    directory: Path  # where its segments are
    budget: int  # bytes
    segment_size: int  # bytes
    policy: str  # a name in cachefs.planning.eviction.policies.POLICIES
    # Bytes that stay free, whatever the budget says: of the file system, and for the memory tier of the machine's
    # memory.
    min_free: int = 0
    required_mount: Path | None = None  # a mount point on which something must be mounted


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A block to be written."""

    key: bytes
    checksums: bytes  # of its pieces (see cachefs.block)
    data: Data

    @property
    def span(self) -> int:
        """Bytes that it takes of a tier."""
        return span(len(self.data))


def place_of(number: int, config: TierConfig) -> Place:
    """The directory of tier *number*, for messages and checks."""
    return Place(f"[{TIER_NAMES[number]}] dir", config.directory, config.required_mount)


def check_budget(number: int, config: TierConfig, block_size: int) -> None:
    """Raises ConfigError where not even one block would fit."""
    smallest = span(block_size) + 2 * PAGE
    if config.budget - capacity.metadata_reserve(config.budget) < smallest:
        smallest += capacity.metadata_reserve(smallest) + 2 * PAGE
        raise ConfigError(
            f"[{TIER_NAMES[number]}] budget is {config.budget} bytes, less than one block of {block_size} takes;"
            f" set it to at least {smallest} (or lower block_size)"
        )


def check_size(number: int, config: TierConfig, size: int) -> None:
    """Raises ConfigError where a file system of *size* bytes is too small for the memory tier."""
    if number == MEMORY and size < config.budget:
        raise ConfigError(
            f"[memory] budget is {format_size(config.budget)}, but the file system behind {config.directory} has only "
            f"{format_size(size)}; lower the budget, enlarge it (mount -o remount,size=..., docker --shm-size), or "
            "choose another dir"
        )


def on_disk(directory: int | Path) -> bool:
    """Is a directory, or its descriptor, on a file system that is not in memory? Raises OSError."""
    return capacity.file_system(directory) not in capacity.IN_MEMORY


@dataclass(slots=True)
class _Segment:
    end: int = 0  # where the next record goes
    live: int = 0  # bytes of spans in it
    writers: int = 0  # writes under way


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
        self._creating = threading.Lock()  # held while the file of a segment is made, so that one is
        self._segments: dict[int, _Segment] = {}
        self._active: int | None = None  # number of the segment that is written to
        self._next = 0  # number of the next new segment
        self._unpunched: deque[SegmentSpan] = deque()  # holes that could not be punched
        self._writes = threading.BoundedSemaphore(_WRITES_AT_ONCE)
        self._holes = threading.BoundedSemaphore(_HOLES_AT_ONCE)
        self._condemned = False
        self._segment_size = max(config.segment_size, span(block_size), config.budget // _MOST_SEGMENTS)
        check_budget(number, config, block_size)
        # Bytes for blocks on their way to readers, also where memory gets short.
        self._floor = min(_FLOOR_BLOCKS * span(block_size), self.capacity)
        self._place = self._open_directory()
        self.limit = self.capacity  # bytes it may take now
        self.refresh_limit()

    def resize(self, config: TierConfig) -> None:
        """Take another budget and leave another room free. What is too much is evicted at the next look."""
        with self._lock:
            self.config = config
            self.capacity = config.budget - capacity.metadata_reserve(config.budget)
            self._floor = min(self._floor, self.capacity)
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

    def give_back(self, size: int) -> None:
        """*size* bytes that were reserved are not needed."""
        with self._lock:
            self.used -= size

    def refresh_limit(self) -> None:
        """Ask the machine anew how much the tier may take. Does I/O."""
        try:
            self._place.check()
            rooms = [capacity.disk_room(self._place.descriptor, self.config.min_free)]
        except OSError as error:
            self._failed(error)
            return
        if self.number == MEMORY:
            spare = self._floor - self.used
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

    def write(self, block: NewBlock) -> Location | None:
        """Write a block into room reserved for its span. None, the room given back, where that fails: see `problem`.

        Raises FileSystemFull, the room given back, where the file system has less room than the budget: then the limit
        is as low as that.
        """
        written, error = self._write([block])
        if error is not None:
            self._check_full(error)
            self._failed(error)
        return written[0] if written else None

    def write_many(self, blocks: Sequence[NewBlock]) -> list[Location]:
        """Write blocks into room reserved for their spans, up to the first one that cannot be written; the room of that
        one and of all others is given back."""
        written, error = self._write(blocks)
        if error is not None and error.errno not in _FULL:
            self._failed(error)
        return written

    def _write(self, blocks: Sequence[NewBlock]) -> tuple[list[Location], OSError | None]:
        """Where the first blocks are that could be written, and why the next one could not be."""
        written: list[Location] = []
        if not self._writes.acquire(timeout=_WRITE_PATIENCE):
            self.give_back(sum(block.span for block in blocks))
            return written, TimeoutError(errno.ETIMEDOUT, f"writes take longer than {_WRITE_PATIENCE} s")
        error: OSError | None = None
        try:
            while error is None and len(written) < len(blocks):
                locations, error = self._write_run(blocks[len(written) :])
                written += locations
        finally:
            self._writes.release()
        if error is None:
            self._worked()
        return written, error

    def _write_run(self, blocks: Sequence[NewBlock]) -> tuple[list[Location], OSError | None]:
        """Where the first blocks are, as far as one segment takes them; and if the next one could not be written, why,
        with the room of all others given back."""
        sizes = [block.span for block in blocks]
        try:
            number, starts = self._allocate(sizes)
        except OSError as error:
            self.give_back(sum(sizes))
            return [], error
        records = [
            (Record(block.key, start, len(block.data), block.checksums), block.data)
            for start, block in zip(starts, blocks, strict=False)
        ]
        done = 0
        try:
            done, failure = segment_writer.write_records(
                self._file(number), records, allocate=self._place.extent_per_record
            )
        finally:
            if done < len(records):
                left = zip(starts[done:], sizes[done : len(starts)], strict=True)
                self._free_spans([(number, start, size) for start, size in left])
                self.give_back(sum(sizes[len(starts) :]))
            with self._lock:
                self._segments[number].writers -= 1
        if failure is not None and failure.errno not in _FULL:
            self._abandon(number)
        return [record.location(self.number, number) for record, _ in records[:done]], failure

    # --- room that a fetch process writes into ------------------------------------------------------------------------

    @property
    def extent_per_record(self) -> bool:
        """Whether each record must be an extent of its own for its space to come back."""
        return self._place.extent_per_record

    def allot(self, spans: Sequence[int]) -> list[tuple[int, int]]:
        """Segment and offset of each span for which room is reserved: up to the first for which no segment can be made;
        the room of that one and of all others is given back. Call `end_writes` for each in the end."""
        places: list[tuple[int, int]] = []
        try:
            for size in spans:
                number, (start,) = self._allocate([size])
                places.append((number, start))
        except OSError as error:
            self.give_back(sum(spans[len(places) :]))
            if error.errno not in _FULL:
                self._failed(error)
        return places

    def open_segment(self, number: int) -> int:
        """A descriptor for writing, to be closed by the caller. Raises OSError: then nothing more is written there."""
        try:
            return segment_writer.open_to_write(self._file(number))
        except OSError as error:
            self._abandon(number)
            self._failed(error)
            raise

    def free_unused(self, spans: Sequence[SegmentSpan]) -> None:
        """Give spans back into which nobody writes any more, and to which no index entry points."""
        if spans:
            self._free_spans(spans)

    def end_writes(self, numbers: Iterable[int]) -> None:
        """Nobody writes any more into places in these segments, each of which was allotted once."""
        with self._lock:
            for number in numbers:
                if (state := self._segments.get(number)) is not None:
                    state.writers -= 1

    # --- blocks that are there ----------------------------------------------------------------------------------------

    def read(self, key: bytes, location: Location) -> bytes | None:
        return segment_writer.read_block(self._file(location.segment), key, location)

    def read_many(self, blocks: Sequence[tuple[bytes, Location]], buffer: memoryview) -> list[memoryview | None]:
        """The verified bytes of blocks (key, place), one after the other in *buffer*, which holds as many bytes as they
        have; None for each that is not there or not right."""
        parts = []
        at = 0
        for key, location in blocks:
            parts.append((key, location, buffer[at : at + location.length]))
            at += location.length
        right = segment_writer.read_into(self._place.descriptor, parts)
        return [data if is_right else None for (_, _, data), is_right in zip(parts, right, strict=True)]

    def read_ahead(self, location: Location) -> None:
        """Let the kernel begin to read a block into its page cache."""
        with contextlib.suppress(OSError):
            segment_writer.read_ahead(self._file(location.segment), location)

    def free_blocks(self, locations: Iterable[Location]) -> None:
        """Punch blocks out that no index entry, committed or not, points to any more."""
        spans = [(one.segment, segment_writer.record_start(one), span(one.length)) for one in locations]
        if spans:
            self._free_spans(spans)

    def suspect(self, reason: str, location: Location) -> None:
        """Its disk does not answer: take no new blocks until the next `retry`, and free only then the block at
        *location*, to which no index entry points any more."""
        self._failed(TimeoutError(errno.ETIMEDOUT, reason))
        with self._lock:
            self._unpunched.append((location.segment, segment_writer.record_start(location), span(location.length)))

    # --- segments -------------------------------------------------------------------------------------------------

    def segment_numbers(self) -> list[int]:
        """Segments in the directory, oldest first. New ones get numbers after all of these. Raises OSError."""
        found = self._place.listing()
        with self._lock:
            self._next = max(self._next, found.next)
        return found.segments

    def survey(self, number: int) -> tuple[int, list[tuple[int, int]]]:
        """Where the next record of a segment may begin, and the ranges that hold data. Raises OSError."""
        size, ranges = segment_writer.survey(self._file(number))
        if size < self._segment_size:
            # An earlier version made it, or somebody has cut it: it takes no more records.
            return max(page_ceil(size), self._segment_size), ranges
        return ranges[-1][1] if ranges else 0, ranges

    def free_unwritten(self, number: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Free what a killed daemon had allocated for records and not written: all but the *ranges* that hold data."""
        if self._place.extent_per_record:
            with contextlib.suppress(OSError):
                segment_writer.punch_gaps(self._file(number), ranges)

    def records(self, number: int, ranges: Iterable[tuple[int, int]]) -> Iterator[Record]:
        """The records found in some ranges of a segment, dead ones included. Raises OSError."""
        for start, end in ranges:
            yield from segment_writer.scan(self._file(number), start, end)

    def adopt_segment(self, number: int, end: int, live: int) -> None:
        """Account for a segment found at start, oldest first: *live* bytes of spans, all before *end*."""
        with self._lock:
            self._segments[number] = state = _Segment(end)
            self._count(state, live)
            self.used += live
            self._active = number if end < self._segment_size else None

    def condemn(self, error: OSError) -> None:
        """Take no blocks until the next start: nobody knows which segments there are."""
        self._condemned = True
        self._failed(error)

    def set_aside(self, number: int) -> int:
        """Leave a segment alone that cannot be used, but count what it takes: how many bytes."""
        taken = self._place.disk_bytes(number)
        with self._lock:
            self.used += taken
        return taken

    def discard(self, number: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Punch out adopted ranges that are nobody's."""
        self._free_spans([(number, start, end - start) for start, end in ranges])

    def sparse_segments(self) -> list[int]:
        """Closed segments so empty that they are better copied forward, emptiest first."""
        with self._lock:
            found = [
                (state.live, number)
                for number, state in self._segments.items()
                if number != self._active and not state.writers and state.live < _SPARSE * self._segment_size
            ]
        return [number for _, number in sorted(found)]

    def live_segments(self) -> list[int]:
        """The segments that have live blocks, oldest first."""
        with self._lock:
            return sorted(number for number, state in self._segments.items() if state.live)

    def remove_segment(self, number: int) -> None:
        """Unlink a segment whose blocks have left it. Raises OSError."""
        segment_writer.remove(self._file(number))
        with self._lock:
            state = self._segments.pop(number)
            self.used -= state.live
            self._count(state, -state.live)

    def suspend(self, error: OSError) -> None:
        """Take no new blocks until `retry` finds that it works again."""
        self._failed(error)

    def retry(self) -> None:
        """Try again what failed before, up to the first hole that cannot be punched again: 20,000 on a disk that is
        read-only took 0.3 s of each retry. One that always fails counts, and closes the tier to no other block: whether
        the disk works, the probe finds out, which punches one too."""
        while self._unpunched:
            with self._lock:
                # The other end is where it goes if it fails, so one that always fails is in nobody's way.
                hole = self._unpunched.popleft()
            if not self._free_spans([hole], again=True):
                break
        # Not while all writes hang: the probe would, too.
        if self.problem and not self._condemned and self._writes.acquire(blocking=False):
            try:
                self._place.probe()
                self._worked()
            except OSError as error:
                self._failed(error)
            finally:
                self._writes.release()

    def close(self) -> None:
        """Let another daemon have the directory."""
        self._place.close()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _check_full(self, error: OSError) -> None:
        """Raises FileSystemFull where that is why a write has failed. What `statvfs` says may be more than we get, as
        there are quotas, too; so the limit is no more than what is used."""
        if error.errno in _FULL:
            self.refresh_limit()
            with self._lock:
                self.limit = min(self.limit, self.used)
            raise FileSystemFull(error.errno, error.strerror) from None

    def _file(self, number: int) -> SegmentFile:
        return self._place.segment(number)

    def _allocate(self, sizes: Sequence[int]) -> tuple[int, list[int]]:
        """A segment, and offsets there for the first of some spans, one or more. Raises OSError where a new segment
        cannot be made."""
        while (found := self._take(sizes)) is None:
            with self._creating:
                if not self._has_space(sizes[0]):
                    self._add_segment()
        return found

    def _take(self, sizes: Sequence[int]) -> tuple[int, list[int]] | None:
        starts: list[int] = []
        with self._lock:
            for size in sizes:
                if self._active is None or not self._has_space(size):
                    break
                state = self._segments[self._active]
                starts.append(state.end)
                state.end += size
                self._count(state, size)
            if self._active is None or not starts:
                return None
            self._segments[self._active].writers += 1
            return self._active, starts

    def _has_space(self, size: int) -> bool:
        """Can the active segment take a span? An empty one takes any."""
        active = self._active
        end = self._segments[active].end if active is not None else self._segment_size
        return end == 0 or end + size <= self._segment_size

    def _add_segment(self) -> None:
        for _ in range(_MOST_IN_THE_WAY):
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
        raise FileExistsError(errno.EEXIST, "files of somebody else have the names of new segments; remove them")

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

    def _free_spans(self, spans: Sequence[SegmentSpan], *, again: bool = False) -> bool:
        """Punch holes into segments. False, with those that failed remembered for `retry`. again: it has failed
        before."""
        failed, error = self._punch(spans)
        if error is not None:
            # The bytes are still there, so they still count.
            if not again:
                self._failed(error)
            left = set(failed)
            spans = [one for one in spans if one not in left]
        with self._lock:
            self._unpunched.extend(failed)
            for number, _, size in spans:
                if (state := self._segments.get(number)) is not None:
                    self._count(state, -size)
                    self.used -= size
        return error is None

    def _punch(self, spans: Sequence[SegmentSpan]) -> tuple[Sequence[SegmentSpan], OSError | None]:
        """Which parts of these spans could not be punched out, and why."""
        if not self._holes.acquire(timeout=0.0 if self.problem else _WRITE_PATIENCE):
            return spans, TimeoutError(errno.ETIMEDOUT, f"freeing takes longer than {_WRITE_PATIENCE} s")
        try:
            return segment_writer.punch(self._place.descriptor, spans)
        finally:
            self._holes.release()

    def _failed(self, error: OSError | CachefsError) -> None:
        if isinstance(error, FileNotFoundError):
            try:
                self._place.remake()
                _log.warning("%s tier: segments were deleted from %s by somebody else", self.name, self.directory)
                return
            except (OSError, CachefsError) as why:
                error = why
        problem = f"{self.directory}: {error.strerror or error}" if isinstance(error, OSError) else str(error)
        if problem != self.problem:
            self.problem = problem
            _log.error("%s tier takes no new blocks: %s", self.name, problem)

    def _worked(self) -> None:
        if self.problem and not self._condemned:
            self.problem = ""
            _log.warning("%s tier takes blocks again", self.name)

    def _open_directory(self) -> TierDirectory:
        place = place_of(self.number, self.config)
        directory = TierDirectory(place)
        try:
            check_size(self.number, self.config, capacity.disk_size(directory.descriptor))
            if self.number == MEMORY and on_disk(directory.descriptor):
                _log.warning("[memory] dir %s is on a disk: use a directory on tmpfs, as /dev/shm is", self.directory)
            taken = directory.probe()
            if taken > PAGE:
                raise place.refused(
                    f"its file system frees no less than {taken} bytes at a time, and blocks begin every {PAGE}; use"
                    f" one with units of {PAGE} bytes (ext4 without bigalloc, tmpfs without huge pages, xfs)"
                )
        except OSError as error:
            # A disk that is full or read-only can still be read from.
            if error.errno not in _TEMPORARY:
                directory.close()
                raise _unusable(place, error) from None
            self._failed(error)
        except ConfigError:
            directory.close()
            raise
        return directory


def _unusable(place: Place, error: OSError) -> ConfigError:
    if error.errno == errno.EOPNOTSUPP:
        return place.refused("its file system cannot punch holes into files; use one on ext4, xfs, btrfs or tmpfs")
    return place.refused(f"{error.strerror}; make it a writable directory")
