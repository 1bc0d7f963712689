"""What becomes of blocks that fetch processes bring while the store hangs."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from cachefs.block import MEMORY, BlockLocation
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch import fetch_processes
from cachefs_daemon.fetch.fetch_parts import FetchCounts
from cachefs_daemon.fetch.fetch_processes import FetchProcesses
from cachefs_daemon.fetch.process import ProcessFetch
from cachefs_daemon.fetch_process.frames import BlockWritten
from cachefs_daemon.origin.base import ObjectRange
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.space_reservations import ExpectedBlock, ReservedSpace, WritableSegment
from tests import virtual_time
from tests.waiting import until_async

PLACE = BlockLocation(MEMORY, 0, 0, 100, b"")
ROOM = ReservedSpace(b"key", 100, MEMORY, 0, 0, is_quota_counted=False)


class HangingThreads(Threads):
    """Threads in which calls of the store hang until `goes_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = asyncio.Event()
        self.calls = 0

    async def ahead(self, work: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        await self.goes_on.wait()
        return work(*args, **kwargs)


class FullRooms:
    """Rooms of a store in which no tier takes anything more."""

    def publish_and_reserve(
        self, written: Sequence[tuple[ReservedSpace, bytes]], blocks: Sequence[ExpectedBlock]
    ) -> tuple[list[BlockLocation], list[ReservedSpace | None], list[WritableSegment]]:
        return [PLACE] * len(written), [None] * len(blocks), []


class Orders:
    """An origin whose blocks processes bring."""

    def prepare_get(self, wanted: ObjectRange) -> object:
        return self

    def note_success(self, wanted: ObjectRange, seconds: float) -> None: ...


class Brought:
    """A process that has brought blocks, and says so."""

    is_ready, is_closed, blocks, bytes, last_report_at = True, False, 0, 0, 0.0
    in_progress = ()

    def __init__(self, loads: Sequence[ProcessFetch]) -> None:
        self.loads = loads

    def receive_results(self) -> Iterator[tuple[ProcessFetch, ReservedSpace, BlockWritten]]:
        for number, load in enumerate(self.loads):
            yield load, ROOM, BlockWritten(number, b"", 0.01)


def test_while_the_store_hangs_others_bring_what_processes_have_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_processes, "_STORE_SECONDS", 0.05)
    monkeypatch.setattr(fetch_processes, "_can_prepare_gets", lambda kind: True)
    rooms: Any = FullRooms()
    origin: Any = Orders()
    source = BlockSource(b"key", origin, ObjectRange(b"key", b"v1", 100, 0, 100), "snapshot")
    told: dict[str, list[BlockLocation | None]] = {}

    def teller(name: str) -> Callable[[BlockLocation | None], None]:
        return told.setdefault(name, []).append

    async def play(threads: HangingThreads) -> None:
        loop = asyncio.get_running_loop()
        carrier = FetchProcesses(rooms, threads, ErrorLog(), FetchCounts(), 1, 20)
        loads = [
            ProcessFetch(source, origin, origin, teller(name), lambda: None, loop.time()) for name in ("one", "two")
        ]
        process: Any = Brought(loads)
        monkeypatch.setattr(carrier, "_least_busy_process", lambda: process)
        monkeypatch.setattr(carrier, "_start_missing_processes", lambda: None)
        for number in (1, 2):
            assert carrier.try_fetch(source, teller(f"asked {number}"), lambda: None)
            await until_async(lambda number=number: threads.calls == number)  # type: ignore[misc]
        carrier._receive_results(process)

        def are_told() -> bool:
            carrier._tick()
            return bool(told["one"] and told["two"])

        await until_async(are_told)
        assert told["one"] == told["two"] == [None]
        await until_async(carrier._is_store_stuck)
        assert not carrier.try_fetch(source, teller("late"), lambda: None)
        threads.goes_on.set()
        await until_async(lambda: not carrier._tasks)
        assert told == {"one": [None, PLACE], "two": [None, PLACE], "asked 1": [None], "asked 2": [None], "late": []}
        assert not carrier._publishing
        assert carrier.try_fetch(source, teller("again"), lambda: None)
        await carrier.close()

    async def run() -> None:
        threads = HangingThreads()
        try:
            await play(threads)
        finally:
            threads.close()

    virtual_time.run(run())
