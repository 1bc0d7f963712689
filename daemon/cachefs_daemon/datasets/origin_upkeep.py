"""Origins are opened before they are read, and closed when nobody reads through them any more."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Final

from cachefs_daemon.origin.base import Origin, PreparedOrigin

log = logging.getLogger(__name__)

# Datasets of one mount whose origins are prepared, at most: of a mount of thousands most are not read soon.
MOST_PREPARED: Final = 8
# Seconds after which nobody reads any more through an origin that another one has replaced: more than any read takes.
RETIRED_SECONDS: Final = 600.0


class OriginUpkeep:
    """Used on the event loop."""

    def __init__(self) -> None:
        self._preparing: set[asyncio.Task[None]] = set()  # in which origins are opened
        self._retired: list[tuple[Origin, float]] = []  # each with the loop time at which it was replaced

    def prepare(self, origins: Iterable[Origin]) -> None:
        """Somebody is about to read these: have them open what first reads would wait for."""
        able = [origin for origin in origins if isinstance(origin, PreparedOrigin)]
        task = asyncio.create_task(_prepare(able[:MOST_PREPARED]))
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)

    def retire(self, origin: Origin) -> None:
        """Another one has taken its place; reads that it has begun go on."""
        self._retired.append((origin, asyncio.get_running_loop().time()))

    async def close_retired(self, after: float = RETIRED_SECONDS) -> None:
        """Close those that were replaced so many seconds ago."""
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


async def _prepare(origins: Sequence[PreparedOrigin]) -> None:
    """One after the other. What is wrong is said when somebody reads."""
    for origin in origins:
        try:
            await origin.prepare()
        except Exception as error:
            log.info("an origin cannot be opened before it is read: %s", error)
