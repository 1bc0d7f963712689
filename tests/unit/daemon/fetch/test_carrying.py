"""What becomes of blocks that fetch processes bring while the store hangs."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch import carrying
from cachefs_daemon.fetch.carrying import Carrying
from cachefs_daemon.fetch.load import Load
from cachefs_daemon.fetch_process.frames import Done
from cachefs_daemon.origin.base import ObjectRange
from cachefs_daemon.runtime.errorlog import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.reserved_rooms import Expected, OpenSegment, Room

from cachefs.block import MEMORY, Location
from tests import virtual_time
from tests.waiting import until_async

PLACE = Location(MEMORY, 0, 0, 100, b"")
ROOM = Room(b"key", 100, MEMORY, 0, 0, claimed=False)


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

    def enter_and_reserve(
        self, written: Sequence[tuple[Room, bytes]], blocks: Sequence[Expected]
    ) -> tuple[list[Location], list[Room | None], list[OpenSegment]]:
        return [PLACE] * len(written), [None] * len(blocks), []


class Orders:
    """An origin whose blocks processes bring."""

    def order(self, wanted: ObjectRange) -> object:
        return self

    def brought(self, wanted: ObjectRange, seconds: float) -> None: ...


class Brought:
    """A process that has brought blocks, and says so."""

    ready, closed, blocks, bytes, heard = True, False, 0, 0, 0.0
    under_way = ()

    def __init__(self, loads: Sequence[Load]) -> None:
        self.loads = loads

    def answers(self) -> Iterator[tuple[Load, Room, Done]]:
        for number, load in enumerate(self.loads):
            yield load, ROOM, Done(number, b"", 0.01)


def test_while_the_store_hangs_others_bring_what_processes_have_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrying, "_ROOM_PATIENCE", 0.05)
    monkeypatch.setattr(carrying, "_takes_orders", lambda kind: True)
    rooms: Any = FullRooms()
    origin: Any = Orders()
    source = BlockSource(b"key", origin, ObjectRange(b"key", b"v1", 100, 0, 100), "snapshot")
    told: dict[str, list[Location | None]] = {}

    def teller(name: str) -> Callable[[Location | None], None]:
        return told.setdefault(name, []).append

    async def play(threads: HangingThreads) -> None:
        loop = asyncio.get_running_loop()
        carrier = Carrying(rooms, threads, ErrorLog(), 1, 20)
        loads = [Load(source, origin, origin, teller(name), lambda: None, loop.time()) for name in ("one", "two")]
        process: Any = Brought(loads)
        monkeypatch.setattr(carrier, "_pick", lambda: process)
        monkeypatch.setattr(carrier, "_start_more", lambda: None)
        for number in (1, 2):
            assert carrier.take(source, teller(f"asked {number}"), lambda: None)
            await until_async(lambda number=number: threads.calls == number)  # type: ignore[misc]
        carrier._receive(process)

        def are_told() -> bool:
            carrier._tick()
            return bool(told["one"] and told["two"])

        await until_async(are_told)
        assert told["one"] == told["two"] == [None]
        await until_async(carrier._is_stuck)
        assert not carrier.take(source, teller("late"), lambda: None)
        threads.goes_on.set()
        await until_async(lambda: not carrier._calls)
        assert told == {"one": [None, PLACE], "two": [None, PLACE], "asked 1": [None], "asked 2": [None], "late": []}
        assert not carrier._entering
        assert carrier.take(source, teller("again"), lambda: None)
        await carrier.close()

    async def run() -> None:
        threads = HangingThreads()
        try:
            await play(threads)
        finally:
            threads.close()

    virtual_time.run(run())
