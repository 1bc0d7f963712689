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

from cachefs.messages import FetchProcessStatus
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch.load import Load, Tell
from cachefs_daemon.fetch.process import FetchProcess, start
from cachefs_daemon.fetch_process.channel import Closed
from cachefs_daemon.fetch_process.frames import MOST_BLOCKS, Done
from cachefs_daemon.origin.order import OrderingOrigin
from cachefs_daemon.runtime.errorlog import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.reserved_rooms import Expected, OpenSegment, ReservedRooms, Room, close_all

log = logging.getLogger(__name__)

# Bytes of one batch, at most, unless it is a single block.
_MOST_BYTES: Final = 8 << 20
# Concurrent calls of the store.
_CALLS: Final = 2
_TICK_SECONDS: Final = 0.25
# Seconds of silence after which the daemon fetches a process's blocks itself; and after which the process is killed.
_SILENT: Final = 1.0
_DEAD: Final = 10.0
# Seconds that a process may take to start: 0.3 usually, and above 10 with ten busy processes per processor.
_START: Final = 60.0
# Seconds that a block may wait for its room, and, once written, for its entry into the store.
_ROOM_PATIENCE: Final = 2.0
# Seconds without a block after which processes are ended.
_IDLE: Final = 180.0
# Seconds from the start of a failed process to the next start, at least and at most.
_PAUSE: Final = 5.0
_LONGEST_PAUSE: Final = 300.0
# Seconds to wait for processes to end when the daemon ends.
_END_SECONDS: Final = 2.0


# A written block, its room, and the checksums of its pieces.
_Written = tuple[Load, Room, bytes]


class Carrying:
    """All fetch processes, with the blocks on their way through them. Used on the event loop."""

    def __init__(self, rooms: ReservedRooms, threads: Threads, errors: ErrorLog, count: int, deadline: float) -> None:
        """count: number of processes, or 0 for none. deadline: longest time in seconds that a reader waits for an
        origin."""
        self._rooms = rooms
        self._threads = threads
        self._errors = errors
        self._count = count
        self._deadline = deadline
        self._processes: list[FetchProcess] = []
        self._waiting: deque[Load] = deque()  # blocks that wait for room
        self._placing: set[Load] = set()  # blocks whose room is being reserved
        self._written: deque[_Written] = deque()
        self._entering: dict[Load, float] = {}  # written blocks that are not in the store yet: loop time of writing
        self._workers = 0
        self._calling: list[float] = []  # loop times at which the running calls of the store began
        self._calls: set[asyncio.Task[None]] = set()
        self._is_flushing = self._is_starting = self._is_closing = False
        self._timer: asyncio.TimerHandle | None = None
        self._not_before = 0.0  # earliest loop time of the next start
        self._pause = _PAUSE
        self._is_told = False  # a warning about ended processes is in the log
        self.discard: Callable[[int], None] = lambda size: None  # called with the size of bytes fetched in vain

    def take(self, source: BlockSource, tell: Tell, arrived: Callable[[], None]) -> bool:
        """Let a process fetch the block. Returns False if none can now; then nothing is called.

        tell: called once the block is in the store. arrived: called when its bytes have arrived, and its connection is
        free.
        """
        if not self._count or self._is_closing or not source.is_whole:
            return False
        origin: Any = source.origin
        if not _takes_orders(type(source.origin)):
            return False
        order = origin.order(source.range)
        if order is None:
            return False
        if self._pick() is None:
            self._start_more()
            return False
        if self._is_stuck():
            return False
        if len(self._processes) < self._count:
            self._start_more()
        self._waiting.append(Load(source, origin, order, tell, arrived, _now()))
        self._flush_soon()
        return True

    def status(self) -> list[FetchProcessStatus]:
        """Return the status of the ready processes, for `cachectl status`."""
        return [
            FetchProcessStatus(pid=one.process.pid, blocks=one.blocks, in_flight=len(one.under_way))
            for one in self._processes
            if one.ready
        ]

    async def close(self) -> None:
        """Kill all processes."""
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        until = _now() + _END_SECONDS
        for process in self._processes:
            self._shut(process)
            process.kill()
        while any(one.process.poll() is None for one in self._processes) and _now() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        for process in self._processes:
            if process.process.poll() is not None:
                await self._threads.ahead(self._rooms.give_back, [room for _, room in process.under_way.values()])
        self._processes.clear()

    # --- the store ----------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        self._is_flushing = False
        while (self._waiting or self._written) and self._workers < _CALLS:
            self._workers += 1
            self._call(self._work())

    def _flush_soon(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    async def _work(self) -> None:
        """Enter written blocks and reserve room for waiting ones, with one call of the store for both."""
        try:
            while self._waiting or self._written:
                written = [self._written.popleft() for _ in range(min(MOST_BLOCKS, len(self._written)))]
                batch = self._next_batch()
                self._placing.update(batch)
                began = _now()
                self._calling.append(began)
                try:
                    await self._enter_and_place(written, batch)
                finally:
                    self._calling.remove(began)
                    self._placing.difference_update(batch)
                    for load, _, _ in written:
                        self._entering.pop(load, None)
        finally:
            self._workers -= 1

    def _is_stuck(self) -> bool:
        return len(self._calling) == _CALLS and _now() - max(self._calling) >= _ROOM_PATIENCE

    def _next_batch(self) -> list[Load]:
        batch: list[Load] = []
        size = 0
        while self._waiting and len(batch) < MOST_BLOCKS:
            size += self._waiting[0].source.length
            if batch and size > _MOST_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _enter_and_place(self, written: Sequence[_Written], batch: Sequence[Load]) -> None:
        entering = [(room, checksums) for _, room, checksums in written]
        wanted = [Expected(one.source.key, one.source.length, one.source.snapshot) for one in batch]
        try:
            places, rooms, segments = await self._threads.ahead(self._rooms.enter_and_reserve, entering, wanted)
        except Exception as error:
            self._note_bug(error)
            for load, _, _ in written:
                self.discard(load.source.length)
            for load in (*(load for load, _, _ in written), *batch):
                load.give_up()
            return
        for (load, _, _), place in zip(written, places, strict=True):
            load.given_up = True  # no fetch by the daemon is needed
            if place is None:
                self.discard(load.source.length)
            load.tell(place)
        self._place(batch, rooms, segments)

    def _place(self, batch: Sequence[Load], rooms: Sequence[Room | None], segments: Sequence[OpenSegment]) -> None:
        placed = [(load, room) for load, room in zip(batch, rooms, strict=True) if room is not None]
        still = [(load, room) for load, room in placed if not load.given_up]
        process = self._pick()
        sent = still if process is not None and still and process.send(still, segments, _now()) else []
        close_all(segments)
        there = {id(load) for load, _ in sent}
        for load in batch:
            if id(load) not in there:
                load.give_up()
        if len(sent) < len(placed):
            self._give_back([room for load, room in placed if id(load) not in there])

    def _pick(self) -> FetchProcess | None:
        now = _now()
        able = [one for one in self._processes if one.ready and not one.closed and not _is_silent(one, now)]
        return min(able, key=lambda one: len(one.under_way), default=None)

    # --- from the processes -------------------------------------------------------------------------------------------

    def _receive(self, process: FetchProcess) -> None:
        process.heard = _now()
        freed: list[Room] = []
        try:
            for load, room, answer in process.answers():
                if isinstance(answer, Done):
                    process.blocks += 1
                    process.bytes += load.source.length
                    load.origin.brought(load.source.range, answer.seconds)
                    if answer.hedged or answer.won:
                        load.origin.hedged(answer.hedged, answer.won)
                    self._written.append((load, room, answer.checksums))
                    self._entering[load] = process.heard
                    load.arrived()
                else:
                    log.debug("%s is fetched by the daemon itself: %s", load.source.subject, answer.reason)
                    load.origin.not_brought(answer.reason, throttled=answer.throttled)
                    freed.append(room)
                    load.give_up()
        except Closed:
            self._shut(process)
        if freed:
            self._give_back(freed)
        if self._written:
            self._flush_soon()

    def _give_back(self, rooms: list[Room]) -> None:
        self._call(self._threads.ahead(self._rooms.give_back, rooms))

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._calls.add(task)
        task.add_done_callback(self._called)

    def _called(self, task: "asyncio.Task[None]") -> None:
        self._calls.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._note_bug(error)

    def _note_bug(self, error: BaseException) -> None:
        self._errors.add("fetch processes", f"internal error ({error!r}); see the daemon's log", bug=error)

    # --- processes ----------------------------------------------------------------------------------------------------

    def _start_more(self) -> None:
        missing = self._count - len(self._processes)
        if missing > 0 and not self._is_starting and _now() >= self._not_before:
            self._is_starting = True
            self._call(self._start(missing))

    async def _start(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            for _ in range(count):
                process = await self._threads.background(start, self._deadline)
                process.started = process.heard = process.used = loop.time()
                self._processes.append(process)
                loop.add_reader(process.channel.fileno(), self._receive, process)
        except OSError as error:
            self._failed(f"it cannot be started: {error.strerror}")
        finally:
            self._is_starting = False
        if self._timer is None:
            self._timer = loop.call_later(_TICK_SECONDS, self._tick)

    def _failed(self, why: str) -> None:
        """Log the unexpected end of a process, and pause before the next start."""
        level = logging.DEBUG if self._is_told else logging.WARNING
        log.log(level, "a fetch process is gone, %s; the daemon itself fetches what it was to bring", why)
        self._is_told = True
        self._not_before = _now() + self._pause
        self._pause = min(_LONGEST_PAUSE, 2 * self._pause)

    def _shut(self, process: FetchProcess) -> None:
        """Close the channel, which ends the process, and give up its blocks."""
        if not process.closed:
            process.closed = True
            asyncio.get_running_loop().remove_reader(process.channel.fileno())
            process.channel.close()
            for load, _ in process.under_way.values():
                load.give_up()

    def _tick(self) -> None:
        now = _now()
        for load in (*self._waiting, *self._placing):
            if now - load.began >= _ROOM_PATIENCE:
                load.give_up()
        for load, came in self._entering.items():
            if now - came >= _ROOM_PATIENCE:
                load.give_up()
        while self._waiting and self._waiting[0].given_up:
            self._waiting.popleft()
        for process in list(self._processes):
            self._look_at(process, now)
        again = self._processes or self._waiting or self._placing or self._entering
        self._timer = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick) if again else None

    def _look_at(self, process: FetchProcess, now: float) -> None:
        """Give up late blocks, end a hanging or idle process, and remove an ended one."""
        status = process.process.poll()
        if status is not None:
            self._ended(process, status)
            return
        silent = _is_silent(process, now)
        for load, _ in process.under_way.values():
            if silent or now - load.began >= self._deadline:
                load.give_up()
        if now - process.heard >= (_DEAD if process.ready else _START) and (process.under_way or not process.ready):
            self._shut(process)
            process.kill()
        elif not process.under_way and now - process.used >= _IDLE:
            process.retired = True
            self._shut(process)

    def _ended(self, process: FetchProcess, status: int) -> None:
        self._shut(process)
        process.book.close(process.bytes)
        self._processes.remove(process)
        if process.under_way:
            self._give_back([room for _, room in process.under_way.values()])
        if not process.retired:
            lived = _now() - process.started
            if lived >= _LONGEST_PAUSE:
                self._pause, self._is_told = _PAUSE, False
            self._failed(f"having ended with status {status} after {lived:.0f} s")


@functools.cache
def _takes_orders(kind: type) -> bool:
    return issubclass(kind, OrderingOrigin)


def _is_silent(process: FetchProcess, now: float) -> bool:
    """Return whether a busy process has been silent for long."""
    return bool(process.under_way) and now - process.heard >= _SILENT


def _now() -> float:
    return asyncio.get_running_loop().time()
