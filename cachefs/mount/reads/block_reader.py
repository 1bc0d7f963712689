"""Reads bytes of files from this node's tiers; a block that no tier has is first fetched through the daemon.

A warm read is one index look-up, one pread into this module's buffer and one checksum, all on the trio thread. Only a
read that would wait (for a cold SSD page, or for a block that is not on the node) leaves that thread.

Cold reads run in threads, with a time limit. A disk may hang for minutes, and a thread that reads from it cannot be
ended. A read without an answer is therefore abandoned together with its thread, and the block comes from the origin.
The tier then counts as ailing: reads avoid it, except for one read every RETEST_SECONDS that tests whether the tier
answers again.

The worker's counters are here too: cumulative since its start, and sent to the daemon with every report.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import msgspec
import trio

from cachefs.block import (
    MAX_READ,
    MEMORY,
    PIECE_SIZE,
    SSD,
    TIER_NAMES,
    BlockLocation,
    block_count,
    block_key,
    block_number,
    pieces_match,
)
from cachefs.errors import CachefsError
from cachefs.messages import REPORT_SHARE, BlockRef, FetchedBlock, NodeView, Stall
from cachefs.mount.node_view import TierView
from cachefs.mount.reads.fetch_channel import FetchChannelClient, SharedFetches
from cachefs.mount.reads.read_records import ReadMarks
from cachefs.segment import SegmentReader
from cachefs.snapshot import Snapshot

# Most threads that read from the disk at once, abandoned threads included.
MAX_THREADS: Final = 32
# Most seconds that a read waits for the disk; less where the read's deadline is near. A disk that is merely busy
# answers the 32 reads of 1 MiB that can be ahead of a read in 0.3 s at 100 MB/s.
MAX_WAIT_SECONDS: Final = 5.0
RETEST_SECONDS: Final = 10.0
# Delay of the loop, in seconds, up to which the process counts as not having stood still.
_MAX_LOOP_DELAY: Final = 0.25
log = logging.getLogger(__name__)

# Most reads of one worker that wait at once for a disk, the daemon or the origin; further reads fail at once. Otherwise
# readers of resident blocks would queue behind readers that wait for an origin. A waiting read takes 35 KiB.
MAX_WAITING: Final = 4096
# Blocks requested ahead of a reader that goes through a large file: 16 MiB at the default block size hides 80 ms of
# origin latency from a reader of 200 MB/s.
BLOCKS_AHEAD: Final = 4
# Seconds between tries of a block that is resident according to the daemon but cannot be read here, as in a tier that
# this process may not open.
UNREADABLE_PAUSE: Final = 0.01
# MAX_ACCESSED: most keys of read blocks that are kept between two reports. A report is due at once after MUCH_ACCESSED
# keys, or after reads of REPORT_SHARE of the tiers' capacity.
MAX_ACCESSED: Final = 1_000_000
MUCH_ACCESSED: Final = 32
# Most stalls that are kept between two reports.
MAX_STALLS: Final = 100_000
# Blocks of a file that are located before other tasks may run: a look-up takes 1.3 us.
_LOCATED_AT_ONCE: Final = 512


@dataclass(slots=True)
class Counters:
    """Counts requests. `cachectl` and the daemon use the same names."""

    # FUSE requests, all of them and by their kind.
    requests: int = 0
    lookup: int = 0
    getattr: int = 0
    readdir: int = 0
    read: int = 0
    open: int = 0
    opendir: int = 0
    statfs: int = 0
    getxattr: int = 0
    # Counted with zero-open only.
    ioctl: int = 0
    other: int = 0
    # Reads that were answered from a tier of this node without asking the daemon, and their bytes.
    hits_memory: int = 0
    hits_ssd: int = 0
    hit_bytes_memory: int = 0
    hit_bytes_ssd: int = 0
    # Reads that had to wait for a fetch, and their bytes.
    misses: int = 0
    miss_bytes: int = 0
    # Copies in a tier that failed verification.
    bad: int = 0
    # Requests that were answered with an error other than "no such name".
    errors: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def count_hit(self, tier: int, size: int) -> None:
        """Count a read of *size* bytes answered from *tier* (cachefs.block)."""
        if tier == MEMORY:
            self.hits_memory += 1
            self.hit_bytes_memory += size
        else:
            self.hits_ssd += 1
            self.hit_bytes_ssd += size


class TierUnresponsive(Exception):
    """The tier does not answer."""


class ColdReads:
    """Performs the reads of one worker that wait for a disk."""

    def __init__(self, directories: Mapping[int, Path], owner: int) -> None:
        """directories: tier number -> directory of its segments; owner: user id that must own the segments."""
        self.use_tiers(directories, owner)
        self._limiter = trio.CapacityLimiter(MAX_THREADS)
        # Tier number -> when to try an ailing tier again (time of trio's clock).
        self._unresponsive: dict[int, float] = {}
        self._responded_at: dict[int, float] = {}  # tier number -> time of its last answer (trio's clock)

    def use_tiers(self, directories: Mapping[int, Path], owner: int) -> None:
        """Read from these tiers from now on; the arguments are those of `__init__`."""
        self._directories = directories
        self._owner = owner

    async def read(
        self, key: bytes, location: BlockLocation, start: int, size: int, deadline: float
    ) -> memoryview | None:
        """Read as SegmentReader.read does, into a new buffer. deadline: of the whole read, by trio's clock.

        Raises TierUnresponsive where the tier does not answer within half of the remaining time.
        """
        tier, now = location.tier, trio.current_time()
        if self._unresponsive.get(tier, -math.inf) > now:
            raise TierUnresponsive
        if tier in self._unresponsive:  # this read tests the tier on behalf of all reads
            self._unresponsive[tier] = now + RETEST_SECONDS
        give_up = now + (deadline - now) / 2
        while True:
            began = trio.current_time()
            patience = min(MAX_WAIT_SECONDS, give_up - began)
            with trio.move_on_after(patience):
                data = await self._read_in_thread(key, location, start, size)
                self._responded_at[tier] = trio.current_time()
                if self._unresponsive.pop(tier, None) is not None:
                    log.info("the %s tier answers again", TIER_NAMES[tier])
                return data
            # A disk that answered other reads meanwhile is busy. After a stop of this process its state is unknown.
            stood_still = trio.current_time() - began > patience + _MAX_LOOP_DELAY
            is_alive = stood_still or self._responded_at.get(tier, -math.inf) >= began
            if not is_alive or trio.current_time() >= give_up:
                break
        if tier not in self._unresponsive:
            log.warning(
                "the %s tier (%s) has not answered a read for %.1f s; its blocks come from the origin until it does",
                TIER_NAMES[tier], self._directories.get(tier), patience,
            )  # fmt: skip
        self._unresponsive[tier] = trio.current_time() + RETEST_SECONDS
        raise TierUnresponsive

    async def _read_in_thread(self, key: bytes, location: BlockLocation, start: int, size: int) -> memoryview | None:
        directories, owner = self._directories, self._owner

        def copy() -> memoryview | None:
            segments = SegmentReader(directories, owner)
            try:
                return segments.read(key, location, start, size, memoryview(bytearray(size + 2 * PIECE_SIZE)))
            finally:
                segments.close()

        return await trio.to_thread.run_sync(copy, limiter=self._limiter, abandon_on_cancel=True)


class BlockReader:
    """Performs the reads of one worker of a mount, from the look-up to the wait for a fetch, and records their
    report."""

    def __init__(
        self,
        channel: FetchChannelClient,
        view: NodeView,
        counters: Counters,
        marks: ReadMarks,
        failures: ReadMarks,
        *,
        needs_index: bool = True,
    ) -> None:
        """counters: of all requests of this worker; marks: where blocks that are read are marked; failures: see
        SharedFetches; needs_index: see TierView. Raises CachefsError where the index is needed and cannot be read."""
        self.counters = counters
        self.accessed: dict[bytes, None] = {}  # keys of the blocks read since the last report, oldest first
        self.report_due = trio.Event()  # set once a report of them is due
        self._bytes_accessed = 0  # read since the last report
        self._report_bytes = math.inf  # bytes of reads after which a report is due
        self.stalls: list[Stall] = []  # reads that have waited since the last report
        self.snapshots: set[str] = set()  # ids of the snapshots that were read since the last report
        self._marks = marks
        # Room for the whole pieces around a read, since only whole pieces can be verified.
        self._buffer = memoryview(bytearray(MAX_READ + 2 * PIECE_SIZE))
        self._tiers = TierView(view, needs_index=needs_index)
        self._segments = SegmentReader(self._tiers.directories, self._tiers.index.owner)
        self._cold_reads = ColdReads(self._tiers.directories, self._tiers.index.owner)
        self._fetches = SharedFetches(channel, failures, self._record_stall)
        self._read_deadline = view.read_deadline  # most seconds that a read may wait in all
        self._waiting = 0  # number of reads that wait now

    @property
    def has_index(self) -> bool:
        """False while the index cannot be opened: each block is then requested from the daemon."""
        return self._tiers.index.is_open

    @property
    def has_waiting(self) -> bool:
        """True while a read waits for a disk, the daemon or the origin."""
        return self._waiting > 0

    def adopt_view(self, view: NodeView) -> None:
        """Adopt the index and tiers of *view*; the daemon may have restarted. Raises as TierView.adopt_view."""
        if self._tiers.adopt_view(view):
            self._segments.close()
            self._segments = SegmentReader(self._tiers.directories, self._tiers.index.owner)
            self._cold_reads.use_tiers(self._tiers.directories, self._tiers.index.owner)
        self._segments.close_unlinked()
        self._read_deadline = view.read_deadline
        self._report_bytes = view.capacity * REPORT_SHARE or math.inf

    async def locate_blocks(self, snapshot: Snapshot, number: int, max_blocks: int) -> list[BlockLocation | None]:
        """Return the location of each of the first *max_blocks* blocks of file *number*; None for a block not on this
        node."""
        size, content = snapshot.size_and_content(number)
        found: list[BlockLocation | None] = []
        for block in range(min(max_blocks, block_count(size, snapshot.block_size))):
            if block % _LOCATED_AT_ONCE == _LOCATED_AT_ONCE - 1:
                await trio.lowlevel.checkpoint()
            found.append(self._tiers.index.get(block_key(content, block)))
        return found

    async def read(self, snapshot: Snapshot, number: int, offset: int, size: int) -> bytes | memoryview:
        """Return bytes [offset, offset + size) of file *number*, fewer at the end of the file.

        A memoryview is valid until the caller next awaits. Raises CachefsError with the errno for the reader.
        """
        self.snapshots.add(snapshot.id)
        length, content = snapshot.size_and_content(number)
        size = min(size, length - offset)
        if size <= 0:
            return b""
        block, start = divmod(offset, snapshot.block_size)
        key = block_key(content, block)
        if start == 0:
            if size == MAX_READ or offset + size == length:
                # All pages of a block come into the page cache only where it is read from its start.
                self._marks.set(key)
            if block > 0:
                self._fetch_ahead(snapshot, number, key)
        if start + size <= snapshot.block_size:
            data = self._read_resident(key, start, size)
            if data is not None:
                return data
            deadline = trio.current_time() + self._read_deadline
            return await self._read_waiting(snapshot, number, key, start, size, deadline)
        return await self._read_blocks(snapshot, number, offset, size)

    async def _read_blocks(self, snapshot: Snapshot, number: int, offset: int, size: int) -> bytes:
        """Read a range that spans several blocks."""
        deadline = trio.current_time() + self._read_deadline
        _, content = snapshot.size_and_content(number)
        block, start = divmod(offset, snapshot.block_size)
        parts: list[bytes] = []
        while size > 0:
            step, key = min(size, snapshot.block_size - start), block_key(content, block)
            if start == 0 and parts:
                self._fetch_ahead(snapshot, number, key)
            data = self._read_resident(key, start, step)
            if data is None:
                data = await self._read_waiting(snapshot, number, key, start, step, deadline)
            parts.append(bytes(data))
            block, start, size = block + 1, 0, size - step
        return b"".join(parts)

    def _read_resident(self, key: bytes, start: int, size: int) -> memoryview | None:
        """Return verified bytes of a block, or None where that would wait."""
        location = self._tiers.index.get(key)
        if location is None or size > MAX_READ:
            return None
        try:
            data = self._segments.read(key, location, start, size, self._buffer, wait=location.tier == MEMORY)
        except BlockingIOError:
            return None
        if data is not None:
            self.counters.count_hit(location.tier, size)
            self._record_access(key, size)
        return data

    async def _read_waiting(
        self, snapshot: Snapshot, number: int, key: bytes, start: int, size: int, deadline: float
    ) -> memoryview:
        """deadline: by trio's clock, counted from the arrival of the request."""
        if self._waiting >= MAX_WAITING:
            raise CachefsError(f"{MAX_WAITING} reads of this worker wait already; is an origin or a disk hanging?")
        self._waiting += 1
        try:
            location = self._tiers.index.get(key)
            bad, slow = b"", False
            if location is not None:
                try:
                    data = await self._read_copy(key, location, start, size, deadline)
                except TierUnresponsive:
                    bad, slow = location.pack(), True
                else:
                    if data is not None:
                        self.counters.count_hit(location.tier, size)
                        self._record_access(key, size)
                        return data
                    bad = self._record_bad_copy(key, location)
            ref = BlockRef(
                snapshot.id, number, block_number(key), failed_location=bad, start=start, size=size, is_tier_slow=slow
            )
            return await self._fetch_and_read(snapshot, key, ref, start, size, deadline)
        finally:
            self._waiting -= 1

    async def _fetch_and_read(
        self, snapshot: Snapshot, key: bytes, ref: BlockRef, start: int, size: int, deadline: float
    ) -> memoryview:
        self.counters.misses += 1
        self.counters.miss_bytes += size
        while True:
            fetched = await self._fetches.fetch_block(key, ref, deadline)
            slow = False
            try:
                if fetched.location:
                    data = await self._read_copy(key, BlockLocation.unpack(fetched.location), start, size, deadline)
                else:
                    data = _bypass_bytes(key, fetched, start, size)
            except TierUnresponsive:
                data, slow = None, True
            if data is not None:
                self._record_access(key, size)
                return data
            # The block was evicted before this read, or written badly (the daemon finds out which), or this read shared
            # the call of a read of other bytes of a block that no tier can hold.
            ref = msgspec.structs.replace(ref, failed_location=fetched.location, is_tier_slow=slow)
            await trio.sleep(UNREADABLE_PAUSE)
            if trio.current_time() > deadline:
                name = snapshot.path(ref.entry).decode(errors="backslashreplace")
                raise CachefsError(f"block {ref.number} of {name} could not be read within the deadline")

    async def _read_copy(
        self, key: bytes, location: BlockLocation, start: int, size: int, deadline: float
    ) -> memoryview | None:
        """Return verified bytes in this reader's buffer; None where the copy in the tier is bad. Raises
        TierUnresponsive."""
        if size <= MAX_READ:
            try:
                return self._segments.read(key, location, start, size, self._buffer, wait=location.tier == MEMORY)
            except BlockingIOError:
                pass
        began = trio.current_time()
        try:
            return await self._cold_reads.read(key, location, start, size, deadline)
        finally:
            if location.tier == SSD:
                self._record_stall(key, began, "ssd")

    def _record_bad_copy(self, key: bytes, location: BlockLocation) -> bytes:
        """Return the packed location of a bad copy; empty where the block was evicted during the read."""
        if self._tiers.index.get(key) != location:
            return b""
        self.counters.bad += 1
        log.warning(
            "a block in the %s tier failed verification (segment %08x, offset %d, %d bytes); it is fetched again",
            TIER_NAMES[location.tier], location.segment, location.offset, location.length,
        )  # fmt: skip
        return location.pack()

    def take_accessed(self) -> list[bytes]:
        """Return the keys of the blocks read since the last call, oldest first."""
        accessed, self.accessed, self._bytes_accessed = list(self.accessed), {}, 0
        self.report_due = trio.Event()
        return accessed

    def _record_access(self, key: bytes, size: int) -> None:
        self._bytes_accessed += size
        if len(self.accessed) < MAX_ACCESSED:
            self.accessed.pop(key, None)
            self.accessed[key] = None
            if len(self.accessed) == MUCH_ACCESSED or self._bytes_accessed > self._report_bytes:
                self.report_due.set()

    def _record_stall(self, key: bytes, began: float, source: str) -> None:
        if len(self.stalls) < MAX_STALLS:
            self.stalls.append(Stall(key, trio.current_time() - began, source))

    def _fetch_ahead(self, snapshot: Snapshot, number: int, key: bytes) -> None:
        """Start fetches of the blocks after block *key*. To be called when a reader reaches the start of a later block,
        which shows that it goes through the file."""
        size, content = snapshot.size_and_content(number)
        first = block_number(key) + 1
        last = min(first + BLOCKS_AHEAD, block_count(size, snapshot.block_size))
        missing = [
            BlockRef(snapshot=snapshot.id, entry=number, number=n)
            for n in range(first, last)
            if (after := block_key(content, n)) not in self._fetches and self._tiers.index.get(after) is None
        ]
        if missing:
            self._fetches.fetch_ahead(missing, self._read_deadline)


def _bypass_bytes(key: bytes, fetched: FetchedBlock, start: int, size: int) -> memoryview | None:
    """Return verified bytes of a bypass block from the daemon's answer; None where the answer has other bytes."""
    pieces = memoryview(fetched.data)
    first = start // PIECE_SIZE
    begin = first * PIECE_SIZE
    if len(pieces) < start + size - begin or not pieces_match(key, fetched.checksums, first, pieces):
        return None
    return pieces[start - begin : start + size - begin]
