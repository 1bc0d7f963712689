"""Answers that several people may get: made once a second at most, however many ask."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

FRESH_SECONDS: Final = 1.0
# Questions whose answers are kept.
MOST_KEPT: Final = 64


@dataclass(slots=True)
class _Answer:
    made: float = float("-inf")  # monotonic seconds
    body: bytes = b""
    making: asyncio.Lock = field(default_factory=asyncio.Lock)


class Answers:
    """Used on the event loop."""

    def __init__(self) -> None:
        self._kept: dict[str, _Answer] = {}  # by question, the latest one last

    async def get(self, question: str, make: Callable[[], Awaitable[bytes]]) -> bytes:
        """What *make* says, now or a second ago. An answer that fails is not kept."""
        answer = self._kept.pop(question, None) or _Answer()
        self._kept[question] = answer
        while len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        async with answer.making:
            if time.monotonic() - answer.made >= FRESH_SECONDS:
                answer.body = await make()
                answer.made = time.monotonic()
            return answer.body
