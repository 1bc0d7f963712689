"""How often fetching ahead looks for work: soon after there is news, and now and then without any."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from cachefs.errors import CachefsError
from cachefs.planning.sequences.plan import Plan

log = logging.getLogger(__name__)

# Seconds between two steps, at most and at least. A step takes 0.5 ms, whether it finds 5 blocks or 25.
SLOWEST: Final = 0.05
FASTEST: Final = 0.01
# Seconds between two looks while no future is known. A published job wakes the step at once.
IDLE: Final = 0.5
# Seconds without a step after one has failed.
PAUSE: Final = 1.0


class Pace:
    """Repeats the steps of all who fetch ahead, while somebody's future is known. Used on the event loop."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._news: list[asyncio.Event] = []  # one for each step that is repeated

    def wake(self) -> None:
        """Somebody has read on, or a block has come: there may be something to do."""
        for news in self._news:
            news.set()

    async def repeat(self, step: Callable[[], Awaitable[None]]) -> None:
        """Runs as long as the daemon. What happens during a step leads to another one."""
        news = asyncio.Event()
        self._news.append(news)
        while True:
            try:
                news.clear()
                if not self._plan.is_empty:
                    await step()
                await asyncio.sleep(FASTEST)
                if not news.is_set():  # a timeout takes longer than to look
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(IDLE if self._plan.is_empty else SLOWEST):
                            await news.wait()
            except CachefsError as error:
                log.warning("prefetching pauses: %s", error)
                await asyncio.sleep(PAUSE)
            except Exception:
                log.exception("prefetching pauses")
                await asyncio.sleep(PAUSE)
