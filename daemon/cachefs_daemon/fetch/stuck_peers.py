"""Tracks stuck peers: they are alive and accept requests, but blocks do not arrive while a reader waits.

Examples: a daemon that hangs behind a healthy peer server, or a disk that hangs. Probes reach such a node, so it does
not count as dead, and each reader would wait for it anew.
"""

from collections.abc import Callable
from typing import Final

from cachefs_daemon.runtime.backoff import Backoff

# Consecutive late requests after which a peer is skipped.
MOST_LATE: Final = 2
# Seconds until a skipped peer is asked again, once: at first, and at most. Doubled each time.
FIRST_PAUSE: Final = 2.0
LONGEST_PAUSE: Final = 60.0


class StuckPeers:
    """Backoff by node id and kind of request (fetch): a peer may serve the blocks it has, and yet not fetch others. All
    times are of one clock."""

    def __init__(self) -> None:
        self._late: dict[tuple[str, bool], Backoff] = {}

    def keep(self, is_known: Callable[[str], bool]) -> None:
        """Forget peers for whose id *is_known* returns False: they have left the cluster."""
        self._late = {key: one for key, one in self._late.items() if is_known(key[0])}

    def may_ask(self, node: str, now: float, *, fetch: bool) -> bool:
        """Return whether the peer is worth a request."""
        late = self._late.get((node, fetch))
        return late is None or late.failures < MOST_LATE or late.is_due(now)

    def asked(self, node: str, now: float, *, fetch: bool) -> None:
        """Record a request. While the peer is skipped, this holds back other requests for the next pause."""
        late = self._late.get((node, fetch))
        if late is not None and late.failures >= MOST_LATE:
            late.wait(now)

    def late(self, node: str, asked: float, now: float, *, fetch: bool) -> None:
        """Record that a block requested at *asked* did not arrive in time."""
        late = self._late.setdefault((node, fetch), _backoff())
        if late.failures >= MOST_LATE and asked < late.until - late.pause:
            return  # requested before the peer was skipped
        late.fail(now)

    def answered(self, node: str, *, fetch: bool) -> None:
        """Record any response, with a block or without."""
        self._late.pop((node, fetch), None)


def _backoff() -> Backoff:
    """Return a Backoff whose pause is FIRST_PAUSE when the peer is skipped for the first time."""
    return Backoff(FIRST_PAUSE * 2.0 ** (1 - MOST_LATE), LONGEST_PAUSE)
