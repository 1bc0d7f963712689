"""Warm-ups that end hold nothing of what they were to bring."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import cast

import numpy as np

from cachefs.messages import BlockRef
from cachefs_daemon.content.warmup import WarmupBlocks, Warmups, WarmupState
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.runtime.threads import Threads
from tests import virtual_time


class _NeverAnswers:
    async def fetch_ahead(self, refs: list[BlockRef]) -> list[object]:
        await asyncio.Event().wait()
        return []


def test_one_that_was_stopped_lets_go_of_its_list_of_blocks() -> None:
    numbers = np.arange(1000)

    def blocks(numbers: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> Iterator[tuple[BlockRef, int]]:
        for number in numbers.tolist():
            yield BlockRef(snapshot="s", entry=number, number=0), 1

    async def scenario() -> None:
        nonlocal numbers
        warmups = Warmups(cast(Fetcher, _NeverAnswers()), cast(Threads, None))
        run = warmups.start_fetching(WarmupBlocks("set", blocks(numbers), 1000, 1000))
        listed = weakref.ref(numbers)
        del numbers
        await virtual_time.settle()
        run.task.cancel()
        with suppress(asyncio.CancelledError):
            await run.task
        gc.collect()
        assert (run.state, len(warmups), run.blocks_to_fetch.blocks) == (WarmupState.CANCELLED, 0, 1000)
        assert listed() is None

    virtual_time.run(scenario())
