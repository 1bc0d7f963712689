"""Deadline of a request to an origin: the latest deadline among those that wait for it."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from types import TracebackType

from cachefs.errors import CachefsError


class Deadline:
    """A deadline that can be extended while the work is in progress. Used on one event loop.

    As a context manager it ends the work with TimeoutError at the deadline. It is not reentrant.
    """

    def __init__(self, until: float, pause: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        """until: loop time. pause: sleeps for some seconds between two attempts."""
        self.until = until
        self.pause = pause
        self.last_error: CachefsError | None = None  # the error of the last attempt, which is retried
        self._timer: _DeadlineTimer | None = None  # while the deadline is enforced
        self._task: asyncio.Task[object] | None = None  # the task that is cancelled at the deadline
        self._cancelling = 0  # the task's cancel requests before it was entered
        self._expired = False

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """Return a deadline *seconds* from now."""
        return cls(asyncio.get_running_loop().time() + seconds)

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self.until - asyncio.get_running_loop().time()

    def extend(self, until: float) -> bool:
        """Extend the deadline to *until* (loop time). Return False if the work has just been given up."""
        if self._timer is not None and (self._expired or self.seconds_left <= 0):
            return False
        self.until = max(self.until, until)
        return True

    def enforced(self) -> "Deadline":
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
        self._timer = _timer_of(task.get_loop())
        self._timer.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watch, self._timer = self._timer, None
        task, self._task = self._task, None
        if watch is not None:
            watch.remove(self)
        # As asyncio.timeout does it: other code may have cancelled the task too.
        alone = self._expired and task is not None and task.uncancel() <= self._cancelling
        if alone and kind is asyncio.CancelledError:
            raise TimeoutError from error


class _DeadlineTimer:
    """One timer for all deadlines of an event loop. A timer for each would take 4 us of every read of an origin."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._deadlines: set[Deadline] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._next = math.inf  # loop time of the timer

    def add(self, one: Deadline) -> None:
        self._deadlines.add(one)
        if one.until < self._next:
            self._set_timer(one.until)

    def remove(self, one: Deadline) -> None:
        # The timer stays, since the next deadline will be at about the same time.
        self._deadlines.discard(one)

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next = when
        self._timer = self.loop.call_at(when, self._expire_due) if when < math.inf else None

    def _expire_due(self) -> None:
        now = self.loop.time()
        for one in [one for one in self._deadlines if one.until <= now]:
            self._deadlines.discard(one)
            one.expire()
        self._timer = None
        self._set_timer(min((one.until for one in self._deadlines), default=math.inf))


_last_timer: _DeadlineTimer | None = None


def _timer_of(loop: asyncio.AbstractEventLoop) -> _DeadlineTimer:
    """Return the watch of *loop*. There is one loop, except in tests."""
    global _last_timer
    if _last_timer is None or _last_timer.loop is not loop:
        _last_timer = _DeadlineTimer(loop)
    return _last_timer
