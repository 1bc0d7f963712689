"""Creates a socket of the daemon again after another program has removed it."""

import logging
from collections.abc import Awaitable, Callable

from cachefs.errors import CachefsError
from cachefs_daemon.api.socket_path import PathOwner, SocketPath

log = logging.getLogger(__name__)


class SocketKeeper:
    """Watches one socket. A failure to create it is logged once, and retried at each look."""

    def __init__(self, path: SocketPath, listen: Callable[[], Awaitable[None]]) -> None:
        """listen: creates the socket; raises CachefsError."""
        self._socket_path = path
        self._listen = listen
        # At the last look. Another daemon that starts at our path needs a moment until it listens, so a foreign socket
        # is left alone at the first look.
        self._last_owner = PathOwner.OURS
        # The error that was logged last.
        self._logged_error = ""

    async def check(self) -> None:
        before, self._last_owner = self._last_owner, self._socket_path.owner()
        if self._last_owner == PathOwner.OURS:
            self._logged_error = ""
        elif self._last_owner == PathOwner.GONE or before == PathOwner.TAKEN:
            await self._create_again()

    async def _create_again(self) -> None:
        path = self._socket_path.path
        try:
            await self._listen()
        except CachefsError as error:
            if str(error) != self._logged_error:
                self._logged_error = str(error)
                log.error(
                    "%s is no longer this daemon's socket, so clients cannot connect; trying again: %s", path, error
                )
        else:
            log.warning("%s had been removed, such as by a cleaner of temporary files; it is there again", path)
