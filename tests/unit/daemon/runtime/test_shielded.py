"""Work that goes on when its caller goes away."""

import asyncio
import logging

import pytest

from cachefs.errors import CachefsError
from cachefs_daemon.runtime.shielded import shielded
from tests import virtual_time


def test_work_goes_on_when_its_caller_goes_away(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []

    async def work(begun: asyncio.Event, go_on: asyncio.Event, *, fails: bool) -> str:
        begun.set()
        await go_on.wait()
        done.append("to its end")
        if fails:
            raise CachefsError("the disk is full")
        return "a result"

    async def scene() -> None:
        for fails in (False, True):
            begun, go_on = asyncio.Event(), asyncio.Event()
            caller = asyncio.create_task(shielded(work(begun, go_on, fails=fails)))
            await begun.wait()
            caller.cancel()
            with pytest.raises(asyncio.CancelledError):
                await caller
            go_on.set()
            await virtual_time.settle()
        assert done == ["to its end"] * 2
        assert await shielded(work(begun, go_on, fails=False)) == "a result"
        with pytest.raises(CachefsError, match="the disk is full"):
            await shielded(work(begun, go_on, fails=True))

    with caplog.at_level(logging.ERROR):
        virtual_time.run(scene())
    assert [record.getMessage().partition(" failed")[2] for record in caplog.records] == [
        " after its caller was cancelled: the disk is full"
    ]
