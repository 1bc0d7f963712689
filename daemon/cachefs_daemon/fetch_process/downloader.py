"""Downloads blocks into their rooms: one request per block, verified, checksummed and written."""

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cachefs.block import piece_checksums
from cachefs_daemon.fetch_process.channel import ChannelClosed, FetchProcessChannel
from cachefs_daemon.fetch_process.frames import (
    HEARTBEAT_SECONDS,
    MAX_REASON,
    MAX_RESULTS,
    BlockFailed,
    BlockWritten,
    CommandBatch,
    FetchCommand,
    FetchReport,
    SegmentToWrite,
)
from cachefs_daemon.origin.base import ObjectRange
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.origin.http.connection import S3_COUNTERS, SUCCESS, HttpResponse
from cachefs_daemon.origin.http.hedging import HedgedRequests
from cachefs_daemon.origin.http.pool import HttpPool
from cachefs_daemon.origin.http.tls import ClientTls
from cachefs_daemon.origin.s3.prepared_get import GetParameters
from cachefs_daemon.origin.s3.request import RequestMaker
from cachefs_daemon.origin.s3.response import (
    BrokenS3Response,
    S3Target,
    bytes_before,
    has_checksum,
    is_whole_object,
    verify_checksum,
)
from cachefs_daemon.store.segment_writer import Record, SegmentFile, write_record

# Ways that are remembered, most recently used.
_MAX_CLIENTS: Final = 64
# Seconds for which requests share one time in their signatures. Servers accept times up to 15 minutes off.
_SIGNATURE_SECONDS: Final = 1.0
# Blocks after which a report is sent at once, and seconds for which smaller reports wait.
_REPORT_BLOCKS: Final = 12
_GATHER_SECONDS: Final = 0.003
_OVERLOADED: Final = (429, 503)


class _RefusedStatus(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.throttled = status in _OVERLOADED


class _ConnectionPools:
    """One connection pool per server and settings."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], tuple[HttpPool, HedgedRequests, Endpoint]] = {}

    def pool_for(self, parameters: GetParameters) -> tuple[HttpPool, HedgedRequests, Endpoint]:
        settings = parameters.settings
        key = parameters.route.server, parameters.verify, settings
        if key not in self._made:
            endpoint = Endpoint(parameters.route.server.url, settings.max_connections, hedge_share=settings.hedge_share)
            pool = HttpPool(parameters.route.server, settings, ClientTls(parameters.verify))
            self._made[key] = pool, HedgedRequests(endpoint), endpoint
        return self._made[key]


class _ObjectClient:
    def __init__(self, parameters: GetParameters, pools: _ConnectionPools) -> None:
        self.pool, self._hedged_requests, self.endpoint = pools.pool_for(parameters)
        self.bucket = parameters.route.host
        self._parameters = parameters
        self._request_maker: RequestMaker | None = None
        self._maker_expires = 0.0  # monotonic time at which the maker expires
        self._reported_hedges = 0, 0  # hedged and won requests of the endpoint at the last report

    async def get_object(self, wanted: ObjectRange, key: str, etag: str) -> HttpResponse:
        return await self._hedged_requests.send_request(
            self.pool, self._current_request_maker.make_get(key, etag, wanted), wanted.length
        )

    def take_hedge_counts(self) -> tuple[int, int]:
        """Return the requests hedged, and the hedges won, since the last call."""
        now = self.endpoint.hedged, self.endpoint.hedges_won
        before, self._reported_hedges = self._reported_hedges, now
        return now[0] - before[0], now[1] - before[1]

    @property
    def _current_request_maker(self) -> RequestMaker:
        now = time.monotonic()
        if self._request_maker is None or now >= self._maker_expires:
            self._request_maker = RequestMaker(
                self._parameters.route, self._parameters.keys, checksums=self._parameters.checksums
            )
            self._maker_expires = now + _SIGNATURE_SECONDS
        return self._request_maker


class _BatchSegments:
    """The segments of one batch, closed when all its blocks are finished."""

    def __init__(self, segments: list[SegmentToWrite], descriptors: list[int], blocks: int) -> None:
        self._segments = segments
        self._descriptors = descriptors
        self._blocks_left = blocks

    def write(self, command: FetchCommand, checksums: bytes, data: memoryview) -> None:
        """Write a block. Raises OSError."""
        segment = self._segments[command.segment]
        file = SegmentFile(Path(), -1, segment.number)
        record = Record(command.block, command.start, command.size, checksums)
        write_record(file, self._descriptors[command.segment], record, data, allocate=segment.allocate)

    def release(self) -> None:
        """Count a block as finished."""
        self._blocks_left -= 1
        if self._blocks_left <= 0:
            for descriptor in self._descriptors:
                os.close(descriptor)
            self._descriptors = []


class Downloader:
    """Serves one channel until it is closed. Used on the event loop."""

    def __init__(
        self, channel: FetchProcessChannel[FetchReport, CommandBatch], longest: float, on_end: Callable[[], None]
    ) -> None:
        """longest: seconds after which a block is given up. on_end: called when the daemon is gone."""
        self._channel = channel
        self._longest = longest
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._pools = _ConnectionPools()
        self._clients: OrderedDict[int, _ObjectClient] = OrderedDict()
        self._running: dict[asyncio.Task[None], float] = {}  # with deadlines in loop time
        self._done: list[BlockWritten] = []
        self._failed: list[BlockFailed] = []
        self._send_timer: asyncio.TimerHandle | None = None
        self._is_full = False  # the channel is full

    def start(self) -> None:
        """Start to serve."""
        self._loop.add_reader(self._channel.fileno(), self._receive)
        self._send()
        self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        now = self._loop.time()
        for task in [task for task, until in self._running.items() if until <= now]:
            task.cancel()
        if self._running and not self._is_full:
            self._send()
        self._loop.call_later(HEARTBEAT_SECONDS, self._send_heartbeat)

    def _receive(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                self._start_batch(*message)
        except ChannelClosed:
            self._on_end()

    def _start_batch(self, batch: CommandBatch, descriptors: list[int]) -> None:
        for one in batch.parameters:
            self._clients[one.number] = _ObjectClient(one.parameters, self._pools)
            if len(self._clients) > _MAX_CLIENTS:
                self._clients.popitem(last=False)
        files = _BatchSegments(batch.segments, descriptors, len(batch.blocks))
        until = self._loop.time() + self._longest
        for command in batch.blocks:
            task = self._loop.create_task(self._download(command, files))
            self._running[task] = until
            task.add_done_callback(self._remove_task)

    def _remove_task(self, task: "asyncio.Task[None]") -> None:
        self._running.pop(task, None)

    async def _download(self, command: FetchCommand, files: _BatchSegments) -> None:
        began = self._loop.time()
        try:
            client = self._clients[command.parameters]
            self._clients.move_to_end(command.parameters)
            body = await _download_object(client, command)
            seconds = self._loop.time() - began
            client.endpoint.note_response("", command.size, time.monotonic() - seconds)
            try:
                checksums = piece_checksums(command.block, body)
                files.write(command, checksums, body)
            except OSError:
                S3_COUNTERS.count_dropped_bytes(len(body))
                raise
        except asyncio.CancelledError:
            self._failed.append(BlockFailed(command.number, f"it took longer than {self._longest:g} s"))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:MAX_REASON]
            self._failed.append(
                BlockFailed(command.number, reason, isinstance(error, _RefusedStatus) and error.throttled)
            )
        else:
            self._done.append(BlockWritten(command.number, checksums, seconds, *client.take_hedge_counts()))
        finally:
            files.release()
            self._send_soon()

    def _send_soon(self) -> None:
        """Schedule a report. A report costs the daemon as much as a block in it, so it waits for blocks that are about
        to finish."""
        alone = len(self._running) <= 1
        if not self._is_full and (alone or len(self._done) + len(self._failed) >= _REPORT_BLOCKS):
            self._send()
        elif self._send_timer is None and not self._is_full:
            self._send_timer = self._loop.call_later(_GATHER_SECONDS, self._send)

    def _send(self) -> None:
        if self._is_full:
            self._loop.remove_writer(self._channel.fileno())
            self._is_full = False
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        try:
            while True:
                done, failed = self._done[:MAX_RESULTS], self._failed[:MAX_RESULTS]
                if not self._channel.send(FetchReport(done, failed)):
                    self._is_full = True
                    self._loop.add_writer(self._channel.fileno(), self._send)
                    return
                del self._done[: len(done)], self._failed[: len(failed)]
                if not self._done and not self._failed:
                    return
        except ChannelClosed:
            self._on_end()


async def _download_object(client: _ObjectClient, command: FetchCommand) -> memoryview:
    """Return the bytes of the object. Raises on any failure."""
    object_range = ObjectRange(command.key.encode(), command.etag.encode(), command.size, 0, command.size)
    response = await client.get_object(object_range, command.key, command.etag)
    if response.head.status not in SUCCESS:
        raise _RefusedStatus(response.head.status)
    try:
        return await _checked_body(client, command, object_range, response)
    except BaseException as error:
        S3_COUNTERS.count_unused_response(error, len(response.body or b""))
        raise


async def _checked_body(
    client: _ObjectClient, command: FetchCommand, object_range: ObjectRange, response: HttpResponse
) -> memoryview:
    """Return the body of a response after checking that it is the object. Raises as `_download_object`."""
    head, body, _ = response
    if head.status != 200:
        raise _RefusedStatus(head.status)
    headers = head.headers
    before = 0
    if not is_whole_object(object_range, head.length, headers):
        etag, span = (headers.get(name, b"").decode("latin-1") for name in (b"etag", b"content-range"))
        before = bytes_before(object_range, S3Target(client.bucket, command.key, ""), etag, head.length, span)
    if before or body is None or len(body) != command.size:
        raise BrokenS3Response("the answer does not have the object's length")
    if has_checksum(headers):
        await verify_checksum(body, headers)
    return body
