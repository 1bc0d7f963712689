"""Circuit breaker from our own S3 client to aiobotocore, the fallback client, and its log lines.

Each response that our client rejects costs a second request. If a server sends nothing else, our client is not used for
a while.
"""

import logging
import math
import time
from typing import Final

from cachefs.backoff import Backoff

log = logging.getLogger(__name__)

# Rejected responses in a row after which our client is not used; and for how many seconds at first, and at most.
_FAILURES_TO_SWITCH: Final = 16
_SHORTEST: Final = 1.0
_LONGEST: Final = 300.0
# Seconds between two log lines.
_LOG_SECONDS: Final = 3600.0


class FallbackState:
    """The state of the fallback for one server. Used on the event loop."""

    def __init__(self, name: str) -> None:
        """name: of the origin, for people."""
        self._name = name
        self._consecutive = 0
        self._total = 0
        self._backoff = Backoff(_SHORTEST, _LONGEST)  # in monotonic seconds; without failures, the fallback is off
        self._logged_at = -math.inf  # monotonic seconds

    @property
    def is_active(self) -> bool:
        """Whether the fallback client is to be used."""
        return not self._backoff.is_due(time.monotonic())

    def note_accepted(self) -> None:
        """Record a response that our client accepted."""
        self._consecutive = 0
        self._backoff.reset()

    def note_rejected(self, reason: str) -> None:
        """Record a response that our client rejected, or a request that it could not send."""
        now = time.monotonic()
        self._consecutive += 1
        self._total += 1
        if self._consecutive >= _FAILURES_TO_SWITCH and self._backoff.is_due(now):
            self._backoff.note_failure(now)
        if now - self._logged_at >= _LOG_SECONDS:
            self._logged_at = now
            log.warning(
                "%s: %s; such objects are read through aiobotocore, which takes more processor time (%d so far)",
                self._name, reason, self._total,
            )  # fmt: skip
