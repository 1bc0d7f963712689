"""Bearer tokens of a store: found in a thread, cached until they expire, and renewed when refused."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from cachefs.errors import CachefsError

# Seconds before a token's end from which a new one is looked for.
_MARGIN: Final = 60.0
# Seconds that a request waits for the new token while the old one is valid.
PATIENCE_SECONDS: Final = 1.0
# Seconds between two searches for another token after one was refused.
RENEW_SECONDS: Final = 1.0


class Token(NamedTuple):
    """A bearer token, or the absence of one."""

    # Empty if requests need no token.
    text: str
    # Unix time.
    expires: float = math.inf


class Bearer:
    """The token of one origin. Used on one event loop."""

    def __init__(self, find: Callable[[], Token]) -> None:
        """find: called in a thread; raises CachefsError."""
        self._find = find
        self._token: Token | None = None
        self._finding: asyncio.Task[Token] | None = None
        self._looked = -math.inf  # monotonic seconds

    async def headers(self) -> dict[str, str]:
        """Return the headers that carry the token. Raises CachefsError."""
        token, now = self._token, time.time()
        if token is None or now >= token.expires:
            token = await self._search()
        elif now >= token.expires - _MARGIN:
            with contextlib.suppress(CachefsError, TimeoutError):
                async with asyncio.timeout(PATIENCE_SECONDS):
                    token = await self._search()
        return _header(token)

    def _search(self) -> "asyncio.Future[Token]":
        """Return one search shared by all waiting requests. Since it may hang, it goes on when they no longer wait."""
        if self._finding is None:
            self._finding = asyncio.create_task(asyncio.to_thread(self._find))
            self._finding.add_done_callback(self._found)
        return asyncio.shield(self._finding)

    def refused(self, headers: Mapping[str, str]) -> bool:
        """Handle the refusal of *headers* by a server. Return whether a retry may succeed, with another token or after
        a new search; False if the last search was a moment ago."""
        if self._token is None or headers != _header(self._token):
            return True
        if time.monotonic() - self._looked < RENEW_SECONDS:
            return False
        self._token = None
        return True

    def _found(self, finding: asyncio.Task[Token]) -> None:
        self._finding = None
        if not finding.cancelled() and finding.exception() is None:
            self._token, self._looked = finding.result(), time.monotonic()


def _header(token: Token) -> dict[str, str]:
    return {"Authorization": f"Bearer {token.text}"} if token.text else {}
