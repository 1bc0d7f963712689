"""Reads parts of large blocks for random readers, and fetches the rest of these blocks later.

A block of 4 MiB takes 105 ms on a link of 40 MB/s, and a record of 100 KB in it 3 ms. A sequential reader enters each
block at its beginning, so a read that begins elsewhere in an absent block comes from a random reader. Such a read gets
the pieces around its bytes with a request of their own. The rest of the block follows when it costs no reader anything:
in the order of the reads, and limited by `cachefs.planning.prefetch.readahead_budget`.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from cachefs.block import PIECE_SIZE
from cachefs.errors import CachefsError
from cachefs.messages import BlockRef
from cachefs.planning.prefetch.readahead_budget import BackgroundLimit
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch.block_fetch import BlockFetch, BypassBlock
from cachefs_daemon.fetch.concurrency_limiter import ConcurrencyLimiter
from cachefs_daemon.fetch.fetch_parts import ORIGIN, FetchResult
from cachefs_daemon.fetch.in_flight import InFlightFetches
from cachefs_daemon.fetch.partial_blocks import MAX_PARTS_PER_BLOCK, skip_retry
from cachefs_daemon.fetch.waiting_reads import WaitingRead
from cachefs_daemon.origin.base import ObjectRange
from cachefs_daemon.origin.deadline import Deadline

log = logging.getLogger(__name__)

# Smallest block that is read in parts, in bytes; and the smallest ratio of block to part. (The kernel asks for up to 1
# MiB around a page that a program touches in a mapped file.)
MIN_BLOCK_BYTES: Final = 1 << 20
MIN_BLOCK_TO_PART_RATIO: Final = 3
# Fewest blocks of a file that is read in parts. A smaller file has arrived as a whole before many parts of it are read,
# and parts only delay that: LMDB of 25 blocks waited 3.2 s with parts, and 2.9 without.
MIN_FILE_BLOCKS: Final = 32
# Blocks whose rest is queued, at most. The oldest beyond that are dropped.
MAX_QUEUED_RESTS: Final = 4096
# Seconds between checks whether readers wait.
_CHECK_SECONDS: Final = 0.05
_MEASURE_SECONDS: Final = 1.0

# Called with the part; or with None if the block has to be fetched in the usual way.
PartCallback = Callable[[BypassBlock | None], None]


@dataclass(slots=True)
class _PartRead:
    source: BlockSource
    # Loop time of the first reader's request.
    requested_at: float
    # Callbacks of the readers.
    callbacks: list[PartCallback] = field(default_factory=list)
    has_permit: bool = False


class RandomReads:
    """Part reads in flight, and queued rests of blocks. Used on the event loop."""

    def __init__(
        self, fetches: InFlightFetches, limiter: ConcurrencyLimiter, renew_source: Callable[[BlockSource], BlockSource]
    ) -> None:
        """renew_source: see `SourceLookups.renew`."""
        self._fetches = fetches
        self._renew_source = renew_source
        self._limiter = limiter
        # Part reads in flight, by key of the block, then by offset and length.
        self._reading: dict[bytes, dict[tuple[int, int], _PartRead]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._rests: OrderedDict[bytes, BlockSource] = OrderedDict()  # blocks whose rest is queued, oldest first
        self._in_flight = 0  # bytes of blocks whose rest is in flight
        self._background = BackgroundLimit(0.0)
        self._measured_at = 0.0  # loop time
        self._timer: asyncio.TimerHandle | None = None

    def can_read_part(self, ref: BlockRef, source: BlockSource) -> bool:
        """Return whether to read only a part of the block, for a waiting reader."""
        if ref.start <= 0 or ref.size <= 0 or source.length < MIN_BLOCK_BYTES:
            return False
        block_size = source.range.offset // source.number if source.number else source.length
        if source.range.size < MIN_FILE_BLOCKS * block_size:
            return False
        if self._fetches.is_fetching(source.key):
            return False
        parts, wanted = self._fetches.partial_blocks.parts_of(source.key), _range_of_pieces(ref, source)
        if wanted.length * MIN_BLOCK_TO_PART_RATIO > source.length:
            return False
        if any(part.end + source.range.offset == wanted.offset for part in parts):
            return False  # a sequential reader of the block
        reading = self._reading.get(source.key, {})
        return (wanted.offset, wanted.length) in reading or len(parts) + len(reading) < MAX_PARTS_PER_BLOCK

    def read_part(self, ref: BlockRef, source: BlockSource, until: float, on_part: PartCallback) -> None:
        """Read a part for which `can_read_part` returned True. until: loop time."""
        wanted = _range_of_pieces(ref, source)
        now = asyncio.get_running_loop().time()
        reading = self._reading.setdefault(source.key, {})
        part = reading.setdefault((wanted.offset, wanted.length), _PartRead(source, now))
        part.callbacks.append(on_part)
        if len(part.callbacks) == 1:
            task = asyncio.create_task(self._read(source, wanted, until))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def waiting_reads(self, since: float) -> list[WaitingRead]:
        """Return the parts that reads have waited for since *since* (loop time) or longer."""
        return [
            WaitingRead(
                key, part.source.snapshot, part.source.origin.endpoint, part.requested_at, has_permit=part.has_permit
            )
            for key, parts in self._reading.items()
            for part in parts.values()
            if part.requested_at <= since
        ]

    async def close(self) -> None:
        """Cancel all part reads."""
        if self._timer is not None:
            self._timer.cancel()
        self._rests.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, source: BlockSource, wanted: ObjectRange, until: float) -> None:
        part: BypassBlock | None = None
        begin, requested_at = wanted.offset - source.range.offset, asyncio.get_running_loop().time()
        try:
            # Two readers may want parts that begin alike, and a key must be unique among waiting reads.
            key = source.key + begin.to_bytes(8, "big") + wanted.length.to_bytes(8, "big")
            async with (
                asyncio.timeout_at(until),
                self._limiter.new_permit(key, wanted.length, source.origin.endpoint, ahead=False),
            ):
                self._reading[source.key][wanted.offset, wanted.length].has_permit = True
                data = await source.origin.read(wanted, Deadline(until, skip_retry))
            if len(data) == wanted.length:
                part = BypassBlock.of_part(source.key, data, begin)
                self._keep_part(source, part, requested_at)
            else:
                self._fetches.counts.count_discarded(len(data))
        except (CachefsError, TimeoutError) as error:
            log.debug("a part of %s could not be read: %s", source.subject, error)
        finally:
            reading = self._reading[source.key]
            callbacks = reading.pop((wanted.offset, wanted.length)).callbacks
            if not reading:
                del self._reading[source.key]
            for on_part in callbacks:
                on_part(part)

    def _keep_part(self, source: BlockSource, part: BypassBlock, requested_at: float) -> None:
        """Keep a part until the rest of its block arrives, unless the whole block was requested since *requested_at*
        (loop time)."""
        if (
            self._fetches.is_fetching(source.key)
            or self._fetches.recent_outcome_or_source(source, requested_at, ahead=True) is not source
        ):
            self._fetches.counts.count_block(ORIGIN, FetchResult.BYPASSED, len(part.data))
            return
        self._fetches.partial_blocks.add_part(source.key, part.begin, part.data)
        self._rests.setdefault(source.key, source)
        if len(self._rests) > MAX_QUEUED_RESTS:
            self._fetches.partial_blocks.drop_parts(self._rests.popitem(last=False)[0])
        asyncio.get_running_loop().call_soon(self._fetch_rests)  # after its reader has been answered

    def _fetch_rests(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._rests and (self._in_flight == 0 or self._in_flight < self._max_bytes_in_flight()):
            key, source = self._rests.popitem(last=False)
            if not self._fetches.partial_blocks.parts_of(key):
                continue  # the whole block has arrived, or its parts were dropped
            fetch = self._fetches.join_or_start_fetch(self._renew_source(source), ahead=True, may_be_transient=True)
            self._in_flight += source.length
            fetch.add_done_callback(partial(self._on_remaining_fetched, source.length))
        if self._rests:
            self._timer = asyncio.get_running_loop().call_later(_CHECK_SECONDS, self._fetch_rests)

    def _on_remaining_fetched(self, size: int, _: BlockFetch) -> None:
        self._in_flight -= size
        self._fetch_rests()

    def _max_bytes_in_flight(self) -> int:
        now = asyncio.get_running_loop().time()
        if now - self._measured_at >= _MEASURE_SECONDS:
            self._measured_at = now
            self._background.update_rate(self._fetches.fetched_bytes, now)
        return self._background.max_in_flight(has_waiting_reader=self._limiter.has_waiting_reader)


def _range_of_pieces(ref: BlockRef, source: BlockSource) -> ObjectRange:
    """Return the range of whole pieces around the reader's bytes."""
    begin = ref.start // PIECE_SIZE * PIECE_SIZE
    end = min(source.length, -(-(ref.start + ref.size) // PIECE_SIZE) * PIECE_SIZE)
    one = source.range
    return ObjectRange(one.key, one.version, one.size, one.offset + begin, max(0, end - begin))
