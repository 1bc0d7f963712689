"""Deadline of a request to an origin: the latest deadline among those that wait for it."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from types import TracebackType

from cachefs.errors import CachefsError


class Patience:
    """A deadline that can be extended while the work is in progress. Used on one event loop.

    As a context manager it ends the work with TimeoutError at the deadline. It is not reentrant.
    """

    def __init__(self, until: float, rest: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        """until: loop time. rest: sleeps for some seconds between two attempts."""
        self.until = until
        self.rest = rest
        self.trouble: CachefsError | None = None  # the error of the last attempt, which is retried
        self._watch: _Watch | None = None  # while the deadline is enforced
        self._task: asyncio.Task[object] | None = None  # the task that is cancelled at the deadline
        self._cancelling = 0  # the task's cancel requests before it was entered
        self._expired = False

    @classmethod
    def of(cls, seconds: float) -> "Patience":
        """Return a deadline *seconds* from now."""
        return cls(asyncio.get_running_loop().time() + seconds)

    @property
    def left(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self.until - asyncio.get_running_loop().time()

    def extend(self, until: float) -> bool:
        """Extend the deadline to *until* (loop time). Return False if the work has just been given up."""
        if self._watch is not None and (self._expired or self.left <= 0):
            return False
        self.until = max(self.until, until)
        return True

    def enforced(self) -> "Patience":
        """Return self, as a context manager."""
        return self

    def expire(self) -> None:
        """Cancel the work: the deadline has passed."""
        self._expired = True
        if self._task is not None:
            self._task.cancel()

    def __enter__(self) -> None:
        self._task = task = asyncio.current_task()
        assert task is not None
        self._cancelling = task.cancelling()
        self._expired = False
        self._watch = _watch(task.get_loop())
        self._watch.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watch, self._watch = self._watch, None
        task, self._task = self._task, None
        if watch is not None:
            watch.remove(self)
        # As asyncio.timeout does it: other code may have cancelled the task too.
        alone = self._expired and task is not None and task.uncancel() <= self._cancelling
        if alone and kind is asyncio.CancelledError:
            raise TimeoutError from error


class _Watch:
    """One timer for all deadlines of an event loop. A timer for each would take 4 us of every read of an origin."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._all: set[Patience] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._next = math.inf  # loop time of the timer

    def add(self, one: Patience) -> None:
        self._all.add(one)
        if one.until < self._next:
            self._set(one.until)

    def remove(self, one: Patience) -> None:
        # The timer stays, since the next deadline will be at about the same time.
        self._all.discard(one)

    def _set(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next = when
        self._timer = self.loop.call_at(when, self._look) if when < math.inf else None

    def _look(self) -> None:
        now = self.loop.time()
        for one in [one for one in self._all if one.until <= now]:
            self._all.discard(one)
            one.expire()
        self._timer = None
        self._set(min((one.until for one in self._all), default=math.inf))


_last: _Watch | None = None


def _watch(loop: asyncio.AbstractEventLoop) -> _Watch:
    """Return the watch of *loop*. There is one loop, except in tests."""
    global _last
    if _last is None or _last.loop is not loop:
        _last = _Watch(loop)
    return _last
