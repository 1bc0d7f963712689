"""When a child process of a mount that has ended is started again: the more often it ends soon, the later."""

import logging
import time
from typing import Final

log = logging.getLogger(__name__)

LONGEST_PAUSE: Final = 60.0


class Restarts:
    """Of one child process. It is started again after *first* seconds, then after twice as many, and so on."""

    def __init__(self, first: float = 1.0, longest: float = LONGEST_PAUSE) -> None:
        """first, longest: pauses, in seconds."""
        self.due = 0.0  # when it may be started (monotonic seconds)
        self._first = first
        self._longest = longest
        self._began: float | None = None  # when it was started (monotonic seconds), if it was
        self._pause = 0.0  # seconds before the last start

    @property
    def is_due(self) -> bool:
        """May it be started?"""
        return time.monotonic() >= self.due

    def begin(self) -> None:
        """Note that it is started."""
        self._began = time.monotonic()

    def end(self, what: str, *, level: int = logging.WARNING) -> None:
        """Note that it has ended or could not be started, and log *what* has happened, but no more once the pause is
        the longest."""
        now = time.monotonic()
        if self._began is not None and now - self._began > self._longest:
            self._pause = 0.0
        if self._pause == self._longest:
            level = logging.DEBUG
        self._pause = min(max(self._first, 2 * self._pause), self._longest)
        self.due = now + self._pause
        self._began = None
        log.log(level, "%s; the next is started in %.4g s", what, self._pause)
