"""Tracks stuck peers: they are alive and accept requests, but blocks do not arrive while a reader waits.

Examples: a daemon that hangs behind a healthy peer server, or a disk that hangs. Probes reach such a node, so it does
not count as dead, and each reader would wait for it anew.
"""

from collections.abc import Callable
from typing import Final

from cachefs.backoff import Backoff

# Consecutive late requests after which a peer is skipped.
MAX_LATE_REQUESTS: Final = 2
# Seconds until a skipped peer is asked again, once: at first, and at most. Doubled each time.
MIN_PAUSE: Final = 2.0
MAX_PAUSE: Final = 60.0


class PeerResponseHealth:
    """Backoff by node id and kind of request (fetch): a peer may serve the blocks it has, and yet not fetch others. All
    times are of one clock."""

    def __init__(self) -> None:
        self._backoffs: dict[tuple[str, bool], Backoff] = {}

    def keep_known_nodes(self, is_known: Callable[[str], bool]) -> None:
        """Forget peers for whose id *is_known* returns False: they have left the cluster."""
        self._backoffs = {key: one for key, one in self._backoffs.items() if is_known(key[0])}

    def can_ask(self, node: str, now: float, *, fetch: bool) -> bool:
        """Return whether the peer is worth a request."""
        late = self._backoffs.get((node, fetch))
        return late is None or late.failures < MAX_LATE_REQUESTS or late.is_due(now)

    def note_request(self, node: str, now: float, *, fetch: bool) -> None:
        """Record a request. While the peer is skipped, this holds back other requests for the next pause."""
        late = self._backoffs.get((node, fetch))
        if late is not None and late.failures >= MAX_LATE_REQUESTS:
            late.restart_pause(now)

    def note_late_response(self, node: str, requested_at: float, now: float, *, fetch: bool) -> None:
        """Record that a block requested at *requested_at* did not arrive in time."""
        late = self._backoffs.setdefault((node, fetch), _backoff())
        if late.failures >= MAX_LATE_REQUESTS and requested_at < late.until - late.pause:
            return  # requested before the peer was skipped
        late.note_failure(now)

    def note_response(self, node: str, *, fetch: bool) -> None:
        """Record any response, with a block or without."""
        self._backoffs.pop((node, fetch), None)


def _backoff() -> Backoff:
    """Return a Backoff whose pause is MIN_PAUSE when the peer is skipped for the first time."""
    return Backoff(MIN_PAUSE * 2.0 ** (1 - MAX_LATE_REQUESTS), MAX_PAUSE)
