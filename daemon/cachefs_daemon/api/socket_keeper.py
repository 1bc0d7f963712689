"""Creates a socket of the daemon again after another program has removed it."""

import logging
from collections.abc import Awaitable, Callable

from cachefs.errors import CachefsError
from cachefs_daemon.api.socket_place import SocketPlace, Standing

log = logging.getLogger(__name__)


class SocketKeeper:
    """Watches one socket. A failure to create it is logged once, and retried at each look."""

    def __init__(self, place: SocketPlace, listen: Callable[[], Awaitable[None]]) -> None:
        """listen: creates the socket; raises CachefsError."""
        self._place = place
        self._listen = listen
        # At the last look. Another daemon that starts at our path needs a moment until it listens, so a foreign socket
        # is left alone at the first look.
        self._before = Standing.OURS
        # The error that was logged last.
        self._said = ""

    async def look(self) -> None:
        before, self._before = self._before, self._place.standing()
        if self._before == Standing.OURS:
            self._said = ""
        elif self._before == Standing.GONE or before == Standing.TAKEN:
            await self._make_again()

    async def _make_again(self) -> None:
        path = self._place.path
        try:
            await self._listen()
        except CachefsError as error:
            if str(error) != self._said:
                self._said = str(error)
                log.error(
                    "%s is no longer this daemon's, so no program can connect to it; trying again: %s", path, error
                )
        else:
            log.warning("%s had been removed, such as by a cleaner of temporary files; it is there again", path)
