"""Outage of an origin, with a log line after it has lasted a while, and one at its end.

Reads wait during an outage, which users could not explain without a line. One line per read or attempt would fill the
log.
"""

import logging
import time
from typing import Final

log = logging.getLogger(__name__)

# Seconds without any response that count as an outage. One refusal between many responses is none.
OUTAGE_SECONDS: Final = 1.0


class Outage:
    """The availability of one origin. Used on the event loop."""

    def __init__(self, name: str) -> None:
        """name: of the origin, for people."""
        self._name = name
        self._since: float | None = None  # monotonic time of the first failure since the last response
        self._is_logged = False
        self._last_failure = 0.0  # monotonic time of the last failure
        self.reason = ""  # of the last failure

    @property
    def seconds(self) -> float:
        """Seconds since the origin last answered; 0 if that is no outage (yet)."""
        return time.monotonic() - self._since if self._is_logged and self._since is not None else 0.0

    @property
    def seconds_since_failure(self) -> float:
        """Seconds since the last failure, in an outage; else 0."""
        return time.monotonic() - self._last_failure if self._is_logged else 0.0

    def note_failure(self, reason: str) -> None:
        """Record a transient failure."""
        now = self._last_failure = time.monotonic()
        self.reason = reason
        if self._since is None:
            self._since = now
        elif not self._is_logged and now - self._since >= OUTAGE_SECONDS:
            self._is_logged = True
            log.warning("%s has not answered for %.0f s: %s", self._name, now - self._since, reason)

    def note_response(self) -> None:
        """Record any response of the origin."""
        if self._is_logged and self._since is not None:
            log.warning("%s answers again, after %.0f s", self._name, time.monotonic() - self._since)
        self._since, self._is_logged = None, False
