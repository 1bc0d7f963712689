"""Reads that wait for a disk which hangs, and what becomes of the reads after them."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from cachefs.block import SSD, BlockLocation
from cachefs.mount.reads import block_reader
from cachefs.mount.reads.block_reader import MAX_THREADS, MAX_WAIT_SECONDS, RETEST_SECONDS, ColdReads, TierUnresponsive

BYTES = memoryview(b"the bytes")


class Disk:
    """A disk that hangs until it is told to go on. Stands in for a SegmentReader."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.asked = 0

    def __call__(self, directories: object, owner: int) -> "Disk":
        return self

    def read(self, *_: object) -> memoryview:
        self.asked += 1
        self.goes_on.wait(60)
        return BYTES

    def close(self) -> None:
        pass


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    one = Disk()
    monkeypatch.setattr(block_reader, "SegmentReader", one)
    yield one
    one.goes_on.set()


async def read(cold: ColdReads, seconds: float) -> memoryview | None:
    return await cold.read(bytes(20), BlockLocation(SSD, 0, 0, 9, bytes(8)), 0, 9, trio.current_time() + seconds)


def test_a_read_is_given_up_with_half_of_its_time_left(disk: Disk) -> None:
    async def run() -> None:
        for seconds in (2.0, 100.0):
            began = trio.current_time()
            with pytest.raises(TierUnresponsive):
                await read(ColdReads({SSD: Path("/x")}, 0), seconds)
            assert trio.current_time() - began == pytest.approx(min(seconds / 2, MAX_WAIT_SECONDS))

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0.05))


def test_nobody_waits_for_a_tier_that_does_not_answer_but_one_that_finds_out(disk: Disk) -> None:
    async def run() -> None:
        cold = ColdReads({SSD: Path("/x")}, 0)
        ailing = 0

        async def fail() -> None:
            nonlocal ailing
            with pytest.raises(TierUnresponsive):
                await read(cold, 60)
            ailing += 1

        async with trio.open_nursery() as nursery:
            for _ in range(MAX_THREADS + 8):  # more than there are threads
                nursery.start_soon(fail)
        assert ailing == MAX_THREADS + 8
        asked, began = disk.asked, trio.current_time()
        await fail()
        assert (disk.asked, trio.current_time()) == (asked, began)
        disk.goes_on.set()
        await trio.sleep(RETEST_SECONDS + 1)
        assert await read(cold, 60) == BYTES
        assert await read(cold, 60) == BYTES

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0.05))
