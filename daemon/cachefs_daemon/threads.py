"""The daemon's threads: blocking work never runs on the event loop.

Short work somebody waits for (a look-up, writing a block) and long work (walking a million entries, syncing a file)
have pools of their own, so that the long never delays the short.
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
        self._short = ThreadPoolExecutor(8, thread_name_prefix="block")
        self._long = ThreadPoolExecutor(4, thread_name_prefix="walk")

    async def run(
        self, work: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """For what takes milliseconds."""
        return await asyncio.get_running_loop().run_in_executor(self._short, functools.partial(work, *args, **kwargs))

    async def walk(
        self, work: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """For what may take seconds."""
        return await asyncio.get_running_loop().run_in_executor(self._long, functools.partial(work, *args, **kwargs))

    def close(self) -> None:
        """Waits for what runs; drops what has not begun."""
        self._short.shutdown(cancel_futures=True)
        self._long.shutdown(cancel_futures=True)
