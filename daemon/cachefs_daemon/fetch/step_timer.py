"""Paces the steps of fetching ahead: soon after news, and at a slow interval without any."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from cachefs.errors import CachefsError
from cachefs.planning.sequences.plan import Plan

log = logging.getLogger(__name__)

# Longest and shortest interval between two steps, in seconds. A step takes 0.5 ms, whether it finds 5 blocks or 25.
MAX_INTERVAL: Final = 0.05
MIN_INTERVAL: Final = 0.01
# Seconds between two checks while no plan is published. A published job wakes the step at once.
IDLE_INTERVAL: Final = 0.5
# Pause after a failed step, in seconds.
FAILURE_PAUSE: Final = 1.0


class StepTimer:
    """Repeats the steps of all components that fetch ahead while a plan is published. Used on the event loop."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._wakeups: list[asyncio.Event] = []  # one for each repeated step

    def wake(self) -> None:
        """Trigger a step soon: a reader has read on, or a block has arrived."""
        for wakeup in self._wakeups:
            wakeup.set()

    async def repeat_step(self, step: Callable[[], Awaitable[None]]) -> None:
        """Repeat *step* as long as the daemon runs. A `wake` during a step triggers another one."""
        wakeup = asyncio.Event()
        self._wakeups.append(wakeup)
        while True:
            try:
                wakeup.clear()
                if not self._plan.is_empty:
                    await step()
                await asyncio.sleep(MIN_INTERVAL)
                if not wakeup.is_set():  # the timeout below costs more than this check
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(IDLE_INTERVAL if self._plan.is_empty else MAX_INTERVAL):
                            await wakeup.wait()
            except CachefsError as error:
                log.warning("prefetching pauses: %s", error)
                await asyncio.sleep(FAILURE_PAUSE)
            except Exception:
                log.exception("prefetching pauses")
                await asyncio.sleep(FAILURE_PAUSE)
