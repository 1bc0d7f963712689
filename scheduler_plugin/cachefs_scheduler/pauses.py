"""Lets others have the event loop while something long is being made."""

import asyncio
import time
from typing import Final

# Seconds of work between two pauses. kube-scheduler's questions are to be answered within 50 ms.
WORK_SECONDS: Final = 0.01


class Pauses:
    """Of one piece of work, which calls `take` between its steps. Used on the event loop."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    async def take(self) -> None:
        """A pause, where it is time for one. What the work looks at may be another one afterwards."""
        if time.monotonic() - self._since >= WORK_SECONDS:
            await asyncio.sleep(0)
            self._since = time.monotonic()
