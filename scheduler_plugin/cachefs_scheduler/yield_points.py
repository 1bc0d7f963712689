"""Yields the event loop to other tasks during long work."""

import asyncio
import time
from typing import Final

# Seconds of work between pauses: kube-scheduler's requests must be answered within 50 ms.
WORK_SECONDS: Final = 0.01


class YieldPoints:
    """Pauses of one piece of work, which calls `yield_if_due` between its steps. Used on the event loop."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    async def yield_if_due(self) -> None:
        """Pause if WORK_SECONDS have passed. The data that the work reads may change meanwhile."""
        if time.monotonic() - self._since >= WORK_SECONDS:
            await asyncio.sleep(0)
            self._since = time.monotonic()
