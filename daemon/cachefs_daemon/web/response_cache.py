"""Caches responses for several clients: each is made once a second at most."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

FRESH_SECONDS: Final = 1.0
# Requests whose responses are kept.
MAX_RESPONSES: Final = 64


@dataclass(slots=True)
class _CachedResponse:
    made_at: float = float("-inf")  # monotonic seconds
    body: bytes = b""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class ResponseCache:
    """Caches the MAX_RESPONSES latest responses. Used on the event loop."""

    def __init__(self) -> None:
        self._responses: dict[str, _CachedResponse] = {}  # by request, the latest one last

    async def get_or_make(self, request: str, make: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return the result of *make*, at most a second old. A failure is not kept."""
        response = self._responses.pop(request, None) or _CachedResponse()
        self._responses[request] = response
        while len(self._responses) > MAX_RESPONSES:
            del self._responses[next(iter(self._responses))]
        async with response.lock:
            if time.monotonic() - response.made_at >= FRESH_SECONDS:
                response.body = await make()
                response.made_at = time.monotonic()
            return response.body
