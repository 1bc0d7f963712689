"""Bytes of files, out of this node's tiers; where a block is in none of them, after the daemon has brought it there.

A warm read is one index look-up, one pread into a buffer of ours and one checksum, all on the trio thread. Only a read
that would wait (for a cold SSD page, or for a block that is not on the node) is done elsewhere.
"""

import logging
import math
from dataclasses import dataclass, field
from typing import Final

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
    pieces_match,
)
from cachefs.errors import CachefsError, DaemonUnavailable
from cachefs.messages import BlockRef, Fetch, FetchedBlock, NodeView, Stall
from cachefs.mount.counters import Counters
from cachefs.mount.daemon_link import DaemonLink
from cachefs.mount.read_marks import ReadMarks
from cachefs.mount.tier_view import TierView
from cachefs.rpc import FETCH
from cachefs.segment import SegmentReader
from cachefs.snapshot import Snapshot

log = logging.getLogger(__name__)

# Blocks asked for ahead of a reader that goes through a large file: 16 MiB at the default block size hides 80 ms of
# origin latency from a reader of 200 MB/s.
BLOCKS_AHEAD: Final = 4
# Threads that read from the disk at once.
COLD_READS: Final = 32
# Seconds between tries to reach a daemon that is not there.
DAEMON_RETRY: Final = 0.1
# Seconds for which the failure of a block is remembered. The kernel follows a failed readahead with a read of the same
# page, which must not wait for a whole deadline again.
FAILURE_SECONDS: Final = 1.0
# Seconds between tries of a block that the daemon says is there and that we cannot read, as in a tier that we may not
# open.
UNREADABLE_PAUSE: Final = 0.01
# Between two reports at most so many keys of blocks that were read are kept; a report is due at once when there are
# MUCH_ACCESSED of them.
MAX_ACCESSED: Final = 1_000_000
MUCH_ACCESSED: Final = 32
# Stalls that are kept between two reports, at most.
MAX_STALLS: Final = 100_000


@dataclass(slots=True)
class _Flight:
    """A fetch that reads wait for."""

    landed: trio.Event = field(default_factory=trio.Event)
    # Once it has landed, one of these two is set.
    answer: FetchedBlock | None = None
    error: CachefsError | None = None
    # The time of trio's clock from which on the block is asked for again, and not answered with the error.
    forget_at: float = math.inf
    # Was a part of the wait for a daemon that was not there?
    daemon_away: bool = False


class BlockReader:
    """Reads for one worker of a mount, from the look-up to the wait for a fetch, and what is to be reported of them."""

    def __init__(self, link: DaemonLink, view: NodeView, counters: Counters, marks: ReadMarks) -> None:
        """counters: of all requests of this worker; marks: where blocks that are read are marked. Raises CachefsError
        where the index cannot be read."""
        self.counters = counters
        self.accessed: dict[bytes, None] = {}  # keys of the blocks read since the last report, oldest first
        self.much_accessed = trio.Event()  # set once there are MUCH_ACCESSED of them
        self.stalls: list[Stall] = []  # reads that have waited since the last report
        self._link = link
        self._marks = marks
        # Room for the whole pieces around a read, since only whole pieces can be verified.
        self._buffer = memoryview(bytearray(MAX_READ + 2 * PIECE_SIZE))
        self._flights: dict[bytes, _Flight] = {}  # by block key: the fetch under way, or its recent failure
        self._cold_limiter = trio.CapacityLimiter(COLD_READS)
        self._tiers = TierView(view)
        self._segments = SegmentReader(self._tiers.directories, self._tiers.index.owner)
        self._read_deadline = view.read_deadline  # seconds that a read may wait in all

    def follow(self, view: NodeView) -> None:
        """Use what a daemon, which may have restarted, says of its index and its tiers. Raises as TierView.follow."""
        if self._tiers.follow(view):
            self._segments.close()
            self._segments = SegmentReader(self._tiers.directories, self._tiers.index.owner)
        self._segments.forget_unlinked()
        self._read_deadline = view.read_deadline

    def locate(self, snapshot: Snapshot, number: int) -> list[Location | None]:
        """Where each block of file *number* is now; None for a block that is not on this node."""
        size, content = snapshot.file(number)
        return [self._tiers.index.get(block_key(content, n)) for n in range(block_count(size, snapshot.block_size))]

    async def read(self, snapshot: Snapshot, number: int, offset: int, size: int) -> bytes | memoryview:
        """Bytes [offset, offset + size) of file *number*, fewer at its end.

        A memoryview is valid until the caller next awaits. Raises CachefsError with the errno for the reader.
        """
        length, content = snapshot.file(number)
        size = min(size, length - offset)
        if size <= 0:
            return b""
        block, start = divmod(offset, snapshot.block_size)
        if start == 0 and (size == MAX_READ or offset + size == length):
            # Only of a block that is read from its start do all pages come into the page cache.
            self._marks.set(block_key(content, block))
        if start + size <= snapshot.block_size:
            return await self._read_block(snapshot, number, content, block, start, size)
        parts = []
        while size > 0:
            step = min(size, snapshot.block_size - start)
            parts.append(bytes(await self._read_block(snapshot, number, content, block, start, step)))
            block, start, size = block + 1, 0, size - step
        return b"".join(parts)

    async def _read_block(
        self, snapshot: Snapshot, number: int, content: bytes, block: int, start: int, size: int
    ) -> memoryview:
        key = block_key(content, block)
        if start == 0 and block > 0:
            self._ask_ahead(snapshot, number, content, block + 1)
        location = self._tiers.index.get(key)
        bad = b""
        if location is not None:
            data = await self._copy(key, location, start, size)
            if data is not None:
                self.counters.hit(location.tier, size)
                self._note_access(key)
                return data
            bad = self._blame(key, location)
        self.counters.misses += 1
        self.counters.miss_bytes += size
        deadline = trio.current_time() + self._read_deadline
        while True:
            ref = BlockRef(snapshot=snapshot.id, entry=number, number=block, bad=bad, start=start, size=size)
            answer = await self._fetch(key, ref, deadline)
            if answer.location:
                data = await self._copy(key, Location.unpack(answer.location), start, size)
            else:
                data = _passed(key, answer, start, size)
            if data is not None:
                self._note_access(key)
                return data
            # It was evicted again before we could read it, or written badly: the daemon finds out which. Or we have
            # shared the call of a read of other bytes of a block that no tier can hold.
            bad = answer.location
            await trio.sleep(UNREADABLE_PAUSE)
            if trio.current_time() > deadline:
                name = snapshot.path(number).decode(errors="backslashreplace")
                raise CachefsError(f"block {block} of {name} could not be read within the deadline")

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

    async def _copy(self, key: bytes, location: Location, start: int, size: int) -> memoryview | None:
        """Verified bytes in a buffer of ours; None where the copy in the tier is not right."""
        if size > MAX_READ:
            return await self._copy_in_thread(key, location, start, size)
        try:
            return self._segments.read(key, location, start, size, self._buffer, wait=location.tier == MEMORY)
        except BlockingIOError:
            return await self._copy_in_thread(key, location, start, size)

    async def _copy_in_thread(self, key: bytes, location: Location, start: int, size: int) -> memoryview | None:
        began = trio.current_time()
        try:
            return await self._copy_waiting(key, location, start, size)
        finally:
            if location.tier == SSD:
                self._note_stall(key, began, "ssd")

    async def _copy_waiting(self, key: bytes, location: Location, start: int, size: int) -> memoryview | None:
        def copy() -> memoryview | None:
            segments = SegmentReader(self._tiers.directories, self._tiers.index.owner)
            try:
                return segments.read(key, location, start, size, memoryview(bytearray(size + 2 * PIECE_SIZE)))
            finally:
                segments.close()

        return await trio.to_thread.run_sync(copy, limiter=self._cold_limiter)

    def _note_access(self, key: bytes) -> None:
        if len(self.accessed) < MAX_ACCESSED:
            self.accessed.pop(key, None)
            self.accessed[key] = None
            if len(self.accessed) == MUCH_ACCESSED:
                self.much_accessed.set()

    def _note_stall(self, key: bytes, began: float, source: str) -> None:
        if len(self.stalls) < MAX_STALLS:
            self.stalls.append(Stall(key, trio.current_time() - began, source))

    async def _fetch(self, key: bytes, ref: BlockRef, deadline: float) -> FetchedBlock:
        """Where the daemon has put the block, or its bytes where no tier can hold it. Reads of one block share one
        call, and its failure for a moment."""
        began = trio.current_time()
        flight = self._flights.get(key)
        if flight is None or trio.current_time() > flight.forget_at:
            flight = self._flights[key] = _Flight()
            try:
                flight.answer = await self._ask(flight, ref, deadline)
            except CachefsError as error:
                flight.error = error
                self._forget_old_failures()
                flight.forget_at = trio.current_time() + FAILURE_SECONDS
            finally:
                flight.landed.set()
                if flight.error is None:
                    del self._flights[key]
        else:
            await flight.landed.wait()
        self._note_stall(key, began, "daemon" if flight.daemon_away else "origin")
        if flight.answer is None:
            raise flight.error or CachefsError("the mount is ending")
        return flight.answer

    def _forget_old_failures(self) -> None:
        now = trio.current_time()
        self._flights = {key: flight for key, flight in self._flights.items() if flight.forget_at >= now}

    async def _ask(self, flight: _Flight, ref: BlockRef, deadline: float) -> FetchedBlock:
        while True:
            left = deadline - trio.current_time()
            try:
                reply = await self._link.call(FETCH, Fetch(blocks=[ref], deadline=left), seconds=left)
            except DaemonUnavailable:
                # The daemon may be restarting: it has time until the deadline to come back.
                flight.daemon_away = True
                if trio.current_time() + DAEMON_RETRY > deadline:
                    raise
                await trio.sleep(DAEMON_RETRY)
                continue
            answer = reply.blocks[0]
            if answer.errno:
                error = CachefsError(answer.message)
                error.errno = answer.errno
                raise error
            return answer

    def _ask_ahead(self, snapshot: Snapshot, number: int, content: bytes, first: int) -> None:
        """Have the next blocks brought to the node. To be called where a reader comes to the start of a later block:
        it is going through the file."""
        last = min(first + BLOCKS_AHEAD, block_count(snapshot.file(number)[0], snapshot.block_size))
        missing = [
            BlockRef(snapshot=snapshot.id, entry=number, number=n)
            for n in range(first, last)
            if (key := block_key(content, n)) not in self._flights and self._tiers.index.get(key) is None
        ]
        if missing:
            self._link.send(FETCH, Fetch(blocks=missing, ahead=True, deadline=self._read_deadline))


def _passed(key: bytes, answer: FetchedBlock, start: int, size: int) -> memoryview | None:
    """Verified bytes of a block that no tier can hold, out of the daemon's answer; None where it has others."""
    pieces = memoryview(answer.data)
    first = start // PIECE_SIZE
    begin = first * PIECE_SIZE
    if len(pieces) < start + size - begin or not pieces_match(key, answer.checksums, first, pieces):
        return None
    return pieces[start - begin : start + size - begin]
