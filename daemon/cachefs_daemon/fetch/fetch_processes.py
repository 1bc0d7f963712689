"""Hands blocks to fetch processes: blocks that are fetched ahead, and are a whole object each.

The daemon works in batches: it reserves room, sends the blocks with their rooms to a process, and enters the written
blocks into the store. All exceptions are left to the fetcher: blocks that no tier takes, failed requests, and processes
that are slow or gone.
"""

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from cachefs.backoff import Backoff
from cachefs.messages import FetchProcessStatus
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch.fetch_parts import FetchCounts
from cachefs_daemon.fetch.process import FetchProcess, ProcessFetch, ProcessResultCallback, start_fetch_process
from cachefs_daemon.fetch_process.channel import ChannelClosed
from cachefs_daemon.fetch_process.frames import MAX_BLOCKS, BlockWritten
from cachefs_daemon.origin.s3.prepared_get import PreparedGetOrigin
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.space_reservations import (
    ExpectedBlock,
    ReservedSpace,
    SpaceReservations,
    WritableSegment,
    close_segments,
)

log = logging.getLogger(__name__)

# Bytes of one batch, at most, unless it is a single block.
_MAX_BYTES: Final = 8 << 20
# Concurrent calls of the store.
_MAX_STORE_CALLS: Final = 2
_TICK_SECONDS: Final = 0.25
# Seconds of silence after which the daemon fetches a process's blocks itself; and after which the process is killed.
_SILENT_SECONDS: Final = 1.0
_DEAD_SECONDS: Final = 10.0
# Seconds that a process may take to start: 0.3 usually, and above 10 with ten busy processes per processor.
_START_SECONDS: Final = 60.0
# Seconds that a block may wait for its room, and, once written, for its entry into the store.
_STORE_SECONDS: Final = 2.0
# Seconds without a block after which processes are ended.
_IDLE_SECONDS: Final = 180.0
# Seconds from the start of a failed process to the next start, at least and at most.
_MIN_RESTART_PAUSE: Final = 5.0
_MAX_RESTART_PAUSE: Final = 300.0
# Seconds to wait for processes to end when the daemon ends.
_END_SECONDS: Final = 2.0


# A written block, its room, and the checksums of its pieces.
_WrittenBlock = tuple[ProcessFetch, ReservedSpace, bytes]


class FetchProcesses:
    """All fetch processes, with the blocks on their way through them. Used on the event loop."""

    def __init__(
        self,
        rooms: SpaceReservations,
        threads: Threads,
        errors: ErrorLog,
        counts: FetchCounts,
        count: int,
        deadline: float,
    ) -> None:
        """counts: counts the bytes that were fetched in vain. count: number of processes, or 0 for none. deadline:
        longest time in seconds that a reader waits for an origin."""
        self._reservations = rooms
        self._threads = threads
        self._errors = errors
        self._counts = counts
        self._count = count
        self._deadline = deadline
        self._processes: list[FetchProcess] = []
        self._waiting: deque[ProcessFetch] = deque()  # blocks that wait for room
        self._reserving: set[ProcessFetch] = set()  # blocks whose room is being reserved
        self._written: deque[_WrittenBlock] = deque()
        self._publishing: dict[
            ProcessFetch, float
        ] = {}  # written blocks that are not in the store yet: loop time of writing
        self._worker_count = 0
        self._store_call_times: list[float] = []  # loop times at which the running calls of the store began
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_flushing = self._is_starting = self._is_closing = False
        self._timer: asyncio.TimerHandle | None = None
        self._restarts = Backoff(_MIN_RESTART_PAUSE, _MAX_RESTART_PAUSE)  # in loop time
        self._is_end_logged = False  # a warning about ended processes is in the log

    def try_fetch(self, source: BlockSource, on_result: ProcessResultCallback, on_arrival: Callable[[], None]) -> bool:
        """Let a process fetch the block. Returns False if none can now; then nothing is called.

        on_result: called once the block is in the store. on_arrival: called when its bytes have arrived, and its
        connection is free.
        """
        if not self._count or self._is_closing or not source.is_whole:
            return False
        origin: Any = source.origin
        if not _can_prepare_gets(type(source.origin)):
            return False
        order = origin.prepare_get(source.range)
        if order is None:
            return False
        if self._least_busy_process() is None:
            self._start_missing_processes()
            return False
        if self._is_store_stuck():
            return False
        if len(self._processes) < self._count:
            self._start_missing_processes()
        self._waiting.append(ProcessFetch(source, origin, order, on_result, on_arrival, _now()))
        self._flush_soon()
        return True

    def status(self) -> list[FetchProcessStatus]:
        """Return the status of the ready processes, for `cachectl status`."""
        return [
            FetchProcessStatus(pid=process.process.pid, blocks=process.blocks, in_flight=len(process.in_progress))
            for process in self._processes
            if process.is_ready
        ]

    async def close(self) -> None:
        """Kill all processes."""
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        for call in self._tasks:
            call.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        until = _now() + _END_SECONDS
        for process in self._processes:
            self._close_channel(process)
            process.kill()
        while any(one.process.poll() is None for one in self._processes) and _now() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        for process in self._processes:
            if process.process.poll() is not None:
                await self._threads.ahead(
                    self._reservations.free_spaces, [room for _, room in process.in_progress.values()]
                )
        self._processes.clear()

    # --- the store ----------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        self._is_flushing = False
        while (self._waiting or self._written) and self._worker_count < _MAX_STORE_CALLS:
            self._worker_count += 1
            self._start_task(self._run_store_calls())

    def _flush_soon(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    async def _run_store_calls(self) -> None:
        """Enter written blocks and reserve room for waiting ones, with one call of the store for both."""
        try:
            while self._waiting or self._written:
                written = [self._written.popleft() for _ in range(min(MAX_BLOCKS, len(self._written)))]
                batch = self._next_batch()
                self._reserving.update(batch)
                began = _now()
                self._store_call_times.append(began)
                try:
                    await self._publish_and_reserve(written, batch)
                finally:
                    self._store_call_times.remove(began)
                    self._reserving.difference_update(batch)
                    for process_fetch, _, _ in written:
                        self._publishing.pop(process_fetch, None)
        finally:
            self._worker_count -= 1

    def _is_store_stuck(self) -> bool:
        return (
            len(self._store_call_times) == _MAX_STORE_CALLS and _now() - max(self._store_call_times) >= _STORE_SECONDS
        )

    def _next_batch(self) -> list[ProcessFetch]:
        batch: list[ProcessFetch] = []
        size = 0
        while self._waiting and len(batch) < MAX_BLOCKS:
            size += self._waiting[0].source.length
            if batch and size > _MAX_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _publish_and_reserve(self, written: Sequence[_WrittenBlock], batch: Sequence[ProcessFetch]) -> None:
        entering = [(room, checksums) for _, room, checksums in written]
        expected = [ExpectedBlock(one.source.key, one.source.length, one.source.snapshot) for one in batch]
        try:
            locations, rooms, segments = await self._threads.ahead(
                self._reservations.publish_and_reserve, entering, expected
            )
        except Exception as error:
            self._note_bug(error)
            for process_fetch, _, _ in written:
                self._counts.count_discarded(process_fetch.source.length)
            for process_fetch in (*(load for load, _, _ in written), *batch):
                process_fetch.give_up()
            return
        for (process_fetch, _, _), location in zip(written, locations, strict=True):
            process_fetch.is_given_up = True  # no fetch by the daemon is needed
            if location is None:
                self._counts.count_discarded(process_fetch.source.length)
            process_fetch.on_result(location)
        self._send_batch(batch, rooms, segments)

    def _send_batch(
        self, batch: Sequence[ProcessFetch], rooms: Sequence[ReservedSpace | None], segments: Sequence[WritableSegment]
    ) -> None:
        placed = [(load, room) for load, room in zip(batch, rooms, strict=True) if room is not None]
        still = [(load, room) for load, room in placed if not load.is_given_up]
        process = self._least_busy_process()
        sent = still if process is not None and still and process.send_batch(still, segments, _now()) else []
        close_segments(segments)
        there = {id(load) for load, _ in sent}
        for process_fetch in batch:
            if id(process_fetch) not in there:
                process_fetch.give_up()
        if len(sent) < len(placed):
            self._free_spaces([room for load, room in placed if id(load) not in there])

    def _least_busy_process(self) -> FetchProcess | None:
        now = _now()
        able = [one for one in self._processes if one.is_ready and not one.is_closed and not _is_silent(one, now)]
        return min(able, key=lambda one: len(one.in_progress), default=None)

    # --- from the processes -------------------------------------------------------------------------------------------

    def _receive_results(self, process: FetchProcess) -> None:
        process.last_report_at = _now()
        freed: list[ReservedSpace] = []
        try:
            for process_fetch, room, result in process.receive_results():
                if isinstance(result, BlockWritten):
                    process.blocks += 1
                    process.bytes += process_fetch.source.length
                    process_fetch.origin.note_success(process_fetch.source.range, result.seconds)
                    if result.hedged or result.won:
                        process_fetch.origin.count_hedges(result.hedged, result.won)
                    self._written.append((process_fetch, room, result.checksums))
                    self._publishing[process_fetch] = process.last_report_at
                    process_fetch.on_arrival()
                else:
                    log.debug("the daemon fetches %s itself: %s", process_fetch.source.subject, result.reason)
                    process_fetch.origin.note_failure(result.reason, throttled=result.throttled)
                    freed.append(room)
                    process_fetch.give_up()
        except ChannelClosed:
            self._close_channel(process)
        if freed:
            self._free_spaces(freed)
        if self._written:
            self._flush_soon()

    def _free_spaces(self, rooms: list[ReservedSpace]) -> None:
        self._start_task(self._threads.ahead(self._reservations.free_spaces, rooms))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._note_bug(error)

    def _note_bug(self, error: BaseException) -> None:
        self._errors.add("fetch processes", f"internal error ({error!r}); see the daemon's log", bug=error)

    # --- processes ----------------------------------------------------------------------------------------------------

    def _start_missing_processes(self) -> None:
        missing = self._count - len(self._processes)
        if missing > 0 and not self._is_starting and self._restarts.is_due(_now()):
            self._is_starting = True
            self._start_task(self._start_processes(missing))

    async def _start_processes(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            for _ in range(count):
                process = await self._threads.background(start_fetch_process, self._deadline)
                process.started_at = process.last_report_at = process.last_batch_at = loop.time()
                self._processes.append(process)
                loop.add_reader(process.channel.fileno(), self._receive_results, process)
        except OSError as error:
            self._note_process_failure(f"it cannot be started: {error.strerror}")
        finally:
            self._is_starting = False
        if self._timer is None:
            self._timer = loop.call_later(_TICK_SECONDS, self._tick)

    def _note_process_failure(self, why: str) -> None:
        """Log the unexpected end of a process, and pause before the next start."""
        level = logging.DEBUG if self._is_end_logged else logging.WARNING
        log.log(level, "a fetch process failed: %s; the daemon fetches its blocks itself", why)
        self._is_end_logged = True
        self._restarts.note_failure(_now())

    def _close_channel(self, process: FetchProcess) -> None:
        """Close the channel, which ends the process, and give up its blocks."""
        if not process.is_closed:
            process.is_closed = True
            asyncio.get_running_loop().remove_reader(process.channel.fileno())
            process.channel.close()
            for process_fetch, _ in process.in_progress.values():
                process_fetch.give_up()

    def _tick(self) -> None:
        now = _now()
        for process_fetch in (*self._waiting, *self._reserving):
            if now - process_fetch.started_at >= _STORE_SECONDS:
                process_fetch.give_up()
        for process_fetch, came in self._publishing.items():
            if now - came >= _STORE_SECONDS:
                process_fetch.give_up()
        while self._waiting and self._waiting[0].is_given_up:
            self._waiting.popleft()
        for process in list(self._processes):
            self._check_process(process, now)
        again = self._processes or self._waiting or self._reserving or self._publishing
        self._timer = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick) if again else None

    def _check_process(self, process: FetchProcess, now: float) -> None:
        """Give up late blocks, end a hanging or idle process, and remove an ended one."""
        status = process.process.poll()
        if status is not None:
            self._remove_ended_process(process, status)
            return
        silent = _is_silent(process, now)
        for process_fetch, _ in process.in_progress.values():
            if silent or now - process_fetch.started_at >= self._deadline:
                process_fetch.give_up()
        if now - process.last_report_at >= (_DEAD_SECONDS if process.is_ready else _START_SECONDS) and (
            process.in_progress or not process.is_ready
        ):
            self._close_channel(process)
            process.kill()
        elif not process.in_progress and now - process.last_batch_at >= _IDLE_SECONDS:
            process.is_retired = True
            self._close_channel(process)

    def _remove_ended_process(self, process: FetchProcess, status: int) -> None:
        self._close_channel(process)
        process.request_counters.close(process.bytes)
        self._processes.remove(process)
        if process.in_progress:
            self._free_spaces([room for _, room in process.in_progress.values()])
        if not process.is_retired:
            lived = _now() - process.started_at
            if lived >= _MAX_RESTART_PAUSE:
                self._restarts.reset()
                self._is_end_logged = False
            self._note_process_failure(f"it ended with status {status} after {lived:.0f} s")


@functools.cache
def _can_prepare_gets(kind: type) -> bool:
    return issubclass(kind, PreparedGetOrigin)


def _is_silent(process: FetchProcess, now: float) -> bool:
    """Return whether a busy process has been silent for long."""
    return bool(process.in_progress) and now - process.last_report_at >= _SILENT_SECONDS


def _now() -> float:
    return asyncio.get_running_loop().time()
