"""When the requests of an origin go through aiobotocore instead of our own client, and what the log says of it.

Each answer that our client does not take costs a second request. Where a server gives nothing else, our client is not
asked for a while.
"""

import logging
import math
import time
from typing import Final

log = logging.getLogger(__name__)

# Unusual answers in a row after which our client is not asked: for so many seconds first, and twice as long each time.
_ENOUGH: Final = 16
_SHORTEST: Final = 1.0
_LONGEST: Final = 300.0
# Seconds between two lines in the log.
_TOLD_EVERY: Final = 3600.0


class Detour:
    """Used on the event loop."""

    def __init__(self, name: str) -> None:
        """name: how a person calls the origin."""
        self._name = name
        self._in_a_row = 0
        self._all = 0
        self._pause = 0.0
        self._until = 0.0  # monotonic seconds; 0: it is not taken
        self._told = -math.inf  # monotonic seconds

    @property
    def is_taken(self) -> bool:
        """Whether our own client is not to be asked."""
        return self._until > 0 and time.monotonic() < self._until

    def usual(self) -> None:
        """Our client has taken an answer."""
        self._in_a_row, self._pause, self._until = 0, 0.0, 0.0

    def unusual(self, reason: str) -> None:
        """Our client has not taken an answer, or could not ask for it."""
        now = time.monotonic()
        self._in_a_row += 1
        self._all += 1
        if self._in_a_row >= _ENOUGH and now >= self._until:
            self._pause = min(_LONGEST, max(_SHORTEST, 2 * self._pause))
            self._until = now + self._pause
        if now - self._told >= _TOLD_EVERY:
            self._told = now
            log.warning(
                "%s: %s; such objects are read through aiobotocore, which takes more processor time (%d so far)",
                self._name, reason, self._all,
            )  # fmt: skip
