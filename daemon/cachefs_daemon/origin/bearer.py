"""Tokens that prove to a store who asks: found in a thread, kept while they are good, and found anew when refused."""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final, NamedTuple

# Seconds before its end from which a token is not used any more.
_MARGIN: Final = 60.0
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
        self._finding = asyncio.Lock()
        self._looked = -math.inf  # monotonic seconds

    async def headers(self) -> dict[str, str]:
        """What a request is sent with. Raises CachefsError."""
        if not self._is_good():
            async with self._finding:
                if not self._is_good():
                    self._token = await asyncio.to_thread(self._find)
                    self._looked = time.monotonic()
        return {"Authorization": f"Bearer {self._token.text}"} if self._token and self._token.text else {}

    def refused(self) -> bool:
        """A server has refused the token. Returns whether another look for one may help, as the last one was not just
        now."""
        if time.monotonic() - self._looked < RENEW_SECONDS:
            return False
        self._token = None
        return True

    def _is_good(self) -> bool:
        return self._token is not None and time.time() < self._token.expires - _MARGIN
