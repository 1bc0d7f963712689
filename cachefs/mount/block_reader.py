"""Bytes of files, out of this node's tiers; where a block is in none of them, after the daemon has brought it there.

A warm read is one index look-up, one pread into a buffer of ours and one checksum, all on the trio thread. Only a read
that would wait (for a cold SSD page, or for a block that is not on the node) is done elsewhere.
"""

import logging
import math
from typing import Final

import msgspec
import trio

from cachefs.block import (
    MAX_READ,
    MEMORY,
    PIECE_SIZE,
    SSD,
    TIER_NAMES,
    Location,
    block_count,
    block_key,
    block_number,
    pieces_match,
)
from cachefs.errors import CachefsError
from cachefs.messages import REPORT_SHARE, BlockRef, FetchedBlock, NodeView, Stall
from cachefs.mount.cold_reads import ColdReads, TierAiling
from cachefs.mount.counters import Counters
from cachefs.mount.fetch_channel import FetchChannel
from cachefs.mount.fetches import Fetches
from cachefs.mount.read_marks import ReadMarks
from cachefs.mount.tier_view import TierView
from cachefs.segment import SegmentReader
from cachefs.snapshot import Snapshot

log = logging.getLogger(__name__)

# Reads that wait at once in one worker, for a disk, the daemon or the origin. One more fails at once: a reader of what
# is on the node must not wait behind those that an origin has left waiting. A waiting read takes 35 KiB.
MOST_WAITING: Final = 4096
# Blocks asked for ahead of a reader that goes through a large file: 16 MiB at the default block size hides 80 ms of
# origin latency from a reader of 200 MB/s.
BLOCKS_AHEAD: Final = 4
# Seconds between tries of a block that the daemon says is there and that we cannot read, as in a tier that we may not
# open.
UNREADABLE_PAUSE: Final = 0.01
# Between two reports at most so many keys of blocks that were read are kept; a report is due at once when there are
# MUCH_ACCESSED of them, or REPORT_SHARE of what the tiers hold was read.
MAX_ACCESSED: Final = 1_000_000
MUCH_ACCESSED: Final = 32
# Stalls that are kept between two reports, at most.
MAX_STALLS: Final = 100_000
# Blocks of a file that are located before others are let in: a look-up takes 1.3 us.
_LOCATED_AT_ONCE: Final = 512


class BlockReader:
    """Reads for one worker of a mount, from the look-up to the wait for a fetch, and what is to be reported of them."""

    def __init__(
        self,
        channel: FetchChannel,
        view: NodeView,
        counters: Counters,
        marks: ReadMarks,
        failures: ReadMarks,
        *,
        needs_index: bool = True,
    ) -> None:
        """counters: of all requests of this worker; marks: where blocks that are read are marked; failures: see
        Fetches; needs_index: see TierView. Raises CachefsError where it needs an index and that cannot be read."""
        self.counters = counters
        self.accessed: dict[bytes, None] = {}  # keys of the blocks read since the last report, oldest first
        self.much_accessed = trio.Event()  # set once a report of them is due
        self._bytes_accessed = 0  # read since the last report
        self._most_accessed = math.inf  # bytes after which a report is due
        self.stalls: list[Stall] = []  # reads that have waited since the last report
        self.snapshots: set[str] = set()  # ids of the snapshots that were read since the last report
        self._marks = marks
        # Room for the whole pieces around a read, since only whole pieces can be verified.
        self._buffer = memoryview(bytearray(MAX_READ + 2 * PIECE_SIZE))
        self._tiers = TierView(view, needs_index=needs_index)
        self._segments = SegmentReader(self._tiers.directories, self._tiers.index.owner)
        self._cold = ColdReads(self._tiers.directories, self._tiers.index.owner)
        self._fetches = Fetches(channel, failures, self._note_stall)
        self._read_deadline = view.read_deadline  # seconds that a read may wait in all
        self._waiting = 0  # reads that wait now

    @property
    def has_index(self) -> bool:
        """False while the index cannot be opened: no block is found then, and the daemon is asked for each."""
        return self._tiers.index.is_open

    @property
    def has_waiting(self) -> bool:
        """True while a read waits for a disk, the daemon or the origin."""
        return self._waiting > 0

    def follow(self, view: NodeView) -> None:
        """Use what a daemon, which may have restarted, says of its index and its tiers. Raises as TierView.follow."""
        if self._tiers.follow(view):
            self._segments.close()
            self._segments = SegmentReader(self._tiers.directories, self._tiers.index.owner)
            self._cold.use(self._tiers.directories, self._tiers.index.owner)
        self._segments.forget_unlinked()
        self._read_deadline = view.read_deadline
        self._most_accessed = view.capacity * REPORT_SHARE or math.inf

    async def locate(self, snapshot: Snapshot, number: int, most: int) -> list[Location | None]:
        """Where each of the first *most* blocks of file *number* is now; None for a block that is not on this node."""
        size, content = snapshot.file(number)
        found: list[Location | None] = []
        for block in range(min(most, block_count(size, snapshot.block_size))):
            if block % _LOCATED_AT_ONCE == _LOCATED_AT_ONCE - 1:
                await trio.lowlevel.checkpoint()
            found.append(self._tiers.index.get(block_key(content, block)))
        return found

    async def read(self, snapshot: Snapshot, number: int, offset: int, size: int) -> bytes | memoryview:
        """Bytes [offset, offset + size) of file *number*, fewer at its end.

        A memoryview is valid until the caller next awaits. Raises CachefsError with the errno for the reader.
        """
        self.snapshots.add(snapshot.id)
        length, content = snapshot.file(number)
        size = min(size, length - offset)
        if size <= 0:
            return b""
        block, start = divmod(offset, snapshot.block_size)
        key = block_key(content, block)
        if start == 0:
            if size == MAX_READ or offset + size == length:
                # Only of a block that is read from its start do all pages come into the page cache.
                self._marks.set(key)
            if block > 0:
                self._ask_ahead(snapshot, number, key)
        if start + size <= snapshot.block_size:
            data = self._read_here(key, start, size)
            if data is not None:
                return data
            deadline = trio.current_time() + self._read_deadline
            return await self._read_waiting(snapshot, number, key, start, size, deadline)
        return await self._read_blocks(snapshot, number, offset, size)

    async def _read_blocks(self, snapshot: Snapshot, number: int, offset: int, size: int) -> bytes:
        """Of several blocks."""
        deadline = trio.current_time() + self._read_deadline
        _, content = snapshot.file(number)
        block, start = divmod(offset, snapshot.block_size)
        parts: list[bytes] = []
        while size > 0:
            step, key = min(size, snapshot.block_size - start), block_key(content, block)
            if start == 0 and parts:
                self._ask_ahead(snapshot, number, key)
            data = self._read_here(key, start, step)
            if data is None:
                data = await self._read_waiting(snapshot, number, key, start, step, deadline)
            parts.append(bytes(data))
            block, start, size = block + 1, 0, size - step
        return b"".join(parts)

    def _read_here(self, key: bytes, start: int, size: int) -> memoryview | None:
        """Verified bytes of a block, if they can be had without waiting."""
        location = self._tiers.index.get(key)
        if location is None or size > MAX_READ:
            return None
        try:
            data = self._segments.read(key, location, start, size, self._buffer, wait=location.tier == MEMORY)
        except BlockingIOError:
            return None
        if data is not None:
            self.counters.hit(location.tier, size)
            self._note_access(key, size)
        return data

    async def _read_waiting(
        self, snapshot: Snapshot, number: int, key: bytes, start: int, size: int, deadline: float
    ) -> memoryview:
        """deadline: by trio's clock, from the moment in which the request has come."""
        if self._waiting >= MOST_WAITING:
            raise CachefsError(f"{MOST_WAITING} reads of this worker wait already; is an origin or a disk hanging?")
        self._waiting += 1
        try:
            location = self._tiers.index.get(key)
            bad, slow = b"", False
            if location is not None:
                try:
                    data = await self._copy(key, location, start, size, deadline)
                except TierAiling:
                    bad, slow = location.pack(), True
                else:
                    if data is not None:
                        self.counters.hit(location.tier, size)
                        self._note_access(key, size)
                        return data
                    bad = self._blame(key, location)
            ref = BlockRef(snapshot.id, number, block_number(key), bad=bad, start=start, size=size, slow=slow)
            return await self._fetch(snapshot, key, ref, start, size, deadline)
        finally:
            self._waiting -= 1

    async def _fetch(
        self, snapshot: Snapshot, key: bytes, ref: BlockRef, start: int, size: int, deadline: float
    ) -> memoryview:
        self.counters.misses += 1
        self.counters.miss_bytes += size
        while True:
            answer = await self._fetches.fetch(key, ref, deadline)
            slow = False
            try:
                if answer.location:
                    data = await self._copy(key, Location.unpack(answer.location), start, size, deadline)
                else:
                    data = _passed(key, answer, start, size)
            except TierAiling:
                data, slow = None, True
            if data is not None:
                self._note_access(key, size)
                return data
            # It was evicted again before we could read it, or written badly: the daemon finds out which. Or we have
            # shared the call of a read of other bytes of a block that no tier can hold.
            ref = msgspec.structs.replace(ref, bad=answer.location, slow=slow)
            await trio.sleep(UNREADABLE_PAUSE)
            if trio.current_time() > deadline:
                name = snapshot.path(ref.entry).decode(errors="backslashreplace")
                raise CachefsError(f"block {ref.number} of {name} could not be read within the deadline")

    async def _copy(self, key: bytes, location: Location, start: int, size: int, deadline: float) -> memoryview | None:
        """Verified bytes in a buffer of ours; None where the copy in the tier is not right. Raises TierAiling."""
        if size <= MAX_READ:
            try:
                return self._segments.read(key, location, start, size, self._buffer, wait=location.tier == MEMORY)
            except BlockingIOError:
                pass
        began = trio.current_time()
        try:
            return await self._cold.read(key, location, start, size, deadline)
        finally:
            if location.tier == SSD:
                self._note_stall(key, began, "ssd")

    def _blame(self, key: bytes, location: Location) -> bytes:
        """The location of bytes that are wrong, packed; empty where the block was evicted while we read it."""
        if self._tiers.index.get(key) != location:
            return b""
        self.counters.bad += 1
        log.warning(
            "a block in the %s tier failed verification (segment %08x, offset %d, %d bytes); it will be fetched anew",
            TIER_NAMES[location.tier], location.segment, location.offset, location.length,
        )  # fmt: skip
        return location.pack()

    def take_accessed(self) -> list[bytes]:
        """Returns the keys of the blocks that were read since the last call, oldest first."""
        accessed, self.accessed, self._bytes_accessed = list(self.accessed), {}, 0
        self.much_accessed = trio.Event()
        return accessed

    def _note_access(self, key: bytes, size: int) -> None:
        self._bytes_accessed += size
        if len(self.accessed) < MAX_ACCESSED:
            self.accessed.pop(key, None)
            self.accessed[key] = None
            if len(self.accessed) == MUCH_ACCESSED or self._bytes_accessed > self._most_accessed:
                self.much_accessed.set()

    def _note_stall(self, key: bytes, began: float, source: str) -> None:
        if len(self.stalls) < MAX_STALLS:
            self.stalls.append(Stall(key, trio.current_time() - began, source))

    def _ask_ahead(self, snapshot: Snapshot, number: int, key: bytes) -> None:
        """Have the blocks after the block *key* brought to the node. To be called where a reader comes to the start of
        a later block: it is going through the file."""
        size, content = snapshot.file(number)
        first = block_number(key) + 1
        last = min(first + BLOCKS_AHEAD, block_count(size, snapshot.block_size))
        missing = [
            BlockRef(snapshot=snapshot.id, entry=number, number=n)
            for n in range(first, last)
            if (after := block_key(content, n)) not in self._fetches and self._tiers.index.get(after) is None
        ]
        if missing:
            self._fetches.ahead(missing, self._read_deadline)


def _passed(key: bytes, answer: FetchedBlock, start: int, size: int) -> memoryview | None:
    """Verified bytes of a block that no tier can hold, out of the daemon's answer; None where it has others."""
    pieces = memoryview(answer.data)
    first = start // PIECE_SIZE
    begin = first * PIECE_SIZE
    if len(pieces) < start + size - begin or not pieces_match(key, answer.checksums, first, pieces):
        return None
    return pieces[start - begin : start + size - begin]
