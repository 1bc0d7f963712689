"""How long an answer of an origin is waited for: as long as the most patient of those who wait for it."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType

from cachefs.errors import CachefsError


class Patience:
    """A deadline that may be put off while something is under way. Used on one event loop."""

    def __init__(self, until: float, rest: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        """until: loop time. rest: waits for so many seconds between two attempts."""
        self.until = until
        self.rest = rest
        self.trouble: CachefsError | None = None  # why the last attempt has failed that is tried again
        self._timer: asyncio.Timeout | None = None

    @classmethod
    def of(cls, seconds: float) -> "Patience":
        """It ends *seconds* from now."""
        return cls(asyncio.get_running_loop().time() + seconds)

    @property
    def left(self) -> float:
        """Seconds until its end; negative after it."""
        return self.until - asyncio.get_running_loop().time()

    def extend(self, until: float) -> bool:
        """Somebody waits until *until* (loop time). False where what was under way has just been given up."""
        if self._timer is not None and (self._timer.expired() or self.left <= 0):
            return False
        if until > self.until:
            self.until = until
            if self._timer is not None:
                self._timer.reschedule(until)
        return True

    def enforced(self) -> "Patience":
        """What runs in it ends with TimeoutError when the patience has ended. Not to be entered twice at a time."""
        return self

    # A generator as context manager would take twice as long, 3 us of each read of an origin.
    async def __aenter__(self) -> None:
        self._timer = asyncio.timeout_at(self.until)
        await self._timer.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timer, self._timer = self._timer, None
        assert timer is not None
        await timer.__aexit__(kind, error, trace)
