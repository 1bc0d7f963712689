"""Tracks peers that give no heartbeat while readers wait for them: stopped, cut off, or hanging as a whole.

A live peer sends a heartbeat every 0.1 s while it fetches a block (see `cachefs_cluster.peers.heartbeats`), and sends
blocks that it has at once. So half a second without a heartbeat says much more than half a second without the block,
and readers then go on to the next source. Until the peer sends a heartbeat again, readers skip it, except for one try
per pause. Meanwhile the peer is probed, and counts as dead if the probe fails. Fetches without a waiting reader still
use the peer until then.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cachefs.backoff import Backoff

# Seconds without a heartbeat after which a reader asks another source too: for a peer asked whether it has a block, and
# for a peer asked to fetch it, where the next source may be the origin. On an overloaded machine (six busy processes
# per processor) heartbeats are up to 0.2 s late.
SILENT_HOLDER_SECONDS: Final = 0.3
SILENT_FETCH_SECONDS: Final = 0.5
# Seconds until a reader tries the peer again: at first, and at most. Doubled each time.
MIN_PAUSE: Final = 4.0
MAX_PAUSE: Final = 60.0


@dataclass(slots=True)
class _Silence:
    noticed_at: float
    backoff: Backoff  # of tries by readers


class PeerHeartbeatHealth:
    """Silent peers by node id and kind of request (fetch): a peer may serve the blocks it has, and yet not fetch
    others. All times are of one clock."""

    def __init__(self) -> None:
        self._silent: dict[tuple[str, bool], _Silence] = {}

    def keep_known_nodes(self, is_known: Callable[[str], bool]) -> None:
        """Forget peers for whose id *is_known* returns False: they have left the cluster."""
        self._silent = {key: one for key, one in self._silent.items() if is_known(key[0])}

    def silences(self) -> list[tuple[str, bool, float]]:
        """Return (node id, fetch, time at which its silence was last noticed)."""
        return [(node, fetch, one.noticed_at) for (node, fetch), one in self._silent.items()]

    def note_silence(self, node: str, requested_at: float, now: float, *, fetch: bool) -> None:
        """Record that the peer gave no heartbeat since the request at *requested_at*. A peer that does not serve its
        own blocks counts as silent for fetches too."""
        if not fetch:
            self.note_silence(node, requested_at, now, fetch=True)
        silence = self._silent.get((node, fetch))
        if silence is None:
            silence = self._silent[node, fetch] = _Silence(now, Backoff(MIN_PAUSE, MAX_PAUSE))
        elif requested_at < silence.noticed_at:  # the request was sent before the silence was known
            return
        silence.noticed_at = now
        silence.backoff.note_failure(now)

    def can_ask(self, node: str, now: float, last_sign: float, *, fetch: bool) -> bool:
        """Return whether a reader may wait for the peer. If True for a try, no other reader tries until the pause is
        over."""
        silence = self._silent.get((node, fetch))
        if silence is None:
            return True
        if last_sign > silence.noticed_at:
            del self._silent[node, fetch]
            return True
        if not silence.backoff.is_due(now):
            return False
        silence.backoff.restart_pause(now)
        return True
