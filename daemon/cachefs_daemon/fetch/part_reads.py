"""Reads parts of large blocks for random readers, and fetches the rest of these blocks later.

A block of 4 MiB takes 105 ms on a link of 40 MB/s, and a record of 100 KB in it 3 ms. A sequential reader enters each
block at its beginning, so a read that begins elsewhere in an absent block comes from a random reader. Such a read gets
the pieces around its bytes with a request of their own. The rest of the block follows when it costs no reader anything:
in the order of the reads, and limited by `cachefs.planning.prefetch.background`.
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
from cachefs.planning.prefetch.background import Background
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch.bringing import Bringing
from cachefs_daemon.fetch.flights import Flight
from cachefs_daemon.fetch.held_parts import MOST_OF_BLOCK, give_up
from cachefs_daemon.fetch.passing import PassingBlock
from cachefs_daemon.fetch.slots import FetchSlots
from cachefs_daemon.fetch.tally import ORIGIN, Became
from cachefs_daemon.fetch.waiting_reads import WaitingRead
from cachefs_daemon.origin.base import ObjectRange
from cachefs_daemon.origin.patience import Patience

log = logging.getLogger(__name__)

# Smallest block that is read in parts, in bytes; and the smallest ratio of block to part. (The kernel asks for up to 1
# MiB around a page that a program touches in a mapped file.)
LEAST_BLOCK: Final = 1 << 20
LEAST_TIMES: Final = 3
# Fewest blocks of a file that is read in parts. A smaller file has arrived as a whole before many parts of it are read,
# and parts only delay that: LMDB of 25 blocks waited 3.2 s with parts, and 2.9 without.
LEAST_BLOCKS: Final = 32
# Blocks whose rest is queued, at most. The oldest beyond that are dropped.
MOST_RESTS: Final = 4096
# Seconds between checks whether readers wait.
_LOOK: Final = 0.05
_MEASURE: Final = 1.0

# Called with the part; or with None if the block has to be fetched in the usual way.
Tell = Callable[[PassingBlock | None], None]


@dataclass(slots=True)
class _PartRead:
    source: BlockSource
    # Loop time of the first reader's request.
    since: float
    # Callbacks of the readers.
    told: list[Tell] = field(default_factory=list)
    has_slot: bool = False


class PartReads:
    """Part reads in flight, and queued rests of blocks. Used on the event loop."""

    def __init__(self, bringing: Bringing, slots: FetchSlots) -> None:
        self._bringing = bringing
        self._slots = slots
        # Part reads in flight, by key of the block, then by offset and length.
        self._reading: dict[bytes, dict[tuple[int, int], _PartRead]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._rests: OrderedDict[bytes, BlockSource] = OrderedDict()  # blocks whose rest is queued, oldest first
        self._in_flight = 0  # bytes of blocks whose rest is in flight
        self._background = Background(0.0)
        self._measured = 0.0  # loop time
        self._timer: asyncio.TimerHandle | None = None

    def takes(self, ref: BlockRef, source: BlockSource) -> bool:
        """Return whether to read only a part of the block, for a waiting reader."""
        if ref.start <= 0 or ref.size <= 0 or source.length < LEAST_BLOCK:
            return False
        block_size = source.range.offset // source.number if source.number else source.length
        if source.range.size < LEAST_BLOCKS * block_size:
            return False
        if self._bringing.elsewhere is not None or self._bringing.is_flying(source.key):
            return False
        held, wanted = self._bringing.parts.of(source.key), _wanted(ref, source)
        if wanted.length * LEAST_TIMES > source.length:
            return False
        if any(part.end + source.range.offset == wanted.offset for part in held):
            return False  # a sequential reader of the block
        reading = self._reading.get(source.key, {})
        return (wanted.offset, wanted.length) in reading or len(held) + len(reading) < MOST_OF_BLOCK

    def ask(self, ref: BlockRef, source: BlockSource, until: float, tell: Tell) -> None:
        """Read a part for which `takes` returned True. until: loop time."""
        wanted = _wanted(ref, source)
        now = asyncio.get_running_loop().time()
        reading = self._reading.setdefault(source.key, {})
        part = reading.setdefault((wanted.offset, wanted.length), _PartRead(source, now))
        part.told.append(tell)
        if len(part.told) == 1:
            task = asyncio.create_task(self._read(source, wanted, until))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def waiting_reads(self, since: float) -> list[WaitingRead]:
        """Return the parts that reads have waited for since *since* (loop time) or longer."""
        return [
            WaitingRead(key, one.source.snapshot, one.source.origin.endpoint, one.since, has_slot=one.has_slot)
            for key, parts in self._reading.items()
            for one in parts.values()
            if one.since <= since
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
        part: PassingBlock | None = None
        begin, asked = wanted.offset - source.range.offset, asyncio.get_running_loop().time()
        try:
            # Two readers may want parts that begin alike, and a key must be unique among waiting reads.
            key = source.key + begin.to_bytes(8, "big") + wanted.length.to_bytes(8, "big")
            async with (
                asyncio.timeout_at(until),
                self._slots.slot(key, wanted.length, source.origin.endpoint, ahead=False),
            ):
                self._reading[source.key][wanted.offset, wanted.length].has_slot = True
                data = await source.origin.read(wanted, Patience(until, give_up))
            if len(data) == wanted.length:
                part = PassingBlock.of_part(source.key, data, begin)
                self._keep(source, part, asked)
            else:
                self._bringing.tally.discard(len(data))
        except (CachefsError, TimeoutError) as error:
            log.debug("a part of %s did not come: %s", source.subject, error)
        finally:
            reading = self._reading[source.key]
            told = reading.pop((wanted.offset, wanted.length)).told
            if not reading:
                del self._reading[source.key]
            for tell in told:
                tell(part)

    def _keep(self, source: BlockSource, part: PassingBlock, asked: float) -> None:
        """Keep a part until the rest of its block arrives, unless the whole block was requested since *asked* (loop
        time)."""
        if self._bringing.is_flying(source.key) or self._bringing.known(source, asked, ahead=True) is not source:
            self._bringing.tally.add(ORIGIN, Became.PASSED, len(part.data))
            return
        self._bringing.parts.add(source.key, part.begin, part.data)
        self._rests.setdefault(source.key, source)
        if len(self._rests) > MOST_RESTS:
            self._bringing.parts.drop(self._rests.popitem(last=False)[0])
        asyncio.get_running_loop().call_soon(self._bring_rests)  # after its reader has been answered

    def _bring_rests(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._rests and (self._in_flight == 0 or self._in_flight < self._most()):
            key, source = self._rests.popitem(last=False)
            if not self._bringing.parts.of(key):
                continue  # the whole block has arrived, or its parts were dropped
            flight = self._bringing.join(self._bringing.renewed(source), ahead=True, transient=True)
            self._in_flight += source.length
            flight.on_landing(partial(self._landed, source.length))
        if self._rests:
            self._timer = asyncio.get_running_loop().call_later(_LOOK, self._bring_rests)

    def _landed(self, size: int, _: Flight) -> None:
        self._in_flight -= size
        self._bring_rests()

    def _most(self) -> int:
        now = asyncio.get_running_loop().time()
        if now - self._measured >= _MEASURE:
            self._measured = now
            self._background.measure(self._bringing.fetched_bytes, now)
        return self._background.most(is_waited_for=self._slots.is_waited_for)


def _wanted(ref: BlockRef, source: BlockSource) -> ObjectRange:
    """Return the range of whole pieces around the reader's bytes."""
    begin = ref.start // PIECE_SIZE * PIECE_SIZE
    end = min(source.length, -(-(ref.start + ref.size) // PIECE_SIZE) * PIECE_SIZE)
    one = source.range
    return ObjectRange(one.key, one.version, one.size, one.offset + begin, max(0, end - begin))
