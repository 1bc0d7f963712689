"""Opens origins before they are read, and closes replaced origins after their last read."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Final

from cachefs_daemon.origin.base import Origin, PreconnectingOrigin

log = logging.getLogger(__name__)

# Most origins of one mount that are prepared: of a mount of thousands of datasets most are not read soon.
MAX_PREPARED: Final = 8
# Seconds after which no read uses a replaced origin any more: longer than any read takes.
RETIRED_SECONDS: Final = 600.0


class OriginUpkeep:
    """Prepares and retires origins. Used on the event loop."""

    def __init__(self) -> None:
        self._preparing: set[asyncio.Task[None]] = set()  # tasks that open origins
        self._retired: list[tuple[Origin, float]] = []  # each with the loop time at which it was replaced

    def prepare(self, origins: Iterable[Origin]) -> None:
        """Open, in the background, what the first reads of these origins would wait for."""
        able = [origin for origin in origins if isinstance(origin, PreconnectingOrigin)]
        task = asyncio.create_task(_prepare(able[:MAX_PREPARED]))
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)

    def retire(self, origin: Origin) -> None:
        """Close *origin* later: reads that it has begun go on."""
        self._retired.append((origin, asyncio.get_running_loop().time()))

    async def close_retired(self, after: float = RETIRED_SECONDS) -> None:
        """Close the origins that were replaced at least *after* seconds ago."""
        now = asyncio.get_running_loop().time()
        due = [origin for origin, when in self._retired if now - when >= after]
        self._retired = [(origin, when) for origin, when in self._retired if now - when < after]
        for origin in due:
            await origin.close()

    async def close(self) -> None:
        for task in self._preparing:
            task.cancel()
        await asyncio.gather(*self._preparing, return_exceptions=True)
        await self.close_retired(0)


async def _prepare(origins: Sequence[PreconnectingOrigin]) -> None:
    """Prepare origins one after the other. Errors appear again when the origin is read."""
    for origin in origins:
        try:
            await origin.preconnect()
        except Exception as error:
            log.info("an origin cannot be opened before it is read: %s", error)
