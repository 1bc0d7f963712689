"""Tokens that prove to a store who asks: found in a thread, kept while they are good, and found anew when refused."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from cachefs.errors import CachefsError

# Seconds before its end from which another token is looked for.
_MARGIN: Final = 60.0
# Seconds that a request waits for it while the one that is there is still good.
PATIENCE_SECONDS: Final = 1.0
# Seconds between two looks for another token than a refused one.
RENEW_SECONDS: Final = 1.0


class Token(NamedTuple):
    """A token."""

    # Empty: none is needed.
    text: str
    # Unix time.
    expires: float = math.inf


class Bearer:
    """The token of one origin. Used on one event loop."""

    def __init__(self, find: Callable[[], Token]) -> None:
        """find: called in a thread; it raises CachefsError."""
        self._find = find
        self._token: Token | None = None
        self._finding: asyncio.Task[Token] | None = None
        self._looked = -math.inf  # monotonic seconds

    async def headers(self) -> dict[str, str]:
        """What a request is sent with. Raises CachefsError."""
        token, now = self._token, time.time()
        if token is None or now >= token.expires:
            token = await self._search()
        elif now >= token.expires - _MARGIN:
            with contextlib.suppress(CachefsError, TimeoutError):
                async with asyncio.timeout(PATIENCE_SECONDS):
                    token = await self._search()
        return _header(token)

    def _search(self) -> "asyncio.Future[Token]":
        """One search for all who wait, and it goes on when they do not wait any more: it may hang."""
        if self._finding is None:
            self._finding = asyncio.create_task(asyncio.to_thread(self._find))
            self._finding.add_done_callback(self._found)
        return asyncio.shield(self._finding)

    def refused(self, headers: Mapping[str, str]) -> bool:
        """A server has refused what a request was sent with. Returns whether there is another token, or another look
        for one may help, since the last one was not just now."""
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
