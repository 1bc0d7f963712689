"""Tracks peers that give no heartbeat while readers wait for them: stopped, cut off, or hanging as a whole.

A live peer sends a heartbeat every 0.1 s while it fetches a block (see `cachefs_daemon.peers.signs`), and sends blocks
that it has at once. So half a second without a heartbeat says much more than half a second without the block, and
readers then go on to the next source. Until the peer sends a heartbeat again, readers skip it, except for one try per
pause. Meanwhile the peer is probed, and counts as dead if the probe fails. Fetches without a waiting reader still use
the peer until then.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

# Seconds without a heartbeat after which a reader asks another source too: for a peer asked whether it has a block, and
# for a peer asked to fetch it, where the next source may be the origin. On an overloaded machine (six busy processes
# per processor) heartbeats are up to 0.2 s late.
SILENT_HERE: Final = 0.3
SILENT_FETCH: Final = 0.5
# Seconds until a reader tries the peer again: at first, and at most. Doubled each time.
FIRST_PAUSE: Final = 4.0
LONGEST_PAUSE: Final = 60.0


@dataclass(slots=True)
class _Silence:
    noticed: float
    pause: float
    until: float  # earliest time of the next try by a reader


class SilentPeers:
    """Silent peers by node id and kind of request (fetch): a peer may serve the blocks it has, and yet not fetch
    others. All times are of one clock."""

    def __init__(self) -> None:
        self._silent: dict[tuple[str, bool], _Silence] = {}

    def keep(self, is_known: Callable[[str], bool]) -> None:
        """Forget peers for whose id *is_known* returns False: they have left the cluster."""
        self._silent = {key: one for key, one in self._silent.items() if is_known(key[0])}

    def noticed_at(self) -> list[tuple[str, bool, float]]:
        """Return (node id, fetch, time at which its silence was last noticed)."""
        return [(node, fetch, one.noticed) for (node, fetch), one in self._silent.items()]

    def noticed(self, node: str, asked: float, now: float, *, fetch: bool) -> None:
        """Record that the peer gave no heartbeat since the request at *asked*. A peer that does not serve its own
        blocks counts as silent for fetches too."""
        if not fetch:
            self.noticed(node, asked, now, fetch=True)
        silence = self._silent.get((node, fetch))
        if silence is None:
            self._silent[node, fetch] = _Silence(now, FIRST_PAUSE, now + FIRST_PAUSE)
        elif asked >= silence.noticed:  # otherwise the request was sent before the silence was known
            silence.noticed, silence.pause = now, min(LONGEST_PAUSE, 2 * silence.pause)
            silence.until = now + silence.pause

    def may_ask(self, node: str, now: float, last_sign: float, *, fetch: bool) -> bool:
        """Return whether a reader may wait for the peer. If True for a try, no other reader tries until the pause is
        over."""
        silence = self._silent.get((node, fetch))
        if silence is None:
            return True
        if last_sign > silence.noticed:
            del self._silent[node, fetch]
            return True
        if now < silence.until:
            return False
        silence.until = now + silence.pause
        return True
