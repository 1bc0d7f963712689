"""The daemon's threads: blocking work never runs on the event loop.

The short work of a read somebody waits for has a pool of its own, so that neither what is long (walking a million
entries, syncing a file) nor what is ahead of its reader delays it: during a warmup of 2,500 files/s that lowered the
time of a fetch from 21 to 4 ms where the block was there, and from 45 to 10 ms where it was not.
"""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Threads:
    def __init__(self) -> None:
        self._urgent = ThreadPoolExecutor(8, thread_name_prefix="urgent")
        self._background = ThreadPoolExecutor(4, thread_name_prefix="background")

    async def run(
        self, work: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """For what takes milliseconds and has a reader waiting."""
        return await asyncio.get_running_loop().run_in_executor(self._urgent, functools.partial(work, *args, **kwargs))

    async def background(
        self, work: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """For everything else."""
        return await asyncio.get_running_loop().run_in_executor(
            self._background, functools.partial(work, *args, **kwargs)
        )

    def close(self) -> None:
        """Waits for what runs; drops what has not begun."""
        self._urgent.shutdown(cancel_futures=True)
        self._background.shutdown(cancel_futures=True)
