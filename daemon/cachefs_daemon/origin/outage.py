"""Whether an origin answers, and what the log says where it does not: a line when that has lasted, one when it is over.

Reads wait meanwhile, and without a line a user would not know why. With a line for each read, or for each attempt, the
log would be full of one outage.
"""

import logging
import time
from typing import Final

log = logging.getLogger(__name__)

# Seconds without any answer that are called an outage. One refusal between many answers is none.
NOTICED_AFTER: Final = 1.0


class Outage:
    """Whether an origin answers. Used on the event loop."""

    def __init__(self, name: str) -> None:
        """name: how a person calls the origin."""
        self._name = name
        self._since: float | None = None  # monotonic seconds of the first failure since the last answer
        self._told = False
        self._last = 0.0  # monotonic seconds of the last failure
        self.reason = ""  # of the last failure

    @property
    def seconds(self) -> float:
        """How long the origin has not answered; 0 where that is no outage (yet)."""
        return time.monotonic() - self._since if self._told and self._since is not None else 0.0

    @property
    def last_asked(self) -> float:
        """Seconds since the last failure, in an outage; else 0."""
        return time.monotonic() - self._last if self._told else 0.0

    def failed(self, reason: str) -> None:
        """An attempt has failed for a reason that may pass."""
        now = self._last = time.monotonic()
        self.reason = reason
        if self._since is None:
            self._since = now
        elif not self._told and now - self._since >= NOTICED_AFTER:
            self._told = True
            log.warning("%s has not answered for %.0f s: %s", self._name, now - self._since, reason)

    def answered(self) -> None:
        """The origin has answered, whatever it said."""
        if self._told and self._since is not None:
            log.warning("%s answers again, after %.0f s", self._name, time.monotonic() - self._since)
        self._since, self._told = None, False
