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
RENEWAL_WAIT_SECONDS: Final = 1.0
# Seconds between two searches for another token after one was refused.
RENEW_SECONDS: Final = 1.0


class Token(NamedTuple):
    """A bearer token, or the absence of one."""

    # Empty if requests need no token.
    text: str
    # Unix time.
    expires: float = math.inf


class BearerTokens:
    """The token of one origin. Used on one event loop."""

    def __init__(self, find: Callable[[], Token]) -> None:
        """find: called in a thread; raises CachefsError."""
        self._find = find
        self._token: Token | None = None
        self._search_task: asyncio.Task[Token] | None = None
        self._found_at = -math.inf  # monotonic seconds

    async def headers(self) -> dict[str, str]:
        """Return the headers that carry the token. Raises CachefsError."""
        token, now = self._token, time.time()
        if token is None or now >= token.expires:
            token = await self._shared_search()
        elif now >= token.expires - _MARGIN:
            with contextlib.suppress(CachefsError, TimeoutError):
                async with asyncio.timeout(RENEWAL_WAIT_SECONDS):
                    token = await self._shared_search()
        return _header(token)

    def _shared_search(self) -> "asyncio.Future[Token]":
        """Return one search shared by all waiting requests. Since it may hang, it goes on when they no longer wait."""
        # An ended search is not awaited again, not even before its callback has run: that would give the loop no turn.
        if self._search_task is None or self._search_task.done():
            self._search_task = asyncio.create_task(asyncio.to_thread(self._find))
            self._search_task.add_done_callback(self._keep_token)
        return asyncio.shield(self._search_task)

    def handle_refusal(self, headers: Mapping[str, str]) -> bool:
        """Handle the refusal of *headers* by a server. Return whether a retry may succeed, with another token or after
        a new search; False if the last search was a moment ago."""
        if self._token is None or headers != _header(self._token):
            return True
        if time.monotonic() - self._found_at < RENEW_SECONDS:
            return False
        self._token = None
        return True

    def _keep_token(self, finding: asyncio.Task[Token]) -> None:
        if not finding.cancelled() and finding.exception() is None:
            self._token, self._found_at = finding.result(), time.monotonic()


def _header(token: Token) -> dict[str, str]:
    return {"Authorization": f"Bearer {token.text}"} if token.text else {}
