"""When a child process of a mount that has ended is started again: the more often it ends soon, the later."""

import logging
import time
from typing import Final

log = logging.getLogger(__name__)

LONGEST_PAUSE: Final = 60.0


class Restarts:
    """Of one child process. It is started again after 1 s, then after 2 s, 4 s and so on."""

    def __init__(self) -> None:
        self._began: float | None = None  # when it was started (monotonic seconds), if it was
        self._pause = 0.0  # seconds before the last start
        self._due = 0.0  # when it may be started (monotonic seconds)

    @property
    def is_due(self) -> bool:
        """May it be started?"""
        return time.monotonic() >= self._due

    def begin(self) -> None:
        """Note that it is started."""
        self._began = time.monotonic()

    def end(self, what: str, *, level: int = logging.WARNING) -> None:
        """Note that it has ended or could not be started, and log *what* has happened, but no more once the pause is
        the longest."""
        now = time.monotonic()
        if self._began is not None and now - self._began > LONGEST_PAUSE:
            self._pause = 0.0
        if self._pause == LONGEST_PAUSE:
            level = logging.DEBUG
        self._pause = min(max(1.0, 2 * self._pause), LONGEST_PAUSE)
        self._due = now + self._pause
        self._began = None
        log.log(level, "%s; the next is started in %.0f s", what, self._pause)
