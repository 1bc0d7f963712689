"""The daemon's threads: blocking work never runs on the event loop.

The short work of a read that somebody waits for has a pool of its own. So it is delayed neither by long work (walking a
million entries, syncing a file) nor by work that is ahead of its reader. What keeps the node's limits has threads of
its own, one for each tier and one for datasets, so that a disk that hangs holds up no other limits: while nobody looks,
others may fill the machine's memory. During a warmup of 2,500 files/s this lowered the time of a fetch from 21 to 4 ms
where the block was there, and from 45 to 10 ms where it was not. To compute long sequences of jobs takes seconds, so
that has a pool of its own as well.
"""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Threads:
    """Pools of worker threads."""

    def __init__(self) -> None:
        self._urgent = ThreadPoolExecutor(8, thread_name_prefix="urgent")
        self._background = ThreadPoolExecutor(4, thread_name_prefix="background")
        self._limits = ThreadPoolExecutor(3, thread_name_prefix="limits")
        self._planning = ThreadPoolExecutor(2, thread_name_prefix="planning")
        self._indexing = ThreadPoolExecutor(8, thread_name_prefix="indexing")

    async def run(
        self, work: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Run in a thread what takes milliseconds and has a reader waiting."""
        return await asyncio.get_running_loop().run_in_executor(self._urgent, functools.partial(work, *args, **kwargs))

    async def background(
        self, work: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Run in a thread anything else."""
        return await asyncio.get_running_loop().run_in_executor(
            self._background, functools.partial(work, *args, **kwargs)
        )

    async def limits(self, work: Callable[[], None], /) -> None:
        """Run what keeps limits, three of these at once."""
        await asyncio.get_running_loop().run_in_executor(self._limits, work)

    async def planning(
        self, work: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Run in a thread what is computed of sequences: numbers, and no I/O but of snapshots."""
        return await asyncio.get_running_loop().run_in_executor(
            self._planning, functools.partial(work, *args, **kwargs)
        )

    async def indexing(
        self, work: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Run in a thread what itself waits for blocks. Not in asyncio's own threads: S3 clients need these to bring
        the blocks."""
        return await asyncio.get_running_loop().run_in_executor(
            self._indexing, functools.partial(work, *args, **kwargs)
        )

    def close(self) -> None:
        """Wait for what runs, and drop what has not begun."""
        self._urgent.shutdown(cancel_futures=True)
        self._background.shutdown(cancel_futures=True)
        self._limits.shutdown(cancel_futures=True)
        self._planning.shutdown(cancel_futures=True)
        self._indexing.shutdown(cancel_futures=True)
