"""Downloads blocks into their rooms: one request per block, verified, checksummed and written."""

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cachefs.block import piece_checksums
from cachefs_daemon.fetch_process.channel import Channel, Closed
from cachefs_daemon.fetch_process.frames import (
    BEAT_SECONDS,
    MOST_ANSWERS,
    MOST_REASON,
    Batch,
    Done,
    Failed,
    Report,
    Segment,
    Wanted,
)
from cachefs_daemon.origin.base import ObjectRange
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.origin.http_connection import LEDGER, SUCCESS, Answer
from cachefs_daemon.origin.http_pool import HttpPool
from cachefs_daemon.origin.http_race import Races
from cachefs_daemon.origin.http_tls import Tls
from cachefs_daemon.origin.order import Way
from cachefs_daemon.origin.s3_answer import BrokenAnswer, Place, bytes_before, is_whole
from cachefs_daemon.origin.s3_checksum import check_whole, has_checksum
from cachefs_daemon.origin.s3_request import RequestMaker
from cachefs_daemon.store.segment_writer import Record, SegmentFile, write_record

# Ways that are remembered, most recently used.
_WAYS: Final = 64
# Seconds for which requests share one time in their signatures. Servers accept times up to 15 minutes off.
_MOMENT: Final = 1.0
# Blocks after which a report is sent at once, and seconds for which smaller reports wait.
_ENOUGH: Final = 12
_GATHER_SECONDS: Final = 0.003
_OVERLOADED: Final = (429, 503)


class _Refused(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.throttled = status in _OVERLOADED


class _Pools:
    """One connection pool per server and settings."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], tuple[HttpPool, Races, Endpoint]] = {}

    def of(self, way: Way) -> tuple[HttpPool, Races, Endpoint]:
        settings = way.settings
        key = way.route.server, way.verify, settings
        if key not in self._made:
            endpoint = Endpoint(way.route.server.url, settings.max_connections, hedge_share=settings.hedge_share)
            pool = HttpPool(way.route.server, settings, Tls(way.verify))
            self._made[key] = pool, Races(endpoint), endpoint
        return self._made[key]


class _OpenWay:
    def __init__(self, way: Way, pools: _Pools) -> None:
        self.pool, self._races, self.endpoint = pools.of(way)
        self.bucket = way.route.host
        self._way = way
        self._maker: RequestMaker | None = None
        self._until = 0.0  # monotonic time at which the maker expires
        self._told = 0, 0  # hedged and won requests of the endpoint at the last report

    async def ask(self, wanted: ObjectRange, key: str, etag: str) -> Answer:
        return await self._races.ask(self.pool, self._requests.get(key, etag, wanted), wanted.length)

    def hedges(self) -> tuple[int, int]:
        """Return the requests hedged, and the hedges won, since the last call."""
        now = self.endpoint.hedged, self.endpoint.hedges_won
        before, self._told = self._told, now
        return now[0] - before[0], now[1] - before[1]

    @property
    def _requests(self) -> RequestMaker:
        now = time.monotonic()
        if self._maker is None or now >= self._until:
            self._maker = RequestMaker(self._way.route, self._way.keys, checksums=self._way.checksums)
            self._until = now + _MOMENT
        return self._maker


class _Files:
    """The segments of one batch, closed when all its blocks are finished."""

    def __init__(self, segments: list[Segment], descriptors: list[int], blocks: int) -> None:
        self._segments = segments
        self._descriptors = descriptors
        self._left = blocks

    def write(self, wanted: Wanted, checksums: bytes, data: memoryview) -> None:
        """Write a block. Raises OSError."""
        segment = self._segments[wanted.segment]
        file = SegmentFile(Path(), -1, segment.number)
        record = Record(wanted.block, wanted.start, wanted.size, checksums)
        write_record(file, self._descriptors[wanted.segment], record, data, allocate=segment.allocate)

    def release(self) -> None:
        """Count a block as finished."""
        self._left -= 1
        if self._left <= 0:
            for descriptor in self._descriptors:
                os.close(descriptor)
            self._descriptors = []


class Carrier:
    """Serves one channel until it is closed. Used on the event loop."""

    def __init__(self, channel: Channel[Report, Batch], longest: float, ended: Callable[[], None]) -> None:
        """longest: seconds after which a block is given up. ended: called when the daemon is gone."""
        self._channel = channel
        self._longest = longest
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._pools = _Pools()
        self._ways: OrderedDict[int, _OpenWay] = OrderedDict()
        self._under_way: dict[asyncio.Task[None], float] = {}  # with deadlines in loop time
        self._done: list[Done] = []
        self._failed: list[Failed] = []
        self._sending: asyncio.TimerHandle | None = None
        self._is_full = False  # the channel is full

    def start(self) -> None:
        """Start to serve."""
        self._loop.add_reader(self._channel.fileno(), self._receive)
        self._send()
        self._beat()

    def _beat(self) -> None:
        now = self._loop.time()
        for task in [task for task, until in self._under_way.items() if until <= now]:
            task.cancel()
        if self._under_way and not self._is_full:
            self._send()
        self._loop.call_later(BEAT_SECONDS, self._beat)

    def _receive(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                self._take(*message)
        except Closed:
            self._ended()

    def _take(self, batch: Batch, descriptors: list[int]) -> None:
        for one in batch.ways:
            self._ways[one.number] = _OpenWay(one.way, self._pools)
            if len(self._ways) > _WAYS:
                self._ways.popitem(last=False)
        files = _Files(batch.segments, descriptors, len(batch.blocks))
        until = self._loop.time() + self._longest
        for wanted in batch.blocks:
            task = self._loop.create_task(self._carry(wanted, files))
            self._under_way[task] = until
            task.add_done_callback(self._forget)

    def _forget(self, task: "asyncio.Task[None]") -> None:
        self._under_way.pop(task, None)

    async def _carry(self, wanted: Wanted, files: _Files) -> None:
        began = self._loop.time()
        try:
            way = self._ways[wanted.way]
            self._ways.move_to_end(wanted.way)
            body = await _get(way, wanted)
            seconds = self._loop.time() - began
            way.endpoint.answered("", wanted.size, time.monotonic() - seconds)
            try:
                checksums = piece_checksums(wanted.block, body)
                files.write(wanted, checksums, body)
            except OSError:
                LEDGER.drop(len(body))
                raise
        except asyncio.CancelledError:
            self._failed.append(Failed(wanted.number, f"it took longer than {self._longest:g} s"))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:MOST_REASON]
            self._failed.append(Failed(wanted.number, reason, isinstance(error, _Refused) and error.throttled))
        else:
            self._done.append(Done(wanted.number, checksums, seconds, *way.hedges()))
        finally:
            files.release()
            self._send_soon()

    def _send_soon(self) -> None:
        """Schedule a report. A report costs the daemon as much as a block in it, so it waits for blocks that are about
        to finish."""
        alone = len(self._under_way) <= 1
        if not self._is_full and (alone or len(self._done) + len(self._failed) >= _ENOUGH):
            self._send()
        elif self._sending is None and not self._is_full:
            self._sending = self._loop.call_later(_GATHER_SECONDS, self._send)

    def _send(self) -> None:
        if self._is_full:
            self._loop.remove_writer(self._channel.fileno())
            self._is_full = False
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        try:
            while True:
                done, failed = self._done[:MOST_ANSWERS], self._failed[:MOST_ANSWERS]
                if not self._channel.send(Report(done, failed)):
                    self._is_full = True
                    self._loop.add_writer(self._channel.fileno(), self._send)
                    return
                del self._done[: len(done)], self._failed[: len(failed)]
                if not self._done and not self._failed:
                    return
        except Closed:
            self._ended()


async def _get(way: _OpenWay, wanted: Wanted) -> memoryview:
    """Return the bytes of the object. Raises on any failure."""
    whole = ObjectRange(wanted.key.encode(), wanted.etag.encode(), wanted.size, 0, wanted.size)
    answer = await way.ask(whole, wanted.key, wanted.etag)
    if answer.head.status not in SUCCESS:
        raise _Refused(answer.head.status)
    try:
        return await _checked(way, wanted, whole, answer)
    except BaseException as error:
        LEDGER.thrown_away(error, len(answer.body or b""))
        raise


async def _checked(way: _OpenWay, wanted: Wanted, whole: ObjectRange, answer: Answer) -> memoryview:
    """Return the body of a response after checking that it is the object. Raises as `_get`."""
    head, body, _ = answer
    if head.status != 200:
        raise _Refused(head.status)
    headers = head.headers
    before = 0
    if not is_whole(whole, head.length, headers):
        said, span = (headers.get(name, b"").decode("latin-1") for name in (b"etag", b"content-range"))
        before = bytes_before(whole, Place(way.bucket, wanted.key, ""), said, head.length, span)
    if before or body is None or len(body) != wanted.size:
        raise BrokenAnswer("the answer does not have the object's length")
    if has_checksum(headers):
        await check_whole(body, headers)
    return body
