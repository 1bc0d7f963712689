"""The daemon's threads: blocking work never runs on the event loop.

The short work of a read with a waiting reader has a pool of its own. So it is delayed neither by long work (walking a
million entries, syncing a file) nor by work that is ahead of its reader. During a warmup of 2,500 files/s this lowered
the time of a fetch from 21 to 4 ms where the block was there, and from 45 to 10 ms where it was not. Computing long
sequences of jobs takes seconds, so planning has a pool of its own as well.

A disk may hang, and with it each thread that uses it. So moving blocks ahead of readers, and the node's upkeep, have
pools of their own, and all other work goes on. More threads that move blocks would cost readers: with 8 of them the
median time of a reader's put was 6.4 ms, with 4 it is 3.8 ms.
"""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Steps of the node's upkeep (see `Node.maintain`): each has a thread.
UPKEEP_THREADS: Final = 7


class Threads:
    """Pools of worker threads."""

    def __init__(self) -> None:
        self._urgent = ThreadPoolExecutor(8, thread_name_prefix="urgent")
        self._background = ThreadPoolExecutor(4, thread_name_prefix="background")
        self._ahead = ThreadPoolExecutor(4, thread_name_prefix="ahead")
        self._upkeep = ThreadPoolExecutor(UPKEEP_THREADS, thread_name_prefix="upkeep")
        self._planning = ThreadPoolExecutor(2, thread_name_prefix="planning")
        self._indexing = ThreadPoolExecutor(8, thread_name_prefix="indexing")

    async def run(
        self, work: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Run work of milliseconds for which a reader waits."""
        return await asyncio.get_running_loop().run_in_executor(self._urgent, functools.partial(work, *args, **kwargs))

    async def background(
        self, work: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Run other work, such as requests of administrators."""
        return await asyncio.get_running_loop().run_in_executor(
            self._background, functools.partial(work, *args, **kwargs)
        )

    async def ahead(
        self, work: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Run work that moves blocks ahead of their readers."""
        return await asyncio.get_running_loop().run_in_executor(self._ahead, functools.partial(work, *args, **kwargs))

    async def upkeep(self, work: Callable[[], Result], /) -> Result:
        """Run a step of the node's upkeep. As no step runs twice at once, none waits for another: whichever tier hangs,
        limits are enforced, although other programs may fill the machine's memory."""
        return await asyncio.get_running_loop().run_in_executor(self._upkeep, work)

    async def planning(
        self, work: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Run computations on sequences: numbers, and no I/O except on snapshots."""
        return await asyncio.get_running_loop().run_in_executor(
            self._planning, functools.partial(work, *args, **kwargs)
        )

    async def indexing(
        self, work: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Run work that itself waits for blocks. It does not use asyncio's own threads: S3 clients need these to fetch
        the blocks."""
        return await asyncio.get_running_loop().run_in_executor(
            self._indexing, functools.partial(work, *args, **kwargs)
        )

    def close(self) -> None:
        """Wait for running work, and drop work that has not begun."""
        self._urgent.shutdown(cancel_futures=True)
        self._background.shutdown(cancel_futures=True)
        self._ahead.shutdown(cancel_futures=True)
        self._upkeep.shutdown(cancel_futures=True)
        self._planning.shutdown(cancel_futures=True)
        self._indexing.shutdown(cancel_futures=True)
