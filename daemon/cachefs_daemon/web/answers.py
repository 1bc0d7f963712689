"""Caches responses for several clients: each is made once a second at most."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

FRESH_SECONDS: Final = 1.0
# Requests whose responses are kept.
MOST_KEPT: Final = 64


@dataclass(slots=True)
class _Answer:
    made: float = float("-inf")  # monotonic seconds
    body: bytes = b""
    making: asyncio.Lock = field(default_factory=asyncio.Lock)


class Answers:
    """Caches the MOST_KEPT latest responses. Used on the event loop."""

    def __init__(self) -> None:
        self._kept: dict[str, _Answer] = {}  # by request, the latest one last

    async def get(self, question: str, make: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return the result of *make*, at most a second old. A failure is not kept."""
        answer = self._kept.pop(question, None) or _Answer()
        self._kept[question] = answer
        while len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        async with answer.making:
            if time.monotonic() - answer.made >= FRESH_SECONDS:
                answer.body = await make()
                answer.made = time.monotonic()
            return answer.body
