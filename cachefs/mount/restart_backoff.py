"""Backoff for restarts of a mount's child process: the more often it ends soon, the longer the pause."""

import logging
import time
from typing import Final

log = logging.getLogger(__name__)

LONGEST_PAUSE: Final = 60.0


class RestartBackoff:
    """The backoff of one child process: a pause of *first* seconds, then of twice as many, and so on."""

    def __init__(self, first: float = 1.0, longest: float = LONGEST_PAUSE) -> None:
        """first, longest: pauses, in seconds."""
        self.due = 0.0  # earliest time of the next start (monotonic seconds)
        self._first = first
        self._longest = longest
        self._began: float | None = None  # time of the start (monotonic seconds); None while it does not run
        self._pause = 0.0  # seconds before the last start

    @property
    def is_due(self) -> bool:
        """True when the process may be started."""
        return time.monotonic() >= self.due

    def record_start(self) -> None:
        """Record a start."""
        self._began = time.monotonic()

    def record_end(self, what: str, *, level: int = logging.WARNING) -> None:
        """Record that the process has ended or could not be started. Logs *what* has happened, as a warning until the
        pause has reached its longest."""
        now = time.monotonic()
        if self._began is not None and now - self._began > self._longest:
            self._pause = 0.0
        if self._pause == self._longest:
            level = logging.DEBUG
        self._pause = min(max(self._first, 2 * self._pause), self._longest)
        self.due = now + self._pause
        self._began = None
        log.log(level, "%s; the next is started in %.4g s", what, self._pause)
